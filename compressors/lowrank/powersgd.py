"""Low-rank approximations of matrices, whose factors add up on the wire.

Vogels, Karimireddy and Jaggi, "PowerSGD: practical low-rank gradient compression for distributed
optimization", NeurIPS 2019; Zhang et al., "Evaluation and optimization of gradient compression for
distributed deep learning" (ACP-SGD), ICDCS 2023.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np

from ringlet.compressors.base.batched import BatchedRounds, Exchanged
from ringlet.compressors.base.contract import Compressor, Exchange, Round, Traits, keeps
from ringlet.compressors.base.cuda_device import device_for
from ringlet.compressors.base.precompile import rehearse, rehearse_together
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.options import option
from ringlet.compressors.core.remembered import remember_rows, remembered_rows
from ringlet.compressors.lowrank.factors import draw, keep, orthonormal, poison_of, revived
from ringlet.compressors.lowrank.products import Factors, Source, product, product_and_lost
from ringlet.compressors.specs.registry import register

Finish = Callable[[Factors, Factors, Any], None]


class LowRank(Compressor):
    """Base of the low-rank compressors.

    A tensor of two or more dimensions is a matrix of shape[0] rows. Where two factors would take
    as much as the matrix itself, and for vectors, the mean travels uncompressed. The result is
    the mean's projection onto a subspace, so it is never longer than the mean. A NaN or Inf on
    any rank makes the whole result NaN, and leaves what is remembered as it was.
    """

    most_rounds: ClassVar[int] = 2  # that ``exchange`` makes
    rank: int = option(4, ge=1, le=1024, doc="rank of the approximation")

    def traits(self) -> Traits:
        """Rounds; what is remembered is the same on all ranks."""
        return Traits("rounds", stateful=True, in_place=True)

    def matrix(self, x: Array, ctx: Context) -> Array | None:
        """Return ``x`` as a matrix, or None if it is to travel uncompressed."""
        if math.prod(ctx.shape) != x.size:
            return None
        return x.reshape(ctx.shape[0], -1) if self.approximates(ctx.shape) else None

    def approximates(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of ``shape`` travels as factors."""
        if len(shape) < 2:
            return False
        n, m = shape[0], math.prod(shape[1:])
        return self.rank * (n + m) < n * m

    def exchange(self, x: Array, out: Array, ctx: Context, local: Array | None = None) -> Exchange:
        """Exchange factors, or the values themselves."""
        matrix = self.matrix(x, ctx)
        if matrix is None:
            if local is not None:
                local[...] = x
            out[...] = yield Round(x, "mean", local)
            return

        def finish(both: Factors, own: Factors, poison: Any) -> None:
            product(both, poison, out.reshape(matrix.shape), ctx)
            if local is not None:
                product(own, poison, local.reshape(matrix.shape), ctx)

        yield from self.factors(Source(matrix, ctx), finish, ctx)

    def exchange_feedback(
        self,
        x: Array,
        out: Array,
        residual: Array,
        decay: float,
        ctx: Context,
        local: Array | None = None,
    ) -> Exchange:
        """Add the residual in the first product's pass, and keep what is lost in the last one's."""
        matrix = self.matrix(x, ctx)
        kernels = ctx.xp is np or device_for(ctx) is not None
        if matrix is None or local is not None or not kernels:
            yield from super().exchange_feedback(x, out, residual, decay, ctx, local)
            return
        n, m = matrix.shape
        with ctx.workspace.held(x.size) as room:
            target, held = room.reshape(n, m), residual.reshape(n, m)

            def finish(both: Factors, own: Factors, poison: Any) -> None:
                product_and_lost(both, own, poison, target, out.reshape(n, m), held, ctx)

            source = Source(matrix, ctx, held, decay, target)
            yield from self.factors(source, finish, ctx)

    def factors(self, source: Source, finish: Finish, ctx: Context) -> Exchange:
        """Exchange the factors of a matrix; tell ``finish`` all ranks' and this rank's own.

        And 0, or NaN where something was not finite on any rank.
        """
        raise TypeError(f"{type(self).__name__} does not say which factors travel")

    def warm_up(self, ctx: Context) -> None:
        """Compile the kernels, on a matrix of zeros and one rank."""
        side = 2 * self.rank + 1
        x, out, residual = (ctx.xp.zeros(side * side, "float32") for _ in range(3))
        for step in range(2):
            alone = Context(
                shape=(side, side), numel=x.size, step=step, xp=ctx.xp, workspace=ctx.workspace
            )
            rehearse(self.exchange(x, out, alone))
            rehearse(self.exchange_feedback(x, out, residual, 1.0, alone))
            rehearse_together(self, Exchanged(x, out, alone, residual))


