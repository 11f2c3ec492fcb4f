"""Products of a matrix with low-rank factors, and of the factors: kernels, array code elsewhere.

Every rank gets the same bits from the same factors. Products with the whole matrix are of one rank
alone, and cuBLAS makes them on a GPU, whose sums have an order of their own.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringlet.compressors.base.cuda_device import device_for
from ringlet.compressors.base.feedback import target_into
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.lengths import check_shapes
from ringlet.compressors.core.read_only import unlocked
from ringlet.compressors.core.threads import run_ranges

Factors = tuple[Array, Array]  # r x n and r x m


class Source:
    """A matrix to be approximated (float32, n x m), or with a residual matrix + decay * residual.

    That sum is left in ``target`` by the first product, in its own pass on a CPU.
    """

    def __init__(
        self,
        matrix: Array,
        ctx: Context,
        residual: Array | None = None,
        decay: float = 1.0,
        target: Array | None = None,
    ) -> None:
        for array in (residual, target):
            if array is not None:
                check_shapes("a residual's product", array=(array, matrix.shape))
        self.shape: tuple[int, int] = matrix.shape
        self._matrix, self._ctx = unlocked(matrix) if ctx.xp is np else matrix, ctx
        self._residual, self._weight, self._target = residual, np.float32(decay), target

    def times_rows(self, right: Array, out: Array) -> None:
        """Fill ``out`` (r x n) with right M^T."""
        x, residual, target, weight = self._matrix, self._residual, self._target, self._weight
        n, m = self.shape
        check_shapes("a product", right=(right, (len(right), m)), out=(out, (len(right), n)))
        if self._ctx.xp is not np:
            self._add()
            with np.errstate(invalid="ignore", over="ignore"):
                self._ctx.xp.matmul(right, self._matrix.T, out=out)
            return
        from ringlet.compressors.kernels.cpu.lowrank import products as kernels

        def multiply(start: int, stop: int) -> None:
            first, rows = start // m, slice(start // m, stop // m)
            if residual is None or target is None:
                kernels.times_rows(right, x[rows], first, out)
            else:
                held, sums = residual[rows], target[rows]
                kernels.sum_times_rows(right, x[rows], held, weight, sums, first, out)

        run_ranges(x.size, m, multiply)
        self._has_target()

    def times_columns(self, left: Array, out: Array) -> None:
        """Fill ``out`` (r x m) with left M."""
        self._add()
        matrix, (n, m) = self._matrix, self.shape
        check_shapes("a product", left=(left, (len(left), n)), out=(out, (len(left), m)))
        if self._ctx.xp is not np:
            with np.errstate(invalid="ignore", over="ignore"):
                self._ctx.xp.matmul(left, matrix, out=out)
            return
        from ringlet.compressors.kernels.cpu.lowrank import products as kernels

        room = self._ctx.workspace.array("columns", len(left) * m)

        def multiply(start: int, stop: int) -> None:
            first, last = start // n, stop // n
            sums = room[first * len(left) : last * len(left)]
            kernels.times_columns(left, matrix, first, last, sums, out)

        run_ranges(n * m, n * kernels.COLUMNS, multiply)

    def _add(self) -> None:
        if self._residual is not None and self._target is not None:
            whole, held = self._target.reshape(-1), self._residual.reshape(-1)
            target_into(self._matrix.reshape(-1), held, float(self._weight), whole, self._ctx)
            self._has_target()

    def _has_target(self) -> None:
        if self._target is not None:
            self._matrix, self._residual = self._target, None


def product(factors: Factors, poison: Any, out: Array, ctx: Context) -> None:
    """Fill ``out`` with (left + poison)^T right, adding in order of the rank."""
    left, right = factors
    _check_factors(left, right, out)
    if ctx.xp is np:
        from ringlet.compressors.kernels.cpu.lowrank import products as kernels

        m = out.shape[1]

        def multiply(start: int, stop: int) -> None:
            kernels.product(left, poison, right, start // m, out[start // m : stop // m])

        run_ranges(out.size, m, multiply)
        return
    device = device_for(ctx)
    if device is not None:
        from ringlet.compressors.kernels.cuda.lowrank import products as cuda

        cuda.product(device, left, right, poison, out)
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

    The residual stays where it or the result would not be finite. Only where there are kernels.
    """
    (left, right), (own_left, own_right), m = both, own, out.shape[1]
    _check_factors(left, right, out)
    _check_factors(own_left, own_right, out)
    check_shapes("a product", target=(target, out.shape), residual=(residual, out.shape))
    device = device_for(ctx)
    if device is not None:
        from ringlet.compressors.kernels.cuda.lowrank import products as cuda

        cuda.product(
            device, left, right, poison, out,
            own_left=own_left, own_right=own_right, target=target, residual=residual,
        )  # fmt: skip
        return
    from ringlet.compressors.kernels.cpu.lowrank import products as kernels

    def multiply(start: int, stop: int) -> None:
        rows = slice(start // m, stop // m)
        with ctx.workspace.held(kernels.CHUNK) as room:
            kernels.product_and_lost(
                left, right, own_left, own_right, poison, start // m,
                target[rows], out[rows], residual[rows], room,
            )  # fmt: skip

    run_ranges(out.size, m, multiply)


def _check_factors(left: Array, right: Array, out: Array) -> None:
    (n, m), r = out.shape, len(left)
    check_shapes("a product of factors", left=(left, (r, n)), right=(right, (r, m)))
