"""Selection by a threshold, sums of what exceeds one, and samples to estimate one from.

Magnitudes are compared as the bits of a float32 without its sign, which order like them; NaN
counts as largest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from ringlet.compressors.kernels.intrinsics import bits_f32, f32_bits
from ringlet.compressors.kernels.lanes import LANES, fold
from ringlet.compressors.kernels.random import squares

_GROUP = 32


@njit(inline="always")
def _magnitude(value: Any) -> Any:
    return types.int32(f32_bits(value) & types.uint32(0x7FFFFFFF))


@njit(nogil=True, cache=True)
def collect(x: Any, threshold: Any, first: Any, indices: Any) -> int:
    """List ``first + i`` in ``indices`` (uint32) where |x[i]| has bits of at least ``threshold``.

    Returns how many there are. ``indices`` has room for all of x; entries behind are scratch.
    """
    count = 0
    floor = types.int32(threshold)
    for start in range(0, x.size, _GROUP):
        group = x[start : start + _GROUP]
        found = types.uint32(0)
        for i in range(group.size):  # with vectors, for most groups have none
            found += types.uint32(_magnitude(group[i]) >= floor)
        if found:
            for i in range(group.size):
                indices[count] = first + start + i
                count += _magnitude(group[i]) >= floor
    return count


@njit(nogil=True, cache=True)
def gather(x: Any, indices: Any, values: Any) -> None:
    """Copy the entries of ``x`` at ``indices`` to ``values``."""
    for j in range(indices.size):
        values[j] = x[indices[j]]


@njit(nogil=True, cache=True)
def sample(x: Any, key: Any, magnitudes: Any) -> None:
    """Fill ``magnitudes`` (int32) with those of entries drawn at random, with replacement."""
    n = types.uint64(x.size)
    for j in range(magnitudes.size):
        drawn = types.uint64(squares(key, types.uint64(j)))
        magnitudes[j] = _magnitude(x[(drawn * n) >> types.uint64(32)])


@njit(nogil=True, cache=True)
def exceeding(x: Any, threshold: Any, chunk: int, sums: Any, counts: Any) -> None:
    """Add up |x| and the number of entries of at least ``threshold``, chunk by chunk."""
    floor = types.int32(threshold)
    for c in range(sums.size):
        lanes = np.zeros(LANES, np.float64)
        count = 0
        piece = x[c * chunk : (c + 1) * chunk]
        for start in range(0, piece.size, LANES):
            block = piece[start : start + LANES]
            found = types.uint32(0)
            for i in range(block.size):
                bits = _magnitude(block[i])
                passes = bits >= floor
                lanes[i] += types.float64(bits_f32(types.uint32(bits)) if passes else 0.0)
                found += types.uint32(passes)
            count += found
        sums[c] = fold(lanes)
        counts[c] = count
