"""Selection by a threshold.

Magnitudes are compared as the bits of a float32 without its sign, which order like them; NaN
counts as largest.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types

from ringlet.compressors.kernels.cpu.common import vectors
from ringlet.compressors.kernels.cpu.common.intrinsics import magnitude_bits
from ringlet.compressors.kernels.cpu.common.vectors import WIDTH, lowest
from ringlet.compressors.kernels.cpu.sparsifiers.selection import (
    all_listed,
    largest_listed,
    reaching,
)
from ringlet.ring.jit import jit


@jit
def collect(x: Any, threshold: Any, first: Any, indices: Any) -> int:
    """List ``first + i`` in ``indices`` (uint32) where |x[i]| has bits of at least ``threshold``.

    Returns how many there are. ``indices`` has room for all of x.
    """
    count = 0
    floor = types.int32(threshold)
    full = x.size // WIDTH * WIDTH
    for at in range(0, full, WIDTH):
        mask = vectors.reaching(x, at, floor)
        while mask:
            indices[count] = first + at + lowest(mask)
            count += 1
            mask &= mask - types.uint32(1)
    for i in range(full, x.size):
        if magnitude_bits(x[i]) >= floor:
            indices[count] = first + i
            count += 1
    return count


@njit(nogil=True)
def within(x: Any, plan: Any, key: Any, listed: Any, found: Any, indices: Any, values: Any) -> Any:
    """Select what reaches a threshold, or the largest, for ``selection.selector``.

    The plan is how many entries travel at most, and the threshold's bits.
    """
    limit = int(plan[0])
    count = reaching(x, plan[1], listed, found)
    if count > limit:
        return largest_listed(x, count, limit, listed, found, indices, values)
    return all_listed(x, count, listed, indices, values)
