"""What a line of a metrics file must be to be drawn: a file may come from anywhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

Record = dict[str, Any]
Check = Callable[[Any], Any]  # returns the value, or raises TypeError or ValueError

_LAST = 2.5e11  # seconds since 1970: the year 9892
_MOST = 1e300  # what is added up stays finite


def checked(record: Any) -> Record | None:
    """Return a record with the fields that are known and of the right type; None if it is none.

    What is required is there; what is optional and wrong, or no finite number, is left out. Of a
    kind that is not known only that is left.
    """
    kind = record.get("kind") if isinstance(record, dict) else None
    if not isinstance(kind, str):
        return None
    try:
        return {"kind": kind} | _fields(record, *_KINDS.get(kind, ({}, {})))
    except (LookupError, TypeError, ValueError, OverflowError):
        return None


def _fields(
    record: Mapping[str, Any], required: Mapping[str, Check], optional: Mapping[str, Check]
) -> Record:
    found = {name: check(record[name]) for name, check in required.items()}
    for name, check in optional.items():
        if record.get(name) is not None:
            try:
                found[name] = check(record[name])
            except (LookupError, TypeError, ValueError, OverflowError):
                continue
    return found


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _whole(value: Any) -> int:
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{value!r} is no number of something")
    return value


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r} is no number")
    if not (math.isfinite(value) and 0 <= value <= _MOST):
        raise ValueError(f"{value!r} is no finite number of at least 0")
    return float(value)


def _time(value: Any) -> float:
    if _number(value) > _LAST:
        raise ValueError(f"{value!r} is no time")
    return float(value)


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return [_text(item) for item in value]


def _versions(value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise TypeError(f"{value!r} is no object")
    return {_text(name): _text(version) for name, version in value.items()}


def _network(value: Any) -> Record:
    return _fields(value, {"bytes_per_s": _number, "latency_s": _number}, {})


def _layers(value: Any) -> list[Record]:
    if not isinstance(value, list):
        raise TypeError(f"{value!r} is no list")
    return [_fields(layer, *_LAYER) for layer in value]


_SECONDS: dict[str, Check] = {
    f"{phase}_s": _number for phase in ("compress", "communicate", "decompress")
}
_ESTIMATES: dict[str, Check] = {"uncompressed_s": _number, "uncompressed_most_s": _number}
_BYTES: dict[str, Check] = {"raw_bytes": _number, "wire_bytes": _number}
_LAYER: tuple[dict[str, Check], dict[str, Check]] = (
    {"name": _text, "compressor": _text, "collective": _text, "elements": _whole} | _BYTES,
    {"norm": _number, "relative_error": _number, "residual_norm": _number},
)
_KINDS: dict[str, tuple[dict[str, Check], dict[str, Check]]] = {
    "run": ({}, {"size": _whole, "rank": _whole, "transport": _text, "hosts": _texts}
            | {"network": _network, "versions": _versions}),
    "step": ({"group": _text, "step": _whole, "time": _time, "seconds": _number}
             | _BYTES | _SECONDS, _ESTIMATES),
    "layers": ({"group": _text, "step": _whole, "layers": _layers}, {}),
    "abandoned": ({}, {"step": _whole}),
    "skipped": ({}, {"step": _whole}),
    "loose": ({"time": _time} | _BYTES | _SECONDS, _ESTIMATES),
    "waiting": ({"text": _text}, {}),
}  # fmt: skip
