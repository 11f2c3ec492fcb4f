"""Payloads of variable size as bytes: every array with its name, dtype and length before it.

Payloads of fixed size need none of this; both sides know their layout.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from ringlet.compressors.core.context import Array
from ringlet.compressors.core.errors import PayloadError
from ringlet.compressors.core.traits import Payload

# Raised where the bytes that any compressor makes of the same values change: all ranks of a job
# must have the same, and tests/compressors/wire.json has those of this one.
WIRE_VERSION = 2

_DTYPES = (
    "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64",
    "float16", "float32", "float64", "bool",
)  # fmt: skip
PREFIX = 8  # bytes before a payload in a bucket, which tell its length
_HEAD = struct.Struct("<HxxI")  # number of arrays, bytes in all
_ENTRY = struct.Struct("<BBxxIQ")  # dtype, bytes of the name, zero, elements
_ALIGN = 8


def padded(nbytes: int) -> int:
    """Round up to a multiple of the alignment of arrays in a payload."""
    return -(-nbytes // _ALIGN) * _ALIGN


def serialised_size(payload: Payload) -> int:
    """Return the bytes that ``serialise`` will write."""
    heads = sum(padded(_ENTRY.size + len(name.encode())) for name in payload)
    return _HEAD.size + heads + sum(padded(array.nbytes) for array in payload.values())


def check_payload(label: str, payload: object) -> None:
    """Raise PayloadError unless ``payload`` is a dict of flat arrays that can travel."""
    if not isinstance(payload, dict):
        raise PayloadError(
            f"{label}.compress must return a dict of flat arrays, not {type(payload).__name__}"
        )
    for name, array in payload.items():
        if not isinstance(name, str) or not 0 < len(name.encode()) < 256:
            raise PayloadError(f"{label}.compress: {name!r} is no name for an array")
        if not hasattr(array, "dtype") or array.ndim != 1:
            shape = list(array.shape) if hasattr(array, "shape") else type(array).__name__
            raise PayloadError(
                f"{label}.compress: {name!r} must be a flat array, not {shape}; write "
                "values.reshape(-1), and for a single number x.max(keepdims=True)"
            )
        if not hasattr(array.dtype, "name"):
            raise PayloadError(
                f"{label}.compress: {name!r} is a {type(array).__module__}.{type(array).__name__}; "
                "send arrays of ctx.xp, such as tensor.numpy()"
            )
        if array.dtype.name not in _DTYPES:
            raise PayloadError(
                f"{label}.compress: {name!r} of {array.dtype} cannot travel; send one of "
                f"{', '.join(_DTYPES)}, or a view of such"
            )
        if not array.dtype.isnative:
            raise PayloadError(
                f"{label}.compress: {name!r} of {array.dtype.str} cannot travel: bytes carry no "
                "byte order; leave arrays in the machine's own"
            )


def entry_head(name: str, dtype: np.dtype[Any]) -> bytes:
    """Return what ``serialise`` writes before the data of an array of no elements."""
    encoded = name.encode()
    head = _ENTRY.pack(_DTYPES.index(dtype.name), len(encoded), 0, 0) + encoded
    return head.ljust(padded(len(head)), b"\0")


def serialise(payload: Payload, out: Array) -> int:
    """Write ``payload`` to ``out`` (uint8); return the bytes written."""
    end = _HEAD.size
    view = out.data
    for name, array in payload.items():
        encoded = name.encode()
        _ENTRY.pack_into(view, end, _DTYPES.index(array.dtype.name), len(encoded), 0, array.size)
        view[end + _ENTRY.size : end + _ENTRY.size + len(encoded)] = encoded
        end += padded(_ENTRY.size + len(encoded))
        data = np.ascontiguousarray(array).view(np.uint8)
        out[end : end + data.size] = data
        end += padded(data.size)
    _HEAD.pack_into(view, 0, len(payload), end)
    return end


def deserialise(data: Array) -> Payload:
    """Return the arrays in ``data`` (uint8) as views; PayloadError where the bytes make no sense.

    Nothing is allocated, so a corrupt length cannot ask for memory.
    """
    view = data.data
    if len(view) < _HEAD.size:
        raise PayloadError(f"a payload of {len(view)} bytes is too short for its header")
    count, total = _HEAD.unpack_from(view, 0)
    if total > len(view):
        raise PayloadError(f"a payload says it has {total} bytes, {len(view)} arrived")
    payload: Payload = {}
    start = _HEAD.size
    for _ in range(count):
        if start + _ENTRY.size > total:
            raise PayloadError("a payload ends inside an array's header")
        code, length, _zero, elements = _ENTRY.unpack_from(view, start)
        if code >= len(_DTYPES):
            raise PayloadError(f"a payload holds an array of unknown dtype {code}")
        dtype = np.dtype(_DTYPES[code])
        name = bytes(view[start + _ENTRY.size : start + _ENTRY.size + length])
        start += padded(_ENTRY.size + length)
        nbytes = elements * dtype.itemsize
        if start + nbytes > total:
            raise PayloadError(f"a payload ends inside array {name!r}")
        payload[name.decode(errors="replace")] = data[start : start + nbytes].view(dtype)
        start += padded(nbytes)
    return payload
