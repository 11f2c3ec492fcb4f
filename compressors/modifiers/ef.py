"""Error feedback: what compression dropped is added to the next gradient.

Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; Karimireddy et al., "Error
feedback fixes SignSGD", ICML 2019; of both stages of a reduction in Tang et al., "DoubleSqueeze:
parallel stochastic gradient descent with double-pass error-compensated compression", ICML 2019.
Residuals of few bits that begin anew: Xie et al., "LoCo: low-bit communication adaptor for
large-scale model training", arXiv:2407.04480.

The wrapped compressor adds the residual (``feedback_into`` of ``base.contract``), in kernels as it
reads the gradient (``kernels.cpu.common.target``).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import ClassVar, NamedTuple

from ringlet.compressors.base.batched import (
    Batched,
    BatchedRounds,
    Exchanged,
    ExchangeOfMany,
    RowMemory,
)
from ringlet.compressors.base.composed_batches import fed_back, narrowed
from ringlet.compressors.base.contract import (
    Exchange,
    Payload,
    Traits,
    encoded,
    keeps,
    kept_losses,
)
from ringlet.compressors.base.modifier import Modifier
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.errors import CompressorError
from ringlet.compressors.core.multitensor import (
    Decoding,
    Encoding,
    MultiTensor,
    Spaced,
    Sum,
    Varying,
)
from ringlet.compressors.core.options import option
from ringlet.compressors.core.remembered import remembered
from ringlet.compressors.modifiers.residuals import STORES, Store, widen
from ringlet.compressors.specs.registry import register


@register("ef")
class ErrorFeedback(Modifier):
    """Keep a residual e per tensor: send C(x + decay * e), keep what that lost.

    With decay 1, over any number of steps the sum of what was sent plus the last residual equals
    the sum of the gradients. Costs one float32 per element of memory on every rank. Elements whose
    new residual would not be finite keep the old one, so that one overflow cannot poison a run.
    In a scatter-reduce the owner of a shard keeps a second residual, of the sum that it compresses
    again (DoubleSqueeze); for that one alone there is ``server_ef``.

    ``dtype`` keeps residuals in 16 bits, or in 8 with a bfloat16 scale per 128 elements (1.02 bytes
    an element), rounded at random: what that loses is lost, and is 0 on average. ``reset`` forgets
    them in every so many steps, as LoCo does, so that no error grows old.
    """

    paper: ClassVar[str] = "Karimireddy, ICML 2019"
    decay: float = option(1.0, gt=0, le=1, doc="how much of the residual is carried over")
    dtype: str = option("fp32", choices=("fp32", "bf16", "int8"), doc="what residuals are kept in")
    reset: int = option(0, ge=0, doc="steps after which residuals begin anew; 0: never")

    def validate(self) -> None:
        """Refuse what keeps its own memory of what was not sent, and what would diverge."""
        if self.inner is not None and self.inner.is_bound():
            names = kept_losses(self.inner)
            if names:
                raise CompressorError(
                    f"{self.inner} remembers what it did not send by itself, in {names}; leave "
                    f"'| {self.label()}' away. If that is something else, let its units_size(name, "
                    "n) return how many values it is"
                )
            self.refuse_divergence()

    def traits(self) -> Traits:
        """Return the wrapped traits; feedback makes them stateful and breaks unbiasedness."""
        inner, store = self.wrapped_compressor.traits(), self.store
        cut = inner.granularity
        return dataclasses.replace(
            inner,
            granularity=cut if cut is None or store is None else math.lcm(cut, store.granule),
            stateful=True,
            gradient_units=(*inner.gradient_units, "residual"),
            omega=None,
            delta=None,
            in_place=True,
        )

    def remembers(self, ctx: Context) -> bool:
        """Whether what is lost in this stage is fed back."""
        return True

    @property
    def store(self) -> Store | None:
        """What residuals are kept in; None: float32 arrays."""
        return STORES.get(self.dtype)

    def forgets(self, step: int) -> bool:
        """Whether residuals begin anew at ``step``."""
        return self.reset > 0 and step > 0 and step % self.reset == 0

    @contextmanager
    def residuals(self, pieces: Sequence[tuple[int, Context]]) -> Iterator[list[Array]]:
        """Lend the residuals, as float32 to be overwritten, of pieces (elements, context).

        They are of one stage. Zeros at the first step, and where they begin anew. What is kept in
        fewer bits is rounded when the with-block ends, unless by an error.
        """
        store = self.store
        if store is None:
            yield [self.residual(n, ctx) for n, ctx in pieces]
            return
        with ExitStack() as held:
            kept = [store.arrays(n, ctx) for n, ctx in pieces]
            lent = [held.enter_context(ctx.workspace.held(n)) for n, ctx in pieces]
            kernels = store.multi_tensor(pieces[0][1])
            given = list(zip(lent, kept, pieces, strict=True))
            if kernels is not None:
                kernels.decode([Decoding(wide, arrays, ctx) for wide, arrays, (_, ctx) in given])
            for wide, arrays, (_, ctx) in given:
                if kernels is None:
                    store.decompress(arrays, wide, ctx)
                if self.forgets(ctx.step):
                    wide[...] = 0
            yield lent
            if kernels is not None:
                kernels.encode([Encoding(w, n, arrays, ctx) for w, arrays, (n, ctx) in given])
                return
            for wide, arrays, (_, ctx) in given:
                store.encode_into(wide, arrays, ctx)

    def residual(self, n: int, ctx: Context) -> Array:
        """Return the float32 residual of a piece of ``n`` elements, kept as it is."""
        if "residual" not in ctx.state:
            widen(ctx.state)  # it may be from a checkpoint where it took less memory
        held = remembered("residual", n, ctx)
        if self.forgets(ctx.step):
            held[...] = 0
        return held

    @contextmanager
    def with_residuals(self, tensors: Sequence[Encoding]) -> Iterator[Sequence[Encoding]]:
        """Lend ``tensors``, all of one stage, with the residuals that they have in it."""
        if not self.remembers(tensors[0].ctx):
            yield tensors
            return
        with self.residuals([(t.n, t.ctx) for t in tensors]) as lent:
            yield [t._replace(residual=r) for t, r in zip(tensors, lent, strict=True)]

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Compress x plus the residual; keep what was lost."""
        inner = self.wrapped_compressor
        if not self.remembers(ctx):
            return encoded(inner, x, ctx)
        with self.residuals([(x.size, ctx)]) as (held,):
            return inner.compress_feedback(x, held, self.decay, ctx)

    def encode_into(self, x: Array, payload: Payload, ctx: Context) -> None:
        """Do the same in the wrapped compressor's fused kernel, if it has one."""
        inner = self.wrapped_compressor
        if not self.remembers(ctx):
            inner.encode_into(x, payload, ctx)
            return
        with self.residuals([(x.size, ctx)]) as (held,):
            inner.feedback_into(x, held, self.decay, payload, ctx)

    def multi_tensor(self, ctx: Context) -> MultiTensor | None:
        """The wrapped compressor's kernels, which read and write residuals in the same pass."""
        own = keeps(self, ErrorFeedback, "encode_into", "residual", "residuals") and keeps(
            self, Modifier, "decompress", "sum_into"
        )
        inner = self.wrapped_compressor.multi_tensor(ctx) if own else None
        return None if inner is None else _Feeding(inner, self)

    def batched(self) -> Batched | None:
        """The wrapped compressor's kernels, with residuals."""
        own = keeps(
            self, ErrorFeedback, "compress", "encode_into", "residual", "residuals"
        ) and keeps(self, Modifier, "decompress", "sum_into")
        inner = self.wrapped_compressor.batched() if own else None
        if inner is None or inner.memories:
            return None
        fed, store = inner.encode_fed or fed_back(inner), self.store
        memories: tuple[RowMemory, ...]
        if store is None:
            memories = (RowMemory(self._lent, ("residual",)),)
        else:
            memories, fed = store.memories(self._lent_part), narrowed(fed, *store.widening())
        if self.reset:  # the step decides, too
            memories = tuple(memory._replace(keys=()) for memory in memories)
        draws = inner.draws_own or store is not None
        return inner._replace(encode_fed=fed, memories=memories, decay=self.decay, draws_own=draws)

    def batched_rounds(self) -> BatchedRounds | None:
        """The wrapped compressor's, with residuals, where these are kept in float32."""
        own = keeps(self, ErrorFeedback, "exchange", "residual", "residuals")
        inner = self.wrapped_compressor.batched_rounds() if own and self.store is None else None
        if inner is None or inner.exchange_fed is None:
            return None
        exchange = inner.exchange_fed

        def fed_back(tensors: Sequence[Exchanged]) -> ExchangeOfMany:
            given = [t._replace(residual=self.residual(t.x.size, t.ctx)) for t in tensors]
            return exchange(given, self.decay)

        return BatchedRounds(inner.takes, fed_back)

    def _lent(self, n: int, ctx: Context) -> Array | None:
        return self.residual(n, ctx) if self.remembers(ctx) else None

    def _lent_part(self, name: str, n: int, ctx: Context) -> Array | None:
        """Return what is kept in fewer bits: an array of the ``store``."""
        if self.store is None or not self.remembers(ctx):
            return None
        held: Array = self.store.arrays(n, ctx)[name]
        if self.forgets(ctx.step):
            held[...] = 0
        return held

    def multi_varying(self, ctx: Context) -> Varying | None:
        """The same for payloads of variable size."""
        own = keeps(self, ErrorFeedback, "compress", "residual", "residuals") and keeps(
            self, Modifier, "decompress", "sum_into"
        )
        inner = self.wrapped_compressor.multi_varying(ctx) if own else None
        return _Remembering(inner, self) if inner is not None and inner.feeds else None

    def exchange(self, x: Array, out: Array, ctx: Context, local: Array | None = None) -> Exchange:
        """Exchange x plus the residual; keep what this rank's share of the result lacks of it."""
        with self.residuals([(x.size, ctx)]) as (held,):
            inner = self.wrapped_compressor
            yield from inner.exchange_feedback(x, out, held, self.decay, ctx, local)


@register("server_ef")
class ServerErrorFeedback(ErrorFeedback):
    """Feed back only what the second compression of a scatter-reduce loses, at a shard's owner.

    The server's half of DoubleSqueeze (Tang et al., ICML 2019), for compressors that lose little
    of a gradient, or without bias, while sums have to be right: one float32 per element on one
    rank instead of on all. ``ef`` does both halves. Where payloads are gathered by everybody, as
    on few ranks, nothing is compressed a second time and there is nothing to do.
    """

    paper: ClassVar[str] = "Tang, ICML 2019"

    def validate(self) -> None:
        """Refuse what is never compressed a second time."""
        super().validate()
        if self.inner is not None and self.inner.is_bound():
            traits = self.inner.traits()
            if traits.combine == "sum" and traits.omega == 0:
                return  # values as they are, as in the first steps of a schedule: none are lost
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
        with self.owner.with_residuals(tensors) as given:
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
        with self.owner.with_residuals(tensors) as given:
            return self.inner.compress(given, scale, self.owner.decay)

    def decode(self, sums: Sequence[Sum], scale: float = 1.0) -> None:
        """Decode as the wrapped compressor does."""
        self.inner.decode(sums, scale)
