"""Error feedback: what compression dropped is added to the next gradient.

Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; Karimireddy et al., "Error
feedback fixes SignSGD", ICML 2019; of both stages of a reduction in Tang et al., "DoubleSqueeze:
parallel stochastic gradient descent with double-pass error-compensated compression", ICML 2019.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from ringlet.compressors.context import Array, Context
from ringlet.compressors.contract import Exchange, Payload, Traits, encoded
from ringlet.compressors.errors import CompressorError
from ringlet.compressors.modifier import Modifier
from ringlet.compressors.multitensor import (
    Decoding,
    Encoding,
    MultiTensor,
    Spaced,
    Sum,
    Varying,
    keeps,
)
from ringlet.compressors.options import option
from ringlet.compressors.registry import register
from ringlet.compressors.remembered import remembered


@register("ef")
class ErrorFeedback(Modifier):
    """Keep a residual e per tensor: send C(x + decay * e), keep what that lost.

    With decay 1, over any number of steps the sum of what was sent plus the last residual equals
    the sum of the gradients. Costs one float32 per element of memory on every rank. Elements whose
    new residual would not be finite keep the old one, so that one overflow cannot poison a run.
    In a scatter-reduce the owner of a shard keeps a second residual, of the sum that it compresses
    again (DoubleSqueeze); for that one alone there is ``server_ef``.
    """

    decay: float = option(1.0, gt=0, le=1, doc="how much of the residual is carried over")

    def validate(self) -> None:
        """Refuse what keeps its own memory of what was not sent, and what would diverge."""
        if self.inner is not None and self.inner.is_bound():
            inner = self.inner.traits()
            if inner.stateful and inner.combine != "rounds":
                raise CompressorError(
                    f"{self.inner} remembers what it did not send by itself; leave "
                    f"'| {self.label()}' away"
                )
            self.refuse_divergence()

    def traits(self) -> Traits:
        """Return the wrapped traits; feedback makes them stateful and breaks unbiasedness."""
        inner = self.wrapped_compressor.traits()
        return dataclasses.replace(
            inner,
            stateful=True,
            gradient_units=(*inner.gradient_units, "residual"),
            omega=None,
            delta=None,
            in_place=True,
        )

    def remembers(self, ctx: Context) -> bool:
        """Whether what is lost in this stage is fed back."""
        return True

    def residual(self, n: int, ctx: Context) -> Array:
        """Return the residual of a piece of ``n`` elements, creating zeros at the first step."""
        return remembered("residual", n, ctx)

    def with_residuals(self, tensors: Sequence[Encoding]) -> Sequence[Encoding]:
        """Return ``tensors``, all of one stage, with the residuals that they have in it."""
        if not self.remembers(tensors[0].ctx):
            return tensors
        return [t._replace(residual=self.residual(t.n, t.ctx)) for t in tensors]

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Compress x plus the residual; keep what was lost."""
        inner = self.wrapped_compressor
        if not self.remembers(ctx):
            return encoded(inner, x, ctx)
        return inner.compress_feedback(x, self.residual(x.size, ctx), self.decay, ctx)

    def encode_into(self, x: Array, payload: Payload, ctx: Context) -> None:
        """Do the same in the wrapped compressor's fused kernel, if it has one."""
        inner = self.wrapped_compressor
        if self.remembers(ctx):
            inner.feedback_into(x, self.residual(x.size, ctx), self.decay, payload, ctx)
        else:
            inner.encode_into(x, payload, ctx)

    def multi_tensor(self, ctx: Context) -> MultiTensor | None:
        """The wrapped compressor's kernels, which read and write residuals in the same pass."""
        own = keeps(self, ErrorFeedback, "encode_into", "residual") and keeps(
            self, Modifier, "decompress", "sum_into"
        )
        inner = self.wrapped_compressor.multi_tensor(ctx) if own else None
        return None if inner is None else _Feeding(inner, self)

    def multi_varying(self, ctx: Context) -> Varying | None:
        """The same for payloads of variable size."""
        own = keeps(self, ErrorFeedback, "compress", "residual") and keeps(
            self, Modifier, "decompress", "sum_into"
        )
        inner = self.wrapped_compressor.multi_varying(ctx) if own else None
        return _Remembering(inner, self) if inner is not None and inner.feeds else None

    def exchange(self, x: Array, out: Array, ctx: Context, local: Array | None = None) -> Exchange:
        """Exchange x plus the residual; keep what this rank's share of the result lacks of it."""
        residual, inner = self.residual(x.size, ctx), self.wrapped_compressor
        yield from inner.exchange_feedback(x, out, residual, self.decay, ctx, local)


@register("server_ef")
class ServerErrorFeedback(ErrorFeedback):
    """Feed back only what the second compression of a scatter-reduce loses, at a shard's owner.

    The server's half of DoubleSqueeze (Tang et al., ICML 2019), for compressors that lose little
    of a gradient, or without bias, while sums have to be right: one float32 per element on one
    rank instead of on all. ``ef`` does both halves. Where payloads are gathered by everybody, as
    on few ranks, nothing is compressed a second time and there is nothing to do.
    """

    def validate(self) -> None:
        """Refuse what is never compressed a second time."""
        super().validate()
        if self.inner is not None and self.inner.is_bound():
            traits = self.inner.traits()
            whole = traits.combine != "gather" or not traits.fixed_size
            if whole or traits.granularity is None:
                raise CompressorError(
                    f"{self.inner} cannot be reduced in shards, so that its sums are never "
                    f"compressed again: 'server_ef' would do nothing. Use 'ef'"
                )

    def remembers(self, ctx: Context) -> bool:
        """Whether a shard's sum is compressed."""
        return ctx.stage != 1


class _Feeding(NamedTuple):
    """Kernels that are given the residuals of ``owner``."""

    inner: MultiTensor
    owner: ErrorFeedback

    def encode(
        self,
        tensors: Sequence[Encoding],
        spaced: Spaced | None = None,
        scale: float = 1.0,
        decay: float = 1.0,
        weight: float = 1.0,
    ) -> None:
        """Encode with feedback, in stages that have it."""
        given = self.owner.with_residuals(tensors)
        self.inner.encode(given, spaced, scale, self.owner.decay, weight)

    def decode(
        self,
        tensors: Sequence[Decoding],
        spaced: Spaced | None = None,
        scale: float = 1.0,
        weight: float = 1.0,
    ) -> None:
        """Decode as the wrapped compressor does."""
        self.inner.decode(tensors, spaced, scale, weight)


@dataclasses.dataclass(frozen=True)
class _Remembering:
    """Kernels of payloads of variable size that are given the residuals of ``owner``."""

    feeds: ClassVar[bool] = False
    inner: Varying
    owner: ErrorFeedback

    def compress(
        self, tensors: Sequence[Encoding], scale: float = 1.0, decay: float = 1.0
    ) -> list[Payload]:
        """Compress with feedback."""
        return self.inner.compress(self.owner.with_residuals(tensors), scale, self.owner.decay)

    def decode(self, sums: Sequence[Sum], scale: float = 1.0) -> None:
        """Decode as the wrapped compressor does."""
        self.inner.decode(sums, scale)
