"""Factors of low-rank approximations: orthonormal rows, and what the next step begins with.

Every rank must get the same bits from ``orthonormal``, on any processor: sums have a fixed order.
No library is asked, whose threads would wait for one another where several ranks share a machine's
cores.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import types

from ringlet.compressors.kernels.cpu.common.intrinsics import f32_bits, is_finite
from ringlet.ring.jit import jit


@jit
def _dot(a: Any, b: Any, scratch: Any) -> Any:
    """Return the inner product, added by folding the second half onto the first."""
    n = a.size
    for i in range(n):
        scratch[i] = a[i] * b[i]
    while n > 1:
        half = (n + 1) // 2
        upper = scratch[half:n]
        for i in range(upper.size):
            scratch[i] += upper[i]
        n = half
    return scratch[0]


@jit
def poison_of(rows: Any) -> Any:
    """Return 0, or NaN where a value is not finite."""
    top = types.uint32(0)
    for k in range(rows.shape[0]):
        row = rows[k]
        for i in range(row.size):
            top = max(top, f32_bits(row[i]) & types.uint32(0x7FFFFFFF))
    return types.float32(0) if top < types.uint32(0x7F800000) else types.float32(np.nan)


@jit
def keep(rows: Any, poison: Any, old: Any) -> None:
    """Set ``old`` to the rows divided by their largest magnitudes, where that is not zero.

    Nothing changes if a value, or ``poison``, is not finite.
    """
    if not is_finite(types.float32(poison_of(rows) + poison)):
        return
    for k in range(rows.shape[0]):
        top = types.float32(0)
        for i in range(rows.shape[1]):
            top = max(top, abs(rows[k, i]))
        if top > types.float32(0):
            for i in range(rows.shape[1]):
                old[k, i] = rows[k, i] / top


@jit
def orthonormal(rows: Any, small: float, room: Any, out: Any) -> None:
    """Fill ``out`` with an orthonormal basis of the rows (r x n, r <= n), as the array code does.

    Gram-Schmidt in float64, twice per row. A row of which less than ``small`` is left, relatively,
    gives way to the next unit vector that is independent of those before. ``room`` is scratch for
    (r + 1) n + r float64; ``out`` may be ``rows``.
    """
    r, n = rows.shape
    basis = room[: r * n].reshape(r, n)
    scratch = room[r * n : (r + 1) * n]
    parts = room[(r + 1) * n :]
    unit = 0
    for k in range(r):
        row = basis[k]
        for i in range(n):
            value = rows[k, i] if is_finite(rows[k, i]) else types.float32(0)
            row[i] = types.float64(value)
        while True:
            before = np.sqrt(_dot(row, row, scratch))
            for _ in range(2):
                for j in range(k):
                    parts[j] = _dot(basis[j], row, scratch)
                for j in range(k):
                    other, part = basis[j], parts[j]
                    for i in range(n):
                        row[i] -= part * other[i]
            norm = np.sqrt(_dot(row, row, scratch))
            if norm > small * before:
                break
            row[:] = 0.0
            row[unit] = 1.0
            unit += 1
        for i in range(n):
            row[i] /= norm
            out[k, i] = types.float32(row[i])
