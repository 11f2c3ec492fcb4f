"""Products of factors, and of factors with a matrix.

Every rank must get the same bits from ``product``, on any processor: sums have a fixed order.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types

from ringlet.compressors.kernels.cpu.common.copies import copy
from ringlet.compressors.kernels.cpu.common.feedback import add, keep_combined
from ringlet.ring.jit import jit

CHUNK = 2048  # columns of a product whose factors stay in the first-level cache
COLUMNS = 1024  # columns that times_columns sums up at a time: ranges begin at multiples


@jit
def product(left: Any, poison: Any, right: Any, first: int, out: Any) -> None:
    """Fill ``out`` with rows ``first`` and following of (left + poison)^T right.

    The sum over the rank is taken in order.
    """
    n, m = out.shape
    for start in range(0, m, CHUNK):
        for i in range(n):
            columns = out[i, start : min(start + CHUNK, m)]
            _product_row(left, poison, right, first + i, start, columns)


@jit
def product_and_lost(
    left: Any,
    right: Any,
    own_left: Any,
    own_right: Any,
    poison: Any,
    first: int,
    target: Any,
    out: Any,
    residual: Any,
    room: Any,
) -> None:
    """Do the same, and set ``residual`` to target less the product of the own factors.

    It stays where that or ``out`` is not finite. ``room`` is scratch for CHUNK elements.
    """
    n, m = out.shape
    for start in range(0, m, CHUNK):
        stop = min(start + CHUNK, m)
        local = room[: stop - start]
        for i in range(n):
            combined = out[i, start:stop]
            _product_row(left, poison, right, first + i, start, combined)
            _product_row(own_left, poison, own_right, first + i, start, local)
            keep_combined(target[i, start:stop], local, combined, residual[i, start:stop])


@njit(nogil=True)
def _product_row(left: Any, poison: Any, right: Any, i: int, start: int, target: Any) -> None:
    """Fill ``target`` with columns from ``start`` on of row ``i``; four ranks are one pass."""
    r, stop = left.shape[0], start + target.size
    for k in range(0, r - 3, 4):
        a, b = left[k, i] + poison, left[k + 1, i] + poison
        c, d = left[k + 2, i] + poison, left[k + 3, i] + poison
        one, two = right[k, start:stop], right[k + 1, start:stop]
        three, four = right[k + 2, start:stop], right[k + 3, start:stop]
        if k == 0:
            for j in range(target.size):
                target[j] = ((a * one[j] + b * two[j]) + c * three[j]) + d * four[j]
        else:
            for j in range(target.size):
                total = (target[j] + a * one[j]) + b * two[j]
                target[j] = (total + c * three[j]) + d * four[j]
    for k in range(r // 4 * 4, r):
        weight, values = left[k, i] + poison, right[k, start:stop]
        if k == 0:
            for j in range(target.size):
                target[j] = weight * values[j]
        else:
            for j in range(target.size):
                target[j] += weight * values[j]


@jit
def sum_times_rows(
    right: Any, x: Any, held: Any, decay: Any, target: Any, first: int, out: Any
) -> None:
    """Set ``target`` to x + decay * held, and ``out`` to ``times_rows`` of that."""
    for i in range(x.shape[0]):
        add(x[i], held[i], decay, target[i])
        times_rows(right, target[i : i + 1], first + i, out)


@jit(fastmath={"reassoc"})
def times_rows(right: Any, matrix: Any, first: int, out: Any) -> None:
    """Fill columns from ``first`` on of ``out`` (r x n) with right M^T, by those rows of M.

    Sums are of this rank alone: any order will do.
    """
    r = right.shape[0]
    for i in range(matrix.shape[0]):
        row = matrix[i]
        for k in range(0, r - 3, 4):
            one, two, three, four = right[k], right[k + 1], right[k + 2], right[k + 3]
            a = b = c = d = types.float32(0)
            for j in range(row.size):
                a += row[j] * one[j]
                b += row[j] * two[j]
                c += row[j] * three[j]
                d += row[j] * four[j]
            out[k, first + i], out[k + 1, first + i] = a, b
            out[k + 2, first + i], out[k + 3, first + i] = c, d
        for k in range(r // 4 * 4, r):
            other = right[k]
            total = types.float32(0)
            for j in range(row.size):
                total += row[j] * other[j]
            out[k, first + i] = total


@jit
def times_columns(left: Any, matrix: Any, begin: int, end: int, room: Any, out: Any) -> None:
    """Fill columns ``begin`` to ``end`` of ``out`` (r x m) with those of left M.

    ``room`` is scratch for as many elements.
    """
    r, n = left.shape
    width = COLUMNS
    for start in range(begin, end, width):
        stop = min(start + width, end)
        sums = room[: r * (stop - start)].reshape(r, stop - start)
        sums[:] = 0
        for i in range(0, n - 3, 4):
            one, two = matrix[i, start:stop], matrix[i + 1, start:stop]
            three, four = matrix[i + 2, start:stop], matrix[i + 3, start:stop]
            for k in range(r):
                a, b, c, d = left[k, i], left[k, i + 1], left[k, i + 2], left[k, i + 3]
                target = sums[k]
                for j in range(one.size):
                    target[j] += a * one[j] + b * two[j] + c * three[j] + d * four[j]
        for i in range(n // 4 * 4, n):
            row = matrix[i, start:stop]
            for k in range(r):
                for j in range(row.size):
                    sums[k, j] += left[k, i] * row[j]
        for k in range(r):
            copy(sums[k], out[k, start:stop])
