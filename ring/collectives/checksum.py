"""A checksum for payloads, at the speed of memory: crc32 takes 372 us a MiB, this about 40.

The sum over all 32-bit words of word times weight, modulo 2**64. Weights are odd and distinct, so
that one wrong word, two flipped bits anywhere, and two words that changed places are always found;
anything else escapes with a probability of about 2**-32 or less. It is no defence against a person.

A ``digest`` compares results that ranks have computed: it takes all NaNs for one, which may come
out differently where ranks add the same two numbers in another order.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from ringlet.ring.dtypes import Array

SPAN = 1 << 20  # bytes
WHOLE = 1 << 20  # bytes
_STEP = 0x3C6EF372  # weight i is i * _STEP + 1 modulo 2**32: distinct for 2**31 words
_MIX = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1


def checksum(payload: Array, *fields: int) -> int:
    """Return a 64-bit checksum of ``payload`` (uint8, n bytes, fewer than 2**33) and ``fields``.

    ``fields`` are integers below 2**64, whose order counts. Releases the GIL.
    """
    whole = payload.size & ~3
    words = payload[:whole].view(np.uint32)
    if not words.flags.aligned:
        words = words.copy()
    tail = int.from_bytes(payload[whole:].tobytes(), "little")  # the last word, filled up with 0
    total = (int(_kernel()(words)) + tail * (words.size * _STEP + 1 & 0xFFFFFFFF)) & _MASK
    for field in (payload.size, *fields):  # as ``mixed`` does, without the calls
        total = ((total ^ field) * _MIX) & _MASK
        total ^= total >> 29
    return total


def mixed(total: int, field: int) -> int:
    """Return 64 bits that depend on both, and on their order."""
    total = ((total ^ field) * _MIX) & _MASK
    return total ^ total >> 29


def is_due(span: int, nbytes: int, share: int, turn: int) -> bool:
    """Whether a ``span`` of SPAN bytes, of ``nbytes``, is looked at: one of ``share``, in turn.

    Up to WHOLE bytes all are.
    """
    return nbytes <= WHOLE or (span + turn) % share == 0


def turn_of(number: int, share: int) -> int:
    """Return a turn for batch ``number``: batches at any regular distance come to all spans."""
    return (number * _MIX & _MASK) * share >> 64


def digest(
    values: Array, dtype: str = "", one_zero: bool = False, share: int = 1, turn: int = 0
) -> int:
    """Return a checksum of those of flat ``values`` that are due, or 1 where that is 0.

    ``dtype`` is theirs where NumPy has none: "bfloat16" for uint16. With ``one_zero`` both zeros
    count as one: which of them is the larger one depends on the order of the ranks. Releases the
    GIL.
    """
    if share == 1 or values.nbytes <= WHOLE:
        return _digest(values, dtype, one_zero)
    total, length = 0, SPAN // values.itemsize
    for span, start in enumerate(range(0, values.size, length)):
        if is_due(span, values.nbytes, share, turn):
            total = mixed(total, _digest(values[start : start + length], dtype, one_zero))
    return total or 1


def _digest(values: Array, dtype: str, one_zero: bool) -> int:
    name = dtype or values.dtype.name
    if name not in _FLOATS:
        return checksum(values.view(np.uint8)) or 1
    lane, magnitude, infinity = _FLOATS[name]
    lanes = values.view(lane)
    if not one_zero and lane is not np.uint64:
        total, nan = _sum_and_nan(lanes, magnitude, infinity)
        if not nan:
            return mixed(total, values.size) or 1
    kind = lanes.dtype.type
    total = int(_canonical_kernel()(lanes, kind(magnitude), kind(infinity)))
    return mixed(mixed(total, values.size), 1) or 1


def _sum_and_nan(lanes: Array, magnitude: int, infinity: int) -> tuple[int, bool]:
    """Return the sum of ``lanes`` as 32-bit words, and whether one of them is a NaN.

    A NaN's bits without the sign are above those of infinity. To find one without a branch, what
    infinity lacks to the largest such number is added: only a NaN then reaches the sign's bit.
    """
    odd = [int(lane) for lane in lanes[lanes.size & ~1 :]] if lanes.itemsize == 2 else []
    words = lanes[: lanes.size - len(odd)].view(np.uint32)
    if not words.flags.aligned:
        words = words.copy()
    repeat = 0x10001 if lanes.itemsize == 2 else 1
    masks = [mask * repeat for mask in (magnitude, magnitude - infinity)]
    total, reached = _digest_kernel()(words, *map(np.uint32, masks))
    nan = int(reached) & (magnitude + 1) * repeat or any(x & magnitude > infinity for x in odd)
    return mixed(int(total), *odd) if odd else int(total), bool(nan)


# The words of a float, the bits that are not its sign, and those of an infinity.
_FLOATS: dict[str, tuple[type[np.unsignedinteger[Any]], int, int]] = {
    "float16": (np.uint16, 0x7FFF, 0x7C00),
    "bfloat16": (np.uint16, 0x7FFF, 0x7F80),
    "float32": (np.uint32, 0x7FFFFFFF, 0x7F800000),
    "float64": (np.uint64, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
}
_BLOCK = 4096  # words: they are still in the nearest cache when NaNs are looked for


def _weighted_sum(words: Any) -> Any:
    total = np.uint64(0)
    for i in range(words.size):
        weight = np.uint32(np.uint32(i) * np.uint32(_STEP) + np.uint32(1))
        total += np.uint64(words[i]) * np.uint64(weight)
    return total


def _weighted_sum_and_nan(words: Any, magnitude: Any, lacking: Any) -> Any:
    total, reached = np.uint64(0), np.uint32(0)
    for start in range(0, words.size, _BLOCK):
        block = words[start : start + _BLOCK]
        part = np.uint64(0)
        for i in range(block.size):
            weight = np.uint32(np.uint32(start + i) * np.uint32(_STEP) + np.uint32(1))
            part += np.uint64(block[i]) * np.uint64(weight)
        total += part
        for i in range(block.size):
            absolute = np.uint32(block[i] & magnitude)
            reached = np.uint32(reached | np.uint32(absolute + lacking))
    return total, reached


def _canonical_sum(words: Any, magnitude: Any, infinity: Any) -> Any:
    total = np.uint64(0)
    for i in range(words.size):
        weight = np.uint64(np.uint32(np.uint32(i) * np.uint32(_STEP) + np.uint32(1)))
        absolute = words[i] & magnitude
        word = np.uint64(magnitude) if absolute > infinity else np.uint64(words[i])
        word = np.uint64(0) if absolute == 0 else word
        total += word * weight + (word >> np.uint64(32)) * (weight ^ np.uint64(_MIX))
    return total


@functools.cache
def _kernel() -> Callable[[Array], Any]:
    import numba

    kernel: Callable[[Array], Any] = numba.njit(nogil=True, cache=True)(_weighted_sum)
    return kernel


@functools.cache
def _digest_kernel() -> Callable[..., Any]:
    import numba

    kernel: Callable[..., Any] = numba.njit(nogil=True, cache=True)(_weighted_sum_and_nan)
    return kernel


@functools.cache
def _canonical_kernel() -> Callable[..., Any]:
    import numba

    kernel: Callable[..., Any] = numba.njit(nogil=True, cache=True)(_canonical_sum)
    return kernel
