"""EF21: compress what changed since the last step.

Richtarik, Sokolov and Fatkhullin, "EF21: a new, simpler, theoretically better, and practically
faster error feedback", NeurIPS 2021; of both directions in Fatkhullin et al., "EF21 with bells &
whistles", arXiv:2110.03294.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from ringlet.compressors.base.batched import Batched, Finishing, RowMemory
from ringlet.compressors.base.composed_batches import changes
from ringlet.compressors.base.contract import Payload, Traits, keeps
from ringlet.compressors.base.modifier import Modifier, finishes
from ringlet.compressors.core.context import SECOND_STAGE, Array, Context, State
from ringlet.compressors.core.errors import CompressorError
from ringlet.compressors.core.remembered import remembered
from ringlet.compressors.modifiers.state_updates import commit, difference_into
from ringlet.compressors.specs.registry import register


@register("ef21")
class EF21(Modifier):
    """Send C(x - g), and let g, which approximates x, follow by what was sent.

    Every rank holds its own g ("worker") and the mean of all ("server"), which is the result: two
    float32 per element. Gradients that stand still are approximated ever better; with a
    contraction delta, ||g - x||^2 shrinks by 1 - delta per step. Takes the place of ``ef``. Where
    anybody's sum is not finite, nobody's g changes, and so where an exchange fails.
    """

    paper: ClassVar[str] = "Richtarik, NeurIPS 2021"

    def validate(self) -> None:
        """Refuse what has no payload to decode again, sums that are rounded, a second memory."""
        if not self.is_bound():
            return
        self.refuse_second_memory()
        traits = self.wrapped_compressor.traits()
        if traits.combine == "sum" and traits.delta != 1:
            raise CompressorError(
                f"sums of {self.inner} are rounded on the wire, which ef21 would add up for ever"
            )
        if finishes(self.wrapped_compressor):
            raise CompressorError(
                f"{self.inner} changes the result in finish(), of which ef21, whose ranks follow "
                "what was sent, knows nothing; use 'ef'"
            )

    def traits(self) -> Traits:
        """Return the wrapped traits; results depend on the steps before."""
        inner = self.wrapped_compressor.traits()
        return dataclasses.replace(
            inner,
            stateful=True,
            gradient_units=("worker", "server", "sum", "known"),
            omega=None,
            delta=None,
        )

    def consolidate(self, states: Sequence[State]) -> State:
        """Begin with the mean of all ranks' g, which is then the result's g as well.

        That of a reduction in shards may lag behind: what it has still to send is not lost so.
        """
        found = super().consolidate(states)
        if "worker" in found:
            found["server"] = found["worker"].copy()
        return found

    def regrouped(self, state: State) -> State:
        """Begin anew: the mean of the g of those that are left is nothing that a rank knows."""
        return {}

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Compress the difference."""
        inner, difference = self.wrapped_compressor, self._difference(x, ctx)
        payload = inner.compress(difference, ctx)
        self._sent(x, payload, ctx)
        return payload

    def encode_into(self, x: Array, payload: Payload, ctx: Context) -> None:
        """Encode the difference."""
        self.wrapped_compressor.encode_into(self._difference(x, ctx), payload, ctx)
        self._sent(x, payload, ctx)

    def finish(self, out: Array, ctx: Context) -> None:
        """Turn the mean of what was sent into the mean of all g, and let this rank's g follow.

        So what the owner of a shard knows of its sum: before this, others may not have decoded it.
        """
        server = remembered("server", out.size, ctx)
        sent_parts, left = ctx.state.pop("sent", {}), out.size
        for offset, (n, payload) in reversed(sent_parts.items()):
            if not isinstance(offset, int):  # of a step that failed, out of a file of text keys
                continue
            if n > left:  # the newest are the whole: this is of a failed step, cut at other places
                break
            left -= n
            piece = slice(offset, offset + n)
            at = dataclasses.replace(ctx, offset=offset)
            sent = self._decoded(payload, n, at)
            commit(out[piece], sent, remembered("worker", n, at), server[piece], ctx)
        for key, state in ctx.state.items():
            if key.startswith(SECOND_STAGE) and isinstance(state, dict) and "sent" in state:
                x, payload = state.pop("sent")
                at = dataclasses.replace(ctx, numel=x.size, state=state, offset=0, stage=2)
                sent = self._decoded(payload, x.size, at)
                total, known = (remembered(name, x.size, at) for name in ("sum", "known"))
                commit(sent, x, total, known, at)
                ctx.workspace.back(x)

    def batched(self) -> Batched | None:
        """The wrapped compressor's kernels, with what is remembered."""
        own = keeps(
            self, EF21, "compress", "encode_into", "finish", "_difference", "_sent", "_decoded"
        ) and keeps(self, Modifier, "decompress", "sum_into")
        inner = self.wrapped_compressor.batched() if own else None
        if inner is None or inner.memories:
            return None
        from ringlet.compressors.kernels.cpu.modifiers.state_updates import commit_many

        ends = RowMemory(_own, ("worker", "sum")), RowMemory(_followed, ("server", "known"))
        return inner._replace(
            encode_fed=changes(inner),
            memories=(RowMemory(_known, ("worker", "known")), RowMemory(_total, ("sum",))),
            finishing=Finishing(ends, commit_many),
        )

    def _difference(self, x: Array, ctx: Context) -> Array:
        """Return x - g; the second stage of a reduction compresses a sum of what was sent."""
        difference = ctx.workspace.array("ef21", x.size)
        if ctx.stage == 1:
            difference_into(x, None, remembered("worker", x.size, ctx), difference, ctx)
        else:
            total, known = (remembered(name, x.size, ctx) for name in ("sum", "known"))
            difference_into(x, total, known, difference, ctx)
        return difference

    def _sent(self, x: Array, payload: Payload, ctx: Context) -> None:
        """Remember what was sent, and of which sum, until ``finish``."""
        copies = {name: _lent_copy(array, ctx) for name, array in payload.items()}
        if ctx.stage == 1:
            parts = ctx.state.setdefault("sent", {})
            parts.pop(ctx.offset, None)  # of a step that failed: the order is that of this step
            parts[ctx.offset] = (x.size, copies)
        else:
            ctx.state["sent"] = (_lent_copy(x, ctx), copies)

    def _decoded(self, payload: Payload, n: int, ctx: Context) -> Array:
        """Return what was sent, in scratch memory, and give the payload's back."""
        sent = ctx.workspace.array("ef21", n)
        self.wrapped_compressor.decompress(payload, sent, ctx)
        for array in payload.values():
            ctx.workspace.back(array)
        return sent


def _known(n: int, ctx: Context) -> Array:
    """Return g, or what others know of a shard's sum."""
    return remembered("worker" if ctx.stage == 1 else "known", n, ctx)


def _total(n: int, ctx: Context) -> Array | None:
    """Return a shard's sum."""
    return None if ctx.stage == 1 else remembered("sum", n, ctx)


def _own(n: int, ctx: Context) -> Array:
    """Return what a rank knows alone: its g, or a shard's sum."""
    return remembered("worker" if ctx.stage == 1 else "sum", n, ctx)


def _followed(n: int, ctx: Context) -> Array:
    """Return what all ranks know: the mean of all g, or what was sent of a shard's sum."""
    return remembered("server" if ctx.stage == 1 else "known", n, ctx)


def _lent_copy(array: Array, ctx: Context) -> Array:
    copy = ctx.workspace.lend(array.size, array.dtype)
    copy[...] = array
    return copy
