"""Sums of squares in double precision, in an order that CUDA kernels follow too."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import types

from ringlet.compressors.kernels.cpu.common.ordered_sums import LANES, fold
from ringlet.ring.jit import jit

CHUNK = 1 << 16  # elements summed in one piece, however many threads there are


@jit
def square(x: Any, chunk: int, sums: Any) -> None:
    """Fill ``sums`` (float64) with those of the squares of ``x`` (float32), chunk by chunk."""
    for c in range(sums.size):
        lanes = np.zeros(LANES, np.float64)
        piece = x[c * chunk : (c + 1) * chunk]
        for start in range(0, piece.size, LANES):
            block = piece[start : start + LANES]
            for i in range(block.size):
                value = types.float64(block[i])
                lanes[i] += value * value
        sums[c] = fold(lanes)


@jit
def clip_at(x: Any, times: Any, out: Any) -> None:
    """Set ``out`` to ``x``, clipped at so many of its root mean squares, unless not finite."""
    sums = np.empty((x.size + CHUNK - 1) // CHUNK, np.float64)
    square(x, CHUNK, sums)
    energy = 0.0
    for c in range(sums.size):
        energy += sums[c]
    most = times * math.sqrt(energy / max(x.size, 1))
    bound = types.float32(most) if math.isfinite(most) else types.float32(np.inf)
    for i in range(x.size):
        value = x[i]
        if value > bound:
            value = bound
        elif value < -bound:
            value = -bound
        out[i] = value
