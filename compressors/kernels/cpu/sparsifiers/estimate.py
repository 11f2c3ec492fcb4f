"""What thresholds are estimated from: a random sample, and sums of what exceeds another one."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from ringlet.compressors.kernels.cpu.common.intrinsics import bits_f32, magnitude_bits
from ringlet.compressors.kernels.cpu.common.ordered_sums import LANES, fold
from ringlet.compressors.kernels.cpu.common.rng import squares
from ringlet.ring.jit import jit


@jit
def sample(x: Any, key: Any, magnitudes: Any) -> None:
    """Fill ``magnitudes`` (int32) with those of entries drawn at random, with replacement."""
    n = types.uint64(x.size)
    for j in range(magnitudes.size):
        drawn = types.uint64(squares(key, types.uint64(j)))
        magnitudes[j] = magnitude_bits(x[(drawn * n) >> types.uint64(32)])


@jit
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
                bits = magnitude_bits(block[i])
                passes = bits >= floor
                lanes[i] += types.float64(bits_f32(types.uint32(bits)) if passes else 0.0)
                found += types.uint32(passes)
            count += found
        sums[c] = fold(lanes)
        counts[c] = count
