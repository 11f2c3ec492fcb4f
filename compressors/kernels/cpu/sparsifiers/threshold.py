"""Selection by a threshold, sums of what exceeds one, samples to estimate one from; scattering.

Magnitudes are compared as the bits of a float32 without its sign, which order like them; NaN
counts as largest.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from ringlet.compressors.kernels.cpu.common.intrinsics import bits_f32, f32_bits
from ringlet.compressors.kernels.cpu.common.lanes import LANES, fold
from ringlet.compressors.kernels.cpu.common.rng import squares
from ringlet.compressors.kernels.cpu.common.vectors import WIDTH, lowest, reaching


@njit(inline="always")
def _magnitude(value: Any) -> Any:
    return types.int32(f32_bits(value) & types.uint32(0x7FFFFFFF))


@njit(nogil=True, cache=True)
def collect(x: Any, threshold: Any, first: Any, indices: Any) -> int:
    """List ``first + i`` in ``indices`` (uint32) where |x[i]| has bits of at least ``threshold``.

    Returns how many there are. ``indices`` has room for all of x.
    """
    count = 0
    floor = types.int32(threshold)
    full = x.size // WIDTH * WIDTH
    for at in range(0, full, WIDTH):
        mask = reaching(x, at, floor)
        while mask:
            indices[count] = first + at + lowest(mask)
            count += 1
            mask &= mask - types.uint32(1)
    for i in range(full, x.size):
        if _magnitude(x[i]) >= floor:
            indices[count] = first + i
            count += 1
    return count


@njit(nogil=True, cache=True)
def scatter(indices: Any, values: Any, out: Any) -> bool:
    """Overwrite ``out`` with zeros and the given entries; False if an index lies outside."""
    out[:] = 0
    for j in range(indices.size):
        if indices[j] >= out.size:
            return False
        out[indices[j]] = values[j]
    return True


@njit(nogil=True, cache=True)
def scatter_add(indices: Any, values: Any, out: Any) -> bool:
    """Add the given entries to ``out``; False if an index lies outside."""
    for j in range(indices.size):
        if indices[j] >= out.size:
            return False
        out[indices[j]] += values[j]
    return True


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
