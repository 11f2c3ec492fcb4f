"""A checksum for payloads, at the speed of memory: crc32 takes 372 us a MiB, this about 40.

The sum over all 32-bit words of word times weight, modulo 2**64. Weights are odd and distinct, so
that one wrong word, two flipped bits anywhere, and two words that changed places are always found;
anything else escapes with a probability of about 2**-32 or less. It is no defence against a person.

Payloads carry the checksum in their seal (``seal``). A ``digest`` is of results that ranks have
computed, and compared on rank 0. It takes all NaNs for one, which may come out differently where
ranks add the same two numbers in another order.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringlet.ring.collectives.weighted_sums import (
    MASK,
    MIX,
    STEP,
    canonical_sum,
    weighted_sum,
    weighted_sum_and_nan,
)
from ringlet.ring.dtypes import Array

SPAN = 1 << 20  # bytes
WHOLE = 1 << 20  # bytes


def checksum(payload: Array, *fields: int) -> int:
    """Return a 64-bit checksum of ``payload`` (uint8, n bytes, fewer than 2**33) and ``fields``.

    ``fields`` are integers below 2**64, whose order counts. Releases the GIL.
    """
    whole = payload.size & ~3
    words = payload[:whole].view(np.uint32)
    if not words.flags.aligned:
        words = words.copy()
    tail = int.from_bytes(payload[whole:].tobytes(), "little")  # the last word, filled up with 0
    total = (weighted_sum(words) + tail * (words.size * STEP + 1 & 0xFFFFFFFF)) & MASK
    for field in (payload.size, *fields):  # as ``mixed`` does, without the calls
        total = ((total ^ field) * MIX) & MASK
        total ^= total >> 29
    return total


def mixed(total: int, field: int) -> int:
    """Return 64 bits that depend on both, and on their order."""
    total = ((total ^ field) * MIX) & MASK
    return total ^ total >> 29


def is_due(span: int, nbytes: int, share: int, turn: int) -> bool:
    """Whether a ``span`` of SPAN bytes, of ``nbytes``, is looked at: one of ``share``, in turn.

    Up to WHOLE bytes all are.
    """
    return nbytes <= WHOLE or (span + turn) % share == 0


def turn_of(number: int, share: int) -> int:
    """Return a turn for batch ``number``: batches at any regular distance come to all spans."""
    return (number * MIX & MASK) * share >> 64


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
    total = canonical_sum(lanes, magnitude, infinity)
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
    total, reached = weighted_sum_and_nan(words, *masks)
    nan = reached & (magnitude + 1) * repeat or any(x & magnitude > infinity for x in odd)
    return mixed(total, *odd) if odd else total, bool(nan)


# The words of a float, the bits that are not its sign, and those of an infinity.
_FLOATS: dict[str, tuple[type[np.unsignedinteger[Any]], int, int]] = {
    "float16": (np.uint16, 0x7FFF, 0x7C00),
    "bfloat16": (np.uint16, 0x7FFF, 0x7F80),
    "float32": (np.uint32, 0x7FFFFFFF, 0x7F800000),
    "float64": (np.uint64, 0x7FFFFFFFFFFFFFFF, 0x7FF0000000000000),
}