@register("powersgd")
class PowerSGD(LowRank):
    """Send a rank-``rank`` approximation P Q^T by one step of power iteration, in two rounds.

    P = M Q is averaged and made orthonormal; Q = M^T P is averaged. With a warm start the next
    step begins with this Q, so that a slowly changing matrix is approximated ever better; without,
    Q is drawn anew. So are rows of Q that a column of zeros in M has left as zeros: what comes in
    that column later might never be sent. Takes 4 rank (n + m) bytes for n x m elements. Use it
    with error feedback, and after some hundred uncompressed steps:
    ``powersgd | ef | warmup(dense=1000)``.
    """

    paper: ClassVar[str] = "Vogels, NeurIPS 2019"
    warm_start: bool = option(True, doc="begin with the last step's factor")

    def traits(self) -> Traits:
        """Two rounds; remembers a factor with a warm start."""
        return Traits("rounds", stateful=self.warm_start, in_place=True)

    def batched_rounds(self) -> BatchedRounds | None:
        """The kernels for many matrices a call."""
        if not keeps(self, PowerSGD, "factors", "matrix", "exchange", "exchange_feedback"):
            return None
        from ringlet.compressors.lowrank.powersgd_many import exchange_many

        exchange = partial(exchange_many, self.rank, self.warm_start)
        return BatchedRounds(self.approximates, exchange, exchange)

    def factors(self, source: Source, finish: Finish, ctx: Context) -> Exchange:
        """Average P, then Q; factors are held as rows."""
        r, (n, m), held = self.rank, source.shape, ctx.workspace.held
        with held(r * n) as rows, held(r * m) as columns, held(r * m) as first:
            basis, own = rows.reshape(r, n), columns.reshape(r, m)
            start = known = first.reshape(r, m)
            if self.warm_start:
                known = remembered_rows("right", start, draw, ctx)
                start = known if known is start else revived(known, start, ctx)
            else:
                draw(start, ctx)
            source.times_rows(start, basis)
            left = (yield Round(rows)).reshape(r, n)
            poison = poison_of(left, ctx)
            orthonormal(left, basis, ctx)
            source.times_columns(basis, own)
            right = (yield Round(columns, "mean", columns)).reshape(r, m)
            if self.warm_start:
                keep(right, poison, remember_rows("right", known, ctx), ctx)
            finish((basis, right), (basis, own), poison)


@register("acpsgd")
class ACPSGD(LowRank):
    """Send one factor of a rank-``rank`` approximation, P and Q in turn: a single round.

    Half of PowerSGD's bytes and rounds. The factor that does not travel is the one of the step
    before, made orthonormal. Use it with error feedback, and after some uncompressed steps.
    """

    paper: ClassVar[str] = "Zhang, ICDCS 2023"

    def batched_rounds(self) -> BatchedRounds | None:
        """The kernels for many matrices a call."""
        if not keeps(self, ACPSGD, "factors", "matrix", "exchange", "exchange_feedback"):
            return None
        from ringlet.compressors.lowrank.powersgd_many import exchange_in_turn

        exchange = partial(exchange_in_turn, self.rank)
        return BatchedRounds(self.approximates, exchange, exchange)

    def factors(self, source: Source, finish: Finish, ctx: Context) -> Exchange:
        """Average P in even steps and Q in odd ones; factors are held as rows."""
        r, even, held = self.rank, ctx.step % 2 == 0, ctx.workspace.held
        fixed, sent = ("right", "left") if even else ("left", "right")
        n, m = source.shape if even else source.shape[::-1]  # of what is sent, and what is not
        with held(r * m) as known, held(r * n) as sending, held(r * m) as first:
            basis, own = known.reshape(r, m), sending.reshape(r, n)
            start = remembered_rows(fixed, first.reshape(r, m), draw, ctx)
            orthonormal(start, basis, ctx)
            (source.times_rows if even else source.times_columns)(basis, own)
            other = (yield Round(sending, "mean", sending)).reshape(r, n)
            remember_rows(fixed, start, ctx)
            with held(r * n) as second:
                # Numbers of their own: the same as in the other factor would be no guess at all.
                other_draw = partial(draw, stream=1)
                old = remembered_rows(sent, second.reshape(r, n), other_draw, ctx)
                keep(other, None, remember_rows(sent, old, ctx), ctx)
            poison = poison_of(other, ctx)
            if even:
                finish((other, basis), (own, basis), poison)
            else:
                finish((basis, other), (basis, own), poison)
