"""Whether a checkpoint's record of what compressors remember is whole, and of plain values.

That is looked at before anything is loaded: a file that is damaged, or of something else, must not
leave a job with one half of it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import numpy as np

from ringlet.compressors.core.shard_name import is_shard

VERSION = 1
# What torch.save, orbax and Keras hold, all three of them: see the kit's check of states.
DTYPES = frozenset(
    f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)
) - {"float8"} | {"bool", "complex64", "complex128"}
_MOST = 1 << 62  # steps: they are compared in numbers of 64 bits
_DEEPEST = 16  # dicts in each other: a tensor, its shards, and what is held back of their sums
_SHOWN = 40  # characters of what is no such value
_CURE = "Load another checkpoint, or take {} out of it, to go on without what compression held back"


def whole_record(record: Any, is_array: Callable[[Any], bool], where: str) -> dict[str, Any]:
    """Return a plain copy of ``record``, in which arrays are the same objects.

    ``where`` names it in errors. Raises ValueError, naming the place, unless it is what
    ``residual_store.record`` has made.
    """
    found = _mapping(record, where, where)
    version = found.setdefault("version", VERSION)
    if type(version) is not int or version != VERSION:
        raise ValueError(
            f"{where} is of version {_shown(version)}, and this Ringlet reads {VERSION}: "
            "load it with the release that has saved it"
        )
    states = _mapping(found.get("states"), f"{where}['states']", where)
    found["states"] = {
        name: _state(state, is_array, f"{where}['states'][{name!r}]", where)
        for name, state in states.items()
    }
    for key in ("rank", "size", "step"):
        _count(found.get(key), f"{where}[{key!r}]", where)
    specs = _mapping(found.get("specs", {}), f"{where}['specs']", where)
    for name, spec in specs.items():
        if type(spec) is not str:
            _refuse(f"{where}['specs'][{name!r}]", spec, "a text", where)
    return found | {"specs": specs}


def is_numpy(value: Any) -> bool:
    """Whether ``value`` is an array of NumPy's that a checkpoint may hold."""
    return type(value) is np.ndarray and value.dtype.name in DTYPES and value.dtype.isnative


def _state(value: Any, is_array: Callable[[Any], bool], place: str, where: str) -> dict[str, Any]:
    found = _mapping(value, place, where)
    if "step" in found:
        _count(found["step"], f"{place}['step']", where)
    if place.count("[") > _DEEPEST:
        _refuse(place, value, f"a state, which is at most {_DEEPEST} dicts deep", where)
    for key, inner in found.items():
        if isinstance(inner, Mapping) or is_shard(key):
            found[key] = _state(inner, is_array, f"{place}[{key!r}]", where)
        elif not _is_number(inner) and type(inner) is not str and not is_array(inner):
            _refuse(f"{place}[{key!r}]", inner, "an array, a number or a text", where)
    return found


def _mapping(value: Any, place: str, where: str) -> dict[str, Any]:
    """Return a plain dict of what ``value`` holds, by names."""
    if not isinstance(value, Mapping):
        _refuse(place, value, "a dict", where)
    found = dict(value.items())
    for key in found:
        if type(key) is not str:
            _refuse(f"a key of {place}", key, "a name", where)
    return found


def _count(value: Any, place: str, where: str) -> None:
    if type(value) is not int or not 0 <= value < _MOST:
        _refuse(place, value, "a whole number from 0 on", where)


def _is_number(value: Any) -> bool:
    if type(value) is int:
        return -(1 << 63) <= value < 1 << 63
    return type(value) in (bool, float)


def _refuse(place: str, value: Any, wanted: str, where: str) -> NoReturn:
    raise ValueError(
        f"{place} is {_shown(value)}, not {wanted}: the checkpoint is damaged, or of something "
        f"else. {_CURE.format(where)}"
    )


def _shown(value: Any) -> str:
    """Return ``value`` if it is short and plain, else its type: of what lies, or is long."""
    if value is None or type(value) in (bool, float, str, bytes):
        text = repr(value[:_SHOWN] if isinstance(value, str | bytes) else value)
    elif type(value) is int:
        text = str(value) if abs(value) < 1 << 128 else "a number of many digits"
    else:
        dtype = getattr(value, "dtype", None)
        text = f"a {type(value).__name__}" + (f" of {dtype}" if dtype is not None else "")
    return text
