"""Factors of low-rank approximations: kernels on a CPU, array code elsewhere.

Factors are held as rows, r x n. Every rank gets the same bits from the same rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringlet.compressors.context import Array, Context
from ringlet.compressors.feedback import target_into
from ringlet.compressors.pool import run_ranges

Factors = tuple[Array, Array]  # r x n and r x m

# A row that keeps less of its length than this beside those before it is not independent.
_SMALL = 1e-9


def draw(rows: Array, ctx: Context) -> None:
    """Fill ``rows`` with Gaussian numbers, the same on all ranks."""
    rng = ctx.rng(shared=True)
    if ctx.xp is np:
        rng.standard_normal(dtype=np.float32, out=rows)
    else:
        rows[...] = ctx.xp.asarray(rng.standard_normal(rows.shape, dtype=np.float32))


def poison_of(rows: Array, ctx: Context) -> Any:
    """Return 0 (float32), or NaN where a value is not finite: what adds it to a result shows it."""
    if ctx.xp is np:
        from ringlet.compressors.kernels import lowrank

        return np.float32(lowrank.poison_of(rows))
    with np.errstate(invalid="ignore"):
        return ctx.xp.abs(rows).max() * np.float32(0)


def keep(rows: Array, poison: Any, old: Array, ctx: Context) -> None:
    """Set ``old`` to what to begin the next step with: the rows, scaled to a largest value of 1.

    A row of zeros would stay zero for ever, so the old one is kept; all are if one is not finite.
    """
    xp = ctx.xp
    if xp is np:
        from ringlet.compressors.kernels import lowrank

        lowrank.keep(rows, poison, old)
        return
    top = xp.abs(rows).max(axis=1, keepdims=True)
    with np.errstate(invalid="ignore"):
        usable = xp.isfinite(top.max() + poison) & (top > 0)
        scaled = rows / xp.where(usable, top, np.float32(1))
    xp.copyto(old, scaled, where=usable)


def orthonormal(rows: Array, out: Array, ctx: Context) -> None:
    """Fill ``out`` with an orthonormal basis (float32) of the rows; what is not finite is 0."""
    xp = ctx.xp
    if xp is not np:
        out[...] = orthonormal_reference(xp, xp.where(xp.isfinite(rows), rows, np.float32(0)))
        return
    from ringlet.compressors.kernels import lowrank

    r, n = rows.shape
    room = ctx.workspace.array("orthonormal", (r + 1) * n + r, np.float64)
    lowrank.orthonormal(rows, _SMALL, room, out)


def orthonormal_reference(xp: Any, rows: Array) -> Array:
    """Do the same for finite rows in array code."""
    basis, unit = rows.astype("float64"), 0
    for k in range(len(basis)):
        while True:
            row = basis[k]
            before = xp.sqrt(_folded(row * row))
            for _ in range(2):
                parts = _folded(basis[:k] * row)
                for j in range(k):
                    row -= parts[j] * basis[j]
            norm = xp.sqrt(_folded(row * row))
            if norm > _SMALL * before:
                break
            row[...] = 0
            row[unit] = 1
            unit += 1
        row /= norm
    out: Array = basis.astype("float32")
    return out


def _folded(terms: Array) -> Array:
    """Return the sums over the last axis, adding its second half onto the first."""
    n = terms.shape[-1]
    while n > 1:
        half = (n + 1) // 2
        terms[..., : n - half] += terms[..., half:n]
        n = half
    return terms[..., 0]


class Source:
    """A matrix to be approximated (float32, n x m), or with a residual matrix + decay * residual.

    That sum is left in ``target`` by the first product, in one pass on a CPU.
    """

    def __init__(
        self,
        matrix: Array,
        ctx: Context,
        residual: Array | None = None,
        decay: float = 1.0,
        target: Array | None = None,
    ) -> None:
        self.shape: tuple[int, int] = matrix.shape
        self._matrix, self._ctx = matrix, ctx
        self._residual, self._weight, self._target = residual, np.float32(decay), target

    def times_rows(self, right: Array, out: Array) -> None:
        """Fill ``out`` (r x n) with right M^T."""
        x, residual, target, weight = self._matrix, self._residual, self._target, self._weight
        if self._ctx.xp is not np:
            out[...] = right @ x.T
            return
        from ringlet.compressors.kernels import lowrank

        m = self.shape[1]

        def multiply(start: int, stop: int) -> None:
            first, rows = start // m, slice(start // m, stop // m)
            if residual is None or target is None:
                lowrank.times_rows(right, x[rows], first, out)
            else:
                held, sums = residual[rows], target[rows]
                lowrank.sum_times_rows(right, x[rows], held, weight, sums, first, out)

        run_ranges(x.size, m, multiply)
        self._has_target()

    def times_columns(self, left: Array, out: Array) -> None:
        """Fill ``out`` (r x m) with left M."""
        if self._residual is not None and self._target is not None:
            whole, held = self._target.reshape(-1), self._residual.reshape(-1)
            target_into(self._matrix.reshape(-1), held, float(self._weight), whole, self._ctx)
            self._has_target()
        matrix = self._matrix
        if self._ctx.xp is not np:
            out[...] = left @ matrix
            return
        from ringlet.compressors.kernels import lowrank

        n, m = self.shape
        room = self._ctx.workspace.array("columns", len(left) * m)

        def multiply(start: int, stop: int) -> None:
            first, last = start // n, stop // n
            sums = room[first * len(left) : last * len(left)]
            lowrank.times_columns(left, matrix, first, last, sums, out)

        run_ranges(n * m, n * lowrank.COLUMNS, multiply)

    def _has_target(self) -> None:
        if self._target is not None:
            self._matrix, self._residual = self._target, None


def product(factors: Factors, poison: Any, out: Array, ctx: Context) -> None:
    """Fill ``out`` with (left + poison)^T right, adding in order of the rank."""
    left, right = factors
    if ctx.xp is np:
        from ringlet.compressors.kernels import lowrank

        m = out.shape[1]

        def multiply(start: int, stop: int) -> None:
            lowrank.product(left, poison, right, start // m, out[start // m : stop // m])

        run_ranges(out.size, m, multiply)
        return
    with np.errstate(invalid="ignore", over="ignore"):
        left = left + poison
        out[...] = left[0][:, None] * right[0]
        for k in range(1, len(left)):
            out += left[k][:, None] * right[k]


def product_and_lost(
    both: Factors,
    own: Factors,
    poison: Any,
    target: Array,
    out: Array,
    residual: Array,
    ctx: Context,
) -> None:
    """Fill ``out`` with the product of ``both``, ``residual`` with target less that of ``own``.

    The residual stays where it or the result would not be finite. CPU only.
    """
    from ringlet.compressors.kernels import lowrank

    (left, right), (own_left, own_right), m = both, own, out.shape[1]

    def multiply(start: int, stop: int) -> None:
        rows = slice(start // m, stop // m)
        with ctx.workspace.held(lowrank.CHUNK) as room:
            lowrank.product_and_lost(
                left, right, own_left, own_right, poison, start // m,
                target[rows], out[rows], residual[rows], room,
            )  # fmt: skip

    run_ranges(out.size, m, multiply)
