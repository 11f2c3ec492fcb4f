"""Low-rank compressors of many small matrices a call: the kernels for one, in a loop.

A row of ``table`` (uint64) tells of a matrix of n x m elements; its columns are named below.
Factors are held as rows, of which there are ``r``. Nothing is checked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types

from ringlet.compressors.kernels.cpu.common.feedback import add
from ringlet.compressors.kernels.cpu.common.intrinsics import pointer
from ringlet.compressors.kernels.cpu.lowrank.factors import keep, orthonormal, poison_of
from ringlet.compressors.kernels.cpu.lowrank.products import (
    CHUNK,
    COLUMNS,
    product,
    product_and_lost,
    sum_times_rows,
    times_columns,
    times_rows,
)
from ringlet.ring.jit import jit

# Where the matrix lies, its residual (0: there is none), what is approximated (the matrix, or room
# for its sum with the residual), the result, the factor that the step begins with, the orthonormal
# basis, and this rank's own share of the last factor that travels. PowerSGD's basis is r x n, and
# that factor r x m. ACP-SGD's are where LEFT is 0; where it is 1 the left factor (r x n) travels,
# and the basis is r x m. KEPT is where it keeps what has travelled.
N, M, MATRIX, RESIDUAL, TARGET, OUT, START, BASIS, OWN, LEFT, KEPT = range(11)
COLUMNS_OF_TABLE = 11


@jit
def first_factors(table: Any, r: int, decay: Any, places: Any) -> None:
    """Write each matrix's first factor (r x n) to its place, and the targets of those fed back."""
    for t in range(table.shape[0]):
        n, m = types.intp(table[t, N]), types.intp(table[t, M])
        x = carray(pointer(table[t, MATRIX]), (n, m), np.float32)
        start = carray(pointer(table[t, START]), (r, m), np.float32)
        out = carray(pointer(places[t]), (r, n), np.float32)
        if table[t, RESIDUAL]:
            held = carray(pointer(table[t, RESIDUAL]), (n, m), np.float32)
            target = carray(pointer(table[t, TARGET]), (n, m), np.float32)
            sum_times_rows(start, x, held, decay, target, 0, out)
        else:
            times_rows(start, x, 0, out)


@jit
def second_factors(table: Any, r: int, small: float, means: Any, places: Any, poisons: Any) -> None:
    """Make first factors, which lie at ``means``, orthonormal; write the second ones (r x m).

    ``poisons`` become 0, or NaN where a first factor is not finite.
    """
    longest = 0
    for t in range(table.shape[0]):
        longest = max(longest, types.intp(table[t, N]))
    room, sums = np.empty((r + 1) * longest + r, np.float64), np.empty(r * COLUMNS, np.float32)
    for t in range(table.shape[0]):
        n, m = types.intp(table[t, N]), types.intp(table[t, M])
        left = carray(pointer(means[t]), (r, n), np.float32)
        target = carray(pointer(table[t, TARGET]), (n, m), np.float32)
        basis = carray(pointer(table[t, BASIS]), (r, n), np.float32)
        own = carray(pointer(table[t, OWN]), (r, m), np.float32)
        out = carray(pointer(places[t]), (r, m), np.float32)
        poisons[t] = poison_of(left)
        orthonormal(left, small, room, basis)
        times_columns(basis, target, 0, m, sums, own)
        for k in range(r):
            for j in range(m):
                out[k, j] = own[k, j]


@jit
def results(table: Any, r: int, warm: bool, means: Any, poisons: Any) -> None:
    """Write results, and residuals where there are some; second factors lie at ``means``.

    With ``warm`` START becomes what the next step begins with.
    """
    room = np.empty(CHUNK, np.float32)
    for t in range(table.shape[0]):
        n, m = types.intp(table[t, N]), types.intp(table[t, M])
        right = carray(pointer(means[t]), (r, m), np.float32)
        basis = carray(pointer(table[t, BASIS]), (r, n), np.float32)
        out = carray(pointer(table[t, OUT]), (n, m), np.float32)
        if warm:
            keep(right, poisons[t], carray(pointer(table[t, START]), (r, m), np.float32))
        if table[t, RESIDUAL]:
            own = carray(pointer(table[t, OWN]), (r, m), np.float32)
            target = carray(pointer(table[t, TARGET]), (n, m), np.float32)
            held = carray(pointer(table[t, RESIDUAL]), (n, m), np.float32)
            product_and_lost(basis, right, basis, own, poisons[t], 0, target, out, held, room)
        else:
            product(basis, poisons[t], right, 0, out)


@jit
def factors_in_turn(table: Any, r: int, small: float, decay: Any, places: Any) -> None:
    """Write the factor of each matrix that travels in this step of ACP-SGD to its place."""
    longest = 0
    for t in range(table.shape[0]):
        longest = max(longest, types.intp(max(table[t, N], table[t, M])))
    room, sums = np.empty((r + 1) * longest + r, np.float64), np.empty(r * COLUMNS, np.float32)
    for t in range(table.shape[0]):
        n, m, left = types.intp(table[t, N]), types.intp(table[t, M]), table[t, LEFT]
        x = carray(pointer(table[t, MATRIX]), (n, m), np.float32)
        target = carray(pointer(table[t, TARGET]), (n, m), np.float32)
        start = carray(pointer(table[t, START]), (r, m if left else n), np.float32)
        basis = carray(pointer(table[t, BASIS]), (r, m if left else n), np.float32)
        own = carray(pointer(table[t, OWN]), (r, n if left else m), np.float32)
        orthonormal(start, small, room, basis)
        if table[t, RESIDUAL] and left:
            held = carray(pointer(table[t, RESIDUAL]), (n, m), np.float32)
            sum_times_rows(basis, x, held, decay, target, 0, own)
        elif left:
            times_rows(basis, target, 0, own)
        else:
            if table[t, RESIDUAL]:
                held = carray(pointer(table[t, RESIDUAL]), (n, m), np.float32)
                add(x.reshape(n * m), held.reshape(n * m), decay, target.reshape(n * m))
            times_columns(basis, target, 0, m, sums, own)
        out = carray(pointer(places[t]), (r, n if left else m), np.float32)
        for k in range(r):
            for j in range(out.shape[1]):
                out[k, j] = own[k, j]


@jit
def results_in_turn(table: Any, r: int, means: Any) -> None:
    """Write results, and residuals where there are some, and keep the factors at ``means``."""
    room = np.empty(CHUNK, np.float32)
    for t in range(table.shape[0]):
        n, m, left = types.intp(table[t, N]), types.intp(table[t, M]), table[t, LEFT]
        mean = carray(pointer(means[t]), (r, n if left else m), np.float32)
        basis = carray(pointer(table[t, BASIS]), (r, m if left else n), np.float32)
        own = carray(pointer(table[t, OWN]), (r, n if left else m), np.float32)
        out = carray(pointer(table[t, OUT]), (n, m), np.float32)
        keep(mean, types.float32(0), carray(pointer(table[t, KEPT]), mean.shape, np.float32))
        poison = poison_of(mean)
        rows, columns = (mean, basis) if left else (basis, mean)
        if table[t, RESIDUAL]:
            own_rows, own_columns = (own, basis) if left else (basis, own)
            target = carray(pointer(table[t, TARGET]), (n, m), np.float32)
            held = carray(pointer(table[t, RESIDUAL]), (n, m), np.float32)
            product_and_lost(
                rows, columns, own_rows, own_columns, poison, 0, target, out, held, room
            )
        else:
            product(rows, poison, columns, 0, out)
