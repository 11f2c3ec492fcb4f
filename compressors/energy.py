"""Sums of squares that fit no float32."""

from __future__ import annotations

import numpy as np

from ringlet.compressors.context import Array, Context

_PART = 1 << 14  # elements whose squares stay in the cache


def energy(x: Array, ctx: Context) -> float:
    """Return ||x||^2, added in float64; NaN or Inf where x has one."""
    total, room = 0.0, ctx.workspace.array("squares", min(x.size, _PART), np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        for start in range(0, x.size, _PART):
            part = x[start : start + _PART]
            squares = room[: part.size]
            squares[...] = part  # first, for a multiplication that widens would allocate
            squares *= squares
            total += float(squares.sum())
    return total
