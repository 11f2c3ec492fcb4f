"""Payloads of variable size as bytes, many a call, as ``core.payload`` writes and reads each.

A payload's row is that of ``base.batched`` where sizes vary: its elements, then for each array
where it lies, and how many elements it has. ``heads`` (uint8, a row an array) are the entries of
arrays as they are before the number of elements is known; ``sizes`` are the bytes of an element.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types

from ringlet.compressors.kernels.cpu.common.intrinsics import pointer
from ringlet.ring.jit import jit

_ALIGN = 8
_LENGTH = 8  # bytes that tell how long the payload behind them is
_HEAD = 8  # bytes: how many arrays there are, and bytes in all
_COUNT = 8  # where an entry tells how many elements its array has
_ENTRY = 16  # bytes before an array's name
_NAME = 1  # where an entry tells how long the name is


@jit
def measure(payloads: Any, sizes: Any, heads: Any, ends: Any) -> None:
    """Fill ``ends`` (int64) with where each payload ends, with its length before it."""
    end = 0
    for t in range(payloads.shape[0]):
        end += _LENGTH + _HEAD
        for a in range(sizes.size):
            nbytes = types.intp(payloads[t, 2 + 2 * a]) * sizes[a]
            end += _padded(_ENTRY + types.intp(heads[a, _NAME])) + _padded(nbytes)
        ends[t] = end


@jit
def write(payloads: Any, sizes: Any, heads: Any, ends: Any, out: Any) -> None:
    """Write payloads to ``out`` (uint8), of which ``measure`` tells where they end."""
    at = 0
    for t in range(payloads.shape[0]):
        _write_number(out, at, 8, ends[t] - at - _LENGTH)
        _write_number(out, at + _LENGTH, 4, sizes.size)
        _write_number(out, at + _LENGTH + 4, 4, ends[t] - at - _LENGTH)
        at += _LENGTH + _HEAD
        for a in range(sizes.size):
            count = types.intp(payloads[t, 2 + 2 * a])
            head = _padded(_ENTRY + types.intp(heads[a, _NAME]))
            for i in range(head):
                out[at + i] = heads[a, i]
            _write_number(out, at + _COUNT, 8, count)
            at += head
            nbytes = count * sizes[a]
            data, target = carray(pointer(payloads[t, 1 + 2 * a]), nbytes, np.uint8), out[at:]
            for i in range(nbytes):
                target[i] = data[i]
            at += _padded(nbytes)
            for i in range(nbytes, _padded(nbytes)):
                target[i] = 0


@jit
def split(data: Any, starts: Any) -> bool:
    """Fill ``starts`` (int64) with where payloads begin, behind their lengths, and the last's end.

    False where there are not so many, one behind the other, in ``data`` (uint8).
    """
    at = 0
    for t in range(starts.size - 1):
        if at + _LENGTH > data.size:
            return False
        starts[t] = at + _LENGTH
        length = _read_number(data, at, 8)
        if length > types.uint64(data.size - starts[t]):
            return False
        at = starts[t] + types.intp(length)
    starts[starts.size - 1] = at + _LENGTH
    return True


@jit
def read(data: Any, starts: Any, sizes: Any, heads: Any, payloads: Any) -> bool:
    """Fill rows of ``payloads`` with where their arrays lie in ``data``, and how many elements.

    ``starts`` are those of ``split``, one more than there are payloads. False where one has other
    arrays than ``heads`` say, or ends inside one.
    """
    base = types.uint64(data.ctypes.data)
    for t in range(payloads.shape[0]):
        at, stop = starts[t], starts[t + 1] - _LENGTH
        if stop - at < _HEAD or _read_number(data, at, 2) != types.uint64(sizes.size):
            return False
        total = _read_number(data, at + 4, 4)
        if total > types.uint64(stop - at):
            return False
        stop, at = at + types.intp(total), at + _HEAD
        for a in range(sizes.size):
            name = types.intp(heads[a, _NAME])
            if at + _padded(_ENTRY + name) > stop:
                return False
            if data[at] != heads[a, 0] or data[at + _NAME] != heads[a, _NAME]:
                return False
            for i in range(_ENTRY, _ENTRY + name):
                if data[at + i] != heads[a, i]:
                    return False
            count = _read_number(data, at + _COUNT, 8)
            at += _padded(_ENTRY + name)
            if count > types.uint64((stop - at) // sizes[a]):
                return False
            payloads[t, 1 + 2 * a] = base + types.uint64(at)
            payloads[t, 2 + 2 * a] = count
            at += _padded(types.intp(count) * sizes[a])
    return True


@njit(inline="always")
def _padded(nbytes: Any) -> Any:
    return (nbytes + _ALIGN - 1) // _ALIGN * _ALIGN


@njit(nogil=True)
def _write_number(out: Any, at: Any, nbytes: int, value: Any) -> None:
    rest = types.uint64(value)
    for i in range(nbytes):
        out[at + i] = types.uint8(rest & types.uint64(0xFF))
        rest >>= types.uint64(8)


@njit(nogil=True)
def _read_number(data: Any, at: Any, nbytes: int) -> Any:
    value = types.uint64(0)
    for i in range(nbytes):
        value |= types.uint64(data[at + i]) << types.uint64(8 * i)
    return value
