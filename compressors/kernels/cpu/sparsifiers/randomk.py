"""A random permutation evaluated where it is needed, and random-k by its first k places.

The permutation is a Feistel network of four rounds over a grid of rows times columns that is
hardly larger than n; what falls outside is permuted again. It needs no memory and no order.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types

from ringlet.compressors.kernels.cpu.common.intrinsics import f32_bits, is_finite
from ringlet.compressors.kernels.cpu.common.rng import squares
from ringlet.ring.jit import jit


@njit(inline="always")
def _below(key: Any, counter: Any, limit: Any) -> Any:
    return (types.uint64(squares(key, counter)) * limit) >> types.uint64(32)


@jit
def places(key: Any, n: Any, rows: Any, columns: Any, first: Any, indices: Any) -> None:
    """Fill ``indices`` (uint32) with where places first, first + 1, ... of 0 .. n - 1 go."""
    n, rows, columns = types.uint64(n), types.uint64(rows), types.uint64(columns)
    for j in range(indices.size):
        place = types.uint64(first + j)
        while True:
            row = place // columns
            column = place - row * columns
            for turn in range(2):
                salt = types.uint64(2 * turn + 1) << types.uint64(40)
                row += _below(key, salt + column, rows)
                row -= rows if row >= rows else types.uint64(0)
                salt = types.uint64(2 * turn + 2) << types.uint64(40)
                column += _below(key, salt + row, columns)
                column -= columns if column >= columns else types.uint64(0)
            place = row * columns + column
            if place < n:
                break
        indices[j] = types.uint32(place)


@jit
def all_finite(x: Any) -> Any:
    """Whether ``x`` holds neither NaN nor Inf."""
    top = types.uint32(0)
    for i in range(x.size):
        top = max(top, f32_bits(x[i]) & types.uint32(0x7FFFFFFF))
    return top < types.uint32(0x7F800000)


@jit
def take(x: Any, indices: Any, scale: Any, values: Any) -> None:
    """Set ``values`` to the entries at ``indices`` times ``scale``."""
    for j in range(indices.size):
        values[j] = x[indices[j]] * scale


@jit
def take_feedback(
    x: Any, residual: Any, decay: Any, indices: Any, scale: Any, values: Any, old: Any
) -> None:
    """Do the same for x + decay * residual, and save the residual at these places in ``old``."""
    for j in range(indices.size):
        old[j] = residual[indices[j]]
        values[j] = (x[indices[j]] + decay * old[j]) * scale


@jit
def drop(x: Any, decay: Any, indices: Any, values: Any, old: Any, residual: Any) -> None:
    """Subtract what was sent from ``residual``; put ``old`` back where that is not finite."""
    for j in range(indices.size):
        lost = (x[indices[j]] + decay * old[j]) - values[j]
        residual[indices[j]] = lost if is_finite(lost) else old[j]
