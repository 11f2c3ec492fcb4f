"""Low-rank approximations of matrices, whose factors add up on the wire.

Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed
optimization", NeurIPS 2019; Zhang et al., "Evaluation and optimization of gradient compression for
distributed deep learning" (ACP-SGD), ICDCS 2023.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import numpy as np

from ringlet.compressors.context import Array, Context
from ringlet.compressors.contract import Compressor, Exchange, Round, Traits
from ringlet.compressors.options import option
from ringlet.compressors.pool import run_ranges
from ringlet.compressors.registry import register

# A row that keeps less of its length than this beside those before it is not independent.
_SMALL = 1e-9


class LowRank(Compressor):
    """Base of the low-rank compressors.

    A tensor of two or more dimensions is a matrix of shape[0] rows. Where two factors would take
    as much as the matrix itself, and for vectors, the mean travels uncompressed. The result is
    the mean's projection onto a subspace, so it is never longer than the mean. A NaN or Inf on
    any rank makes the whole result NaN, and leaves what is remembered as it was.
    """

    rank: int = option(4, ge=1, le=1024, doc="rank of the approximation")

    def traits(self) -> Traits:
        """Rounds; what is remembered is the same on all ranks."""
        return Traits("rounds", stateful=True)

    def matrix(self, x: Array, ctx: Context) -> Array | None:
        """Return ``x`` as a matrix, or None if it is to travel uncompressed."""
        if len(ctx.shape) < 2 or math.prod(ctx.shape) != x.size:
            return None
        n = ctx.shape[0]
        m = x.size // max(n, 1)
        return x.reshape(n, m) if self.rank * (n + m) < n * m else None

    def exchange(self, x: Array, out: Array, ctx: Context, local: Array | None = None) -> Exchange:
        """Exchange factors, or the values themselves."""
        matrix = self.matrix(x, ctx)
        if matrix is None:
            out[...] = yield Round(x, "mean")
            if local is not None:
                local[...] = x
        else:
            own = None if local is None else local.reshape(matrix.shape)
            yield from self.factors(matrix, out.reshape(matrix.shape), own, ctx)

    def factors(self, matrix: Array, out: Array, local: Array | None, ctx: Context) -> Exchange:
        """Exchange the factors of a matrix; leave products in ``out`` and ``local``."""
        raise TypeError(f"{type(self).__name__} does not say which factors travel")

    def warm_up(self, ctx: Context) -> None:
        """Compile the kernels, on a matrix of zeros and one rank."""
        side = 2 * self.rank + 1
        x = ctx.xp.zeros(side * side, "float32")
        for step in range(2):
            alone = Context(shape=(side, side), numel=x.size, step=step, xp=ctx.xp)
            rounds = self.exchange(x, ctx.xp.empty_like(x), alone)
            sent = next(rounds)
            with suppress(StopIteration):
                while True:
                    sent = rounds.send(sent.values)


@register("powersgd")
class PowerSGD(LowRank):
    """Send a rank-``rank`` approximation P Q^T by one step of power iteration, in two rounds.

    P = M Q is averaged and made orthonormal; Q = M^T P is averaged. With a warm start the next
    step begins with this Q, so that a slowly changing matrix is approximated ever better; without,
    Q is drawn anew. Takes 4 rank (n + m) bytes for n x m elements. Use it with error feedback,
    and after some hundred uncompressed steps: ``powersgd | ef | warmup(dense=1000)``.
    """

    warm_start: bool = option(True, doc="begin with the last step's factor")

    def traits(self) -> Traits:
        """Two rounds; remembers a factor with a warm start."""
        return Traits("rounds", stateful=self.warm_start)

    def factors(self, matrix: Array, out: Array, local: Array | None, ctx: Context) -> Exchange:
        """Average P, then Q; factors are held as rows."""
        xp = ctx.xp
        start = ctx.state.get("right") if self.warm_start else None
        if start is None:
            start = drawn(self.rank, matrix.shape[1], ctx)
        with np.errstate(invalid="ignore", over="ignore"):
            left = (yield Round(_times_rows(xp, start, matrix).reshape(-1))).reshape(self.rank, -1)
            poison = xp.abs(left).max() * np.float32(0)  # 0, or NaN where it must show
            left = orthonormal(xp, xp.where(xp.isfinite(left), left, np.float32(0)))
            own = _times_columns(xp, left, matrix)
            right = (yield Round(own.reshape(-1))).reshape(self.rank, -1)
            if self.warm_start:
                ctx.state["right"] = kept(xp, right, start, poison)
            _product(xp, left + poison, right, out)
            if local is not None:
                _product(xp, left + poison, own, local)


@register("acpsgd")
class ACPSGD(LowRank):
    """Send one factor of a rank-``rank`` approximation, P and Q in turn: a single round.

    Half of PowerSGD's bytes and rounds. The factor that does not travel is the one of the step
    before, made orthonormal. Use it with error feedback, and after some uncompressed steps.
    """

    def factors(self, matrix: Array, out: Array, local: Array | None, ctx: Context) -> Exchange:
        """Average P in even steps and Q in odd ones; factors are held as rows."""
        xp, even = ctx.xp, ctx.step % 2 == 0
        held, sent = ("right", "left") if even else ("left", "right")
        fixed = ctx.state.get(held)
        if fixed is None:
            fixed = drawn(self.rank, matrix.shape[even], ctx)
        basis = orthonormal(xp, fixed)
        with np.errstate(invalid="ignore", over="ignore"):
            own = (_times_rows if even else _times_columns)(xp, basis, matrix)
            other = (yield Round(own.reshape(-1))).reshape(self.rank, -1)
            old = ctx.state.get(sent)
            if old is None:
                old = drawn(self.rank, other.shape[1], ctx)
            ctx.state[held] = fixed
            ctx.state[sent] = kept(xp, other, old, np.float32(0))
            poison = xp.abs(other).max() * np.float32(0)
            for factor, target in ((other, out), (own, local)):
                left, right = (factor, basis) if even else (basis, factor)
                if target is not None:
                    _product(xp, left + poison, right, target)


def drawn(r: int, n: int, ctx: Context) -> Array:
    """Return an r x n Gaussian matrix, the same on all ranks."""
    drawn: Array = ctx.xp.asarray(ctx.rng(shared=True).standard_normal((r, n), dtype=np.float32))
    return drawn


def kept(xp: Any, rows: Array, old: Array, poison: Any) -> Array:
    """Return what to begin the next step with: the rows, scaled to a largest value of 1.

    A row of zeros would stay zero for ever, so the old one is kept; all are if one is not finite.
    """
    top = xp.abs(rows).max(axis=1, keepdims=True)
    usable = xp.isfinite(top.max() + poison) & (top > 0)
    scaled: Array = xp.where(usable, rows / xp.where(usable, top, np.float32(1)), old)
    return scaled


def orthonormal(xp: Any, rows: Array) -> Array:
    """Return an orthonormal basis (float32) of the rows, with the same bits on every machine."""
    if xp is np:
        from ringlet.compressors.kernels import lowrank

        out = np.empty(rows.shape, np.float32)
        lowrank.orthonormal(np.ascontiguousarray(rows), _SMALL, out)
        return out
    return orthonormal_reference(xp, rows)


def orthonormal_reference(xp: Any, rows: Array) -> Array:
    """Do the same in array code."""
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


def _times_rows(xp: Any, right: Array, matrix: Array) -> Array:
    """Return right M^T."""
    if xp is not np:
        out: Array = right @ matrix.T
        return out
    from ringlet.compressors.kernels import lowrank

    n, m = matrix.shape
    out = np.empty((len(right), n), np.float32)

    def multiply(start: int, stop: int) -> None:
        rows = slice(start // m, stop // m)
        lowrank.times_rows(right, matrix[rows], out[:, rows])

    run_ranges(n * m, m, multiply)
    return out


def _times_columns(xp: Any, left: Array, matrix: Array) -> Array:
    """Return left M."""
    if xp is not np:
        out: Array = left @ matrix
        return out
    from ringlet.compressors.kernels import lowrank

    n, m = matrix.shape
    out = np.empty((len(left), m), np.float32)

    def multiply(start: int, stop: int) -> None:
        lowrank.times_columns(left, matrix, start // n, stop // n, out)

    run_ranges(n * m, n * lowrank.COLUMNS, multiply)
    return out


def _product(xp: Any, left: Array, right: Array, out: Array) -> None:
    """Fill ``out`` with left^T right, adding in order of the rank."""
    right = xp.ascontiguousarray(right)
    if xp is np:
        from ringlet.compressors.kernels import lowrank

        m = out.shape[1]

        def multiply(start: int, stop: int) -> None:
            rows = slice(start // m, stop // m)
            lowrank.product(left[:, rows], right, out[rows])

        run_ranges(out.size, m, multiply)
        return
    out[...] = left[0][:, None] * right[0]
    for k in range(1, len(left)):
        out += left[k][:, None] * right[k]
