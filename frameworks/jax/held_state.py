"""What compressors remember, as part of a pytree: arrays by the gradient's path.

A compressor's state is a dict of arrays, perhaps with dicts in it, that it fills as it goes. A
pytree has one structure throughout: so all arrays are there from the start, by keys such as
"residual" and "stage2.0/residual", and a flag says of each whether the compressor has made it yet.
What JAX has no dtype for (64 bits, Python's numbers) is there as bytes, and the key says what.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ringlet.compressors.core.context import State
from ringlet.ring.dtypes import Array

Held = dict[str, dict[str, Any]]  # arrays by path and key

_PLAIN = ("float16", "float32", "int8", "int16", "int32", "uint8", "uint16", "uint32", "bool")
_ROOM = (
    "For another compression, on all ranks: state = hvd.carry_over(state, transformation, params) "
    "keeps residuals, and init(params) begins anew"
)
_NUMBERS = {"py_int": int, "py_float": float, "py_bool": bool}


def flattened(state: State) -> dict[str, Array]:
    """Return a state's arrays by key, views where they can be; all but its "step"."""
    found: dict[str, Array] = {}
    for key, value in _leaves(state, ""):
        if key == "step":  # that of all gradients
            continue
        if isinstance(value, bool | int | float):
            wide = np.array(value, np.float64 if isinstance(value, float) else np.int64)
            found[f"{key}:py_{type(value).__name__}"] = wide.reshape(1).view(np.uint8)
        elif value.dtype.name in _PLAIN:
            found[key] = value
        else:
            plain = np.ascontiguousarray(value)
            bits = plain.reshape(-1).view(np.uint8).reshape(*plain.shape, plain.itemsize)
            found[f"{key}:{value.dtype.name}"] = bits
    return found


def nested(arrays: Mapping[str, Array]) -> State:
    """Return the state that ``flattened`` made ``arrays`` of; arrays are views of them."""
    state: State = {}
    for key, array in arrays.items():
        path, _, kind = key.partition(":")
        *outer, last = path.split("/")
        place = state
        for name in outer:
            place = place.setdefault(name, {})
        if kind.startswith("py_"):
            place[last] = _NUMBERS[kind](
                array.view(np.float64 if kind == "py_float" else np.int64)[0]
            )
        elif kind:
            place[last] = array.reshape(-1).view(kind).reshape(array.shape[:-1])
        else:
            place[last] = array
    return state


def merge_layouts(states: Sequence[Mapping[str, Array]]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of all arrays in ``states``, flattened ones of one tensor, by key.

    Raises ValueError where an array has not the same shape in all of them.
    """
    found: dict[str, tuple[str, tuple[int, ...]]] = {}
    for state in states:
        for key, array in state.items():
            kind = array.dtype.name, tuple(array.shape)
            if found.setdefault(key, kind) != kind:
                raise ValueError(
                    f"it remembers {key!r} of another shape in later steps ({kind} after "
                    f"{found[key]}), which no pytree of one structure can hold"
                )
    return dict(sorted(found.items()))


def store(state: State, into: Mapping[str, Array], present: Array, what: str) -> None:
    """Copy what ``state`` holds to the arrays ``into``, unless it lies there already.

    ``present`` is set for what is there, by the order of ``into``. Raises ValueError, naming
    ``what``, for arrays that have no place.
    """
    made = flattened(state)
    for place, (key, target) in enumerate(into.items()):
        source = made.pop(key, None)
        present[place] = source is not None
        if source is None:
            target[...] = 0
        elif source.shape != target.shape or source.dtype != target.dtype:
            raise ValueError(
                f"{what} now remembers {key!r} as {source.dtype}{list(source.shape)}; the state "
                f"has room for {target.dtype}{list(target.shape)}. {_ROOM}"
            )
        elif source.ctypes.data != target.ctypes.data:
            target[...] = source
    if made:
        raise ValueError(
            f"{what} now remembers {sorted(made)}, for which the state has no room. {_ROOM}"
        )


def _leaves(state: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}/")
        else:
            yield f"{prefix}{key}", value
