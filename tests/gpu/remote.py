"""Arrays that behave like CuPy's where it matters: what would wait for a device raises instead.

``Remote`` wraps a NumPy array. It never becomes a number, a list or a NumPy array; nor do masks
pick out elements, because the host would have to learn how many there are. As in CuPy, NumPy arrays
are refused beside it, and so are options that CuPy lacks.
"""

import types

import numpy as np
from standin.options import refuse_options

WAITING = {"flatnonzero", "nonzero", "argwhere", "unique", "extract", "compress", "asnumpy"}


class Waits(AssertionError):
    """Something made the host wait for the device."""


class Remote(np.lib.mixins.NDArrayOperatorsMixin):
    """An array on a device that is not there."""

    def __init__(self, array):
        self._array = array

    def _wait(self, *_, **__):
        raise Waits("the host waits for the device")

    __array__ = __bool__ = __int__ = __float__ = __complex__ = __index__ = _wait
    item = tolist = tobytes = get = nonzero = __contains__ = _wait

    def __array_function__(self, function, *_):
        raise TypeError(f"np.{function.__name__} of a device array: use ctx.xp")

    def __array_ufunc__(self, ufunc, method, *inputs, **options):
        refuse_options(ufunc.__name__, options)
        if ufunc is np.power:
            raise TypeError("a power need not be exact on a GPU: take xp.square")
        return wrapped(getattr(ufunc, method)(*bare(inputs), **bare(options)))

    def __getitem__(self, key):
        refuse_masks(key)
        return wrapped(self._array[bare(key)])

    def __setitem__(self, key, value):
        if not np.isscalar(value):  # a number needs no count of what it goes to
            refuse_masks(key)
        self._array[bare(key)] = bare(value)

    def __iter__(self):
        return (self[i] for i in range(len(self)))

    def __len__(self):
        return len(self._array)

    def __getattr__(self, name):
        if name.startswith("__"):  # NumPy finds its way in by __array_interface__ as well
            raise AttributeError(name)
        found = getattr(self._array, name)
        if name in ("base", "T", "real"):
            return None if found is None else wrapped(found)
        if not isinstance(found, types.BuiltinMethodType):
            return found
        return _calling(name, found)


def _calling(name, found):
    def call(*args, **options):
        refuse_options(name, options)
        return wrapped(found(*bare(args), **bare(options)))

    return call


def wrapped(found):
    """Return arrays, and numbers that come from them, as ``Remote``."""
    if isinstance(found, tuple):
        return tuple(wrapped(one) for one in found)
    return Remote(np.asarray(found)) if isinstance(found, np.ndarray | np.generic) else found


def bare(given):
    """Return what is inside ``Remote``, deep in tuples, lists and dicts; refuse NumPy arrays."""
    if isinstance(given, tuple | list):
        return type(given)(bare(one) for one in given)
    if isinstance(given, dict):
        return {name: bare(one) for name, one in given.items()}
    if isinstance(given, np.ndarray) and given.ndim:
        raise TypeError("a NumPy array beside a device array")
    return given._array if isinstance(given, Remote) else given


def refuse_masks(key):
    """Raise where a mask picks out elements."""
    for one in key if isinstance(key, tuple) else (key,):
        if isinstance(one, Remote) and one.dtype == bool:
            raise Waits("a mask's elements have to be counted")


def module(name):
    """Return an array module of ``Remote`` arrays."""
    made = types.ModuleType(name)
    made.ndarray = Remote

    def attribute(wanted):
        found = getattr(np, wanted)
        if wanted in WAITING:
            return lambda *_, **__: Remote(found)._wait()
        if isinstance(found, type) or not callable(found):
            return found
        if wanted in ("asarray", "array"):
            return lambda given, *rest: wrapped(found(getattr(given, "_array", given), *rest))
        return _calling(wanted, found)

    made.__getattr__ = attribute
    return made
