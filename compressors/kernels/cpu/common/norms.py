"""Sums of squares in double precision, in an order that CUDA kernels follow too."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from ringlet.compressors.kernels.cpu.common.ordered_sums import LANES, fold
from ringlet.ring.jit import jit


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
