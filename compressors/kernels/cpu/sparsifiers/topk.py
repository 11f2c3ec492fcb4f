"""Exact selection of the k entries of largest magnitude, lowest index first among equals.

One pass over memory in the usual case: a sample gives a floor that a little more than k entries
reach, they are listed with their magnitudes, and bisection among those finds the exact threshold.
When the sample misleads, all entries are listed. The result is the same either way.

With ``feedback`` the entries are those of x + decay * held, which replaces ``held`` in the same
pass where it is finite. Without it ``held`` is not looked at.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from ringlet.compressors.kernels.cpu.common.intrinsics import f32_bits
from ringlet.compressors.kernels.cpu.common.target import target_at
from ringlet.compressors.kernels.cpu.common.vectors import (
    WIDTH,
    advance,
    lowest,
    reaching,
    reaching_sum,
)
from ringlet.compressors.kernels.cpu.sparsifiers.blocks import keep_largest, kth

SAMPLE = 8192
INFINITE = 0x7F800000


@njit(nogil=True, cache=True)
def sampled_floor(x: Any, held: Any, decay: Any, feedback: bool, k: int, sample: Any) -> Any:
    """Return a magnitude that a little more than ``k`` entries reach, by strided entries.

    At most that of infinity. ``sample`` (int32) is scratch for SAMPLE entries.
    """
    if x.size <= 4 * SAMPLE:
        return types.int32(0)
    stride = x.size // SAMPLE
    for j in range(SAMPLE):
        sample[j] = _magnitude(target_at(x, held, decay, j * stride, feedback))
    expected = k / x.size * SAMPLE
    rank = int(expected + 4.0 * np.sqrt(expected) + 2.0)
    if rank >= SAMPLE:
        return types.int32(0)
    return min(kth(sample[:SAMPLE], rank, rank // 8)[0], types.int32(INFINITE))


@njit(nogil=True, cache=True)
def collect(
    x: Any, held: Any, decay: Any, feedback: bool, first: int, floor: Any, listed: Any, found: Any
) -> int:
    """List ``first + i`` and the magnitude of every entry that reaches ``floor``; return how many.

    ``listed`` (uint32) and ``found`` (int32) have room for all of x.
    """
    count = 0
    full = x.size // WIDTH * WIDTH
    for at in range(0, full, WIDTH):
        if feedback:
            mask = reaching_sum(x, held, decay, at, floor)
        else:
            mask = reaching(x, at, floor)
        top = types.int32(0)
        while mask:
            i = at + lowest(mask)
            magnitude = _magnitude(target_at(x, held, decay, i, feedback))
            listed[count], found[count] = first + i, magnitude
            top = max(top, magnitude)
            count += 1
            mask &= mask - types.uint32(1)
        if feedback:
            if top < INFINITE:
                advance(x, held, decay, at)
            else:
                for i in range(at, at + WIDTH):
                    _advance_one(x, held, decay, i)
    for i in range(full, x.size):
        magnitude = _magnitude(target_at(x, held, decay, i, feedback))
        if magnitude >= floor:
            listed[count], found[count] = first + i, magnitude
            count += 1
        if feedback:
            _advance_one(x, held, decay, i)
    return count


@njit(nogil=True, cache=True)
def take(
    x: Any,
    held: Any,
    decay: Any,
    feedback: bool,
    listed: Any,
    found: Any,
    indices: Any,
    values: Any,
) -> None:
    """Fill ``indices`` (uint32) and ``values`` with the largest of what ``collect`` listed.

    With feedback those that are finite are zeroed in ``held``. Overwrites what was listed.
    """
    k = values.size
    threshold, reach = kth(found, k, 0)
    keep_largest(found, threshold, reach, k, listed, listed)
    keep_largest(found, threshold, reach, k, found, found)
    for j in range(k):
        i = listed[j]
        indices[j] = i
        if not feedback:
            values[j] = x[i]
        elif found[j] < INFINITE:
            values[j] = held[i]
            held[i] = types.float32(0)
        else:
            values[j] = x[i] + decay * held[i]


@njit(inline="always")
def _magnitude(value: Any) -> Any:
    return types.int32(f32_bits(value) & types.uint32(0x7FFFFFFF))


@njit(inline="always")
def _advance_one(x: Any, held: Any, decay: Any, i: Any) -> None:
    target = x[i] + decay * held[i]
    if _magnitude(target) < INFINITE:
        held[i] = target
