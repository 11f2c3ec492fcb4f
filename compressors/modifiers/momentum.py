"""Momentum before compression.

Lin et al., "Deep gradient compression: reducing the communication bandwidth for distributed
training", ICLR 2018.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, ClassVar

import numpy as np

from ringlet.compressors.base.batched import Batched, RowMemory
from ringlet.compressors.base.composed_batches import with_momentum
from ringlet.compressors.base.contract import Compressor, Payload, Traits, keeps
from ringlet.compressors.base.modifier import Modifier
from ringlet.compressors.base.norms import shrinking
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.errors import CompressorError
from ringlet.compressors.core.options import option
from ringlet.compressors.core.remembered import remembered
from ringlet.compressors.dense.none import NoCompression
from ringlet.compressors.modifiers.state_updates import advance, settle, settle_reference
from ringlet.compressors.specs.registry import register


@register("momentum_correction")
class MomentumCorrection(Modifier):
    """Keep u = momentum * u + x and v = v + u per tensor; send C(v), keep what that lost in v.

    For sparsifiers, in place of ``ef``; the optimizer's own momentum must then be 0. ``masking``
    also zeroes u where something was sent, so that old momentum does not push on; wherever
    everything is sent that is no momentum at all, so it does nothing over casts and ``none``, and
    should be off over quantisers. ``clip`` bounds a rank's gradient, per tensor, at clip /
    sqrt(ranks) in norm. Costs two float32 per element. NaN and Inf are sent but not remembered.

    Tensors that are too small to be compressed have the same momentum, and so have all in steps
    without compression (``warmup(dense=...)``): the optimizer has none for them.
    """

    paper: ClassVar[str] = "Lin, ICLR 2018"
    momentum: float = option(0.9, ge=0, lt=1, doc="share of u that stays")
    clip: float = option(0.0, ge=0, doc="norm of a tensor's mean gradient; 0: no clipping")
    masking: bool = option(True, doc="forget the momentum of what was sent")

    def validate(self) -> None:
        """Refuse a second memory, what has no payload to decode again, and units that change."""
        if not self.is_bound():
            return
        self.refuse_second_memory()
        over_steps = self.wrapped_compressor.over_steps()
        if len({each.traits().predivide for each in over_steps}) > 1:
            raise CompressorError(
                f"{self.inner} divides gradients by the number of ranks in some of its steps, and "
                "momentum goes on from one step to the next: put the schedule behind it, as in "
                "'fp16 | momentum_correction | warmup(dense=2)'"
            )

    def traits(self) -> Traits:
        """Return the wrapped traits; a norm to clip at is that of the whole tensor."""
        inner = self.wrapped_compressor.traits()
        if self.clip:
            inner = dataclasses.replace(inner, granularity=None, scales=False)
        units = ("u", "v")
        return dataclasses.replace(
            inner, stateful=True, gradient_units=units, omega=None, delta=None
        )

    def uncompressed(self) -> Compressor | None:
        """Return ``none`` with the same momentum: the optimizer has none for small tensors.

        Casts that divide before they add stay: momentum is of gradients in their units.
        """
        if self.wrapped_compressor.traits().predivide:
            return self
        return self.replace(inner=NoCompression())

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Advance, compress, and keep what was lost: on a CPU in array code."""
        inner, v = self.wrapped_compressor, remembered("v", x.size, ctx)
        if ctx.stage == 2:  # a sum of what ranks sent has had its momentum: only keep the loss
            return inner.compress_feedback(x, v, 1.0, ctx)
        if ctx.xp is not np:
            moved = self._advanced(x, ctx)
            payload = inner.compress_feedback(moved, v, 1.0, ctx)
            self._settle(moved, payload, ctx)
            return payload
        u = remembered("u", x.size, ctx)
        with np.errstate(invalid="ignore", over="ignore"):
            scale = self._scale(x, ctx)
            advanced = np.float32(self.momentum) * u + (x if scale is None else scale * x)
            target = v + advanced
        payload = inner.compress(target, ctx)
        inner.keep_residual(target, payload, v, ctx)
        sent = ctx.workspace.array("momentum", x.size)
        inner.decompress(payload, sent, ctx)
        settle_reference(advanced, sent, self._masks(), u, ctx)
        return payload

    def encode_into(self, x: Array, payload: Payload, ctx: Context) -> None:
        """Do the same with the wrapped compressor's fused feedback."""
        inner, v = self.wrapped_compressor, remembered("v", x.size, ctx)
        if ctx.stage == 2:
            inner.feedback_into(x, v, 1.0, payload, ctx)
            return
        advanced = self._advanced(x, ctx)
        inner.feedback_into(advanced, v, 1.0, payload, ctx)
        self._settle(advanced, payload, ctx)

    def batched(self) -> Batched | None:
        """The wrapped compressor's kernels, with both memories, where nothing is clipped."""
        own = keeps(self, MomentumCorrection, "compress", "encode_into") and keeps(
            self, Modifier, "decompress", "sum_into"
        )
        inner = self.wrapped_compressor.batched() if own and not self.clip else None
        if inner is None or inner.memories:
            return None
        return inner._replace(
            encode_fed=with_momentum(inner, self.momentum, self._masks()),
            memories=(RowMemory(partial(remembered, "v"), ("v",)), RowMemory(_momentum, ("u",))),
        )

    def _advanced(self, x: Array, ctx: Context) -> Array:
        """Return momentum * u + x, in scratch memory; u stays as it is until ``_settle``."""
        advanced = ctx.workspace.array("momentum.advanced", x.size)
        advance(x, self._scale(x, ctx), self.momentum, remembered("u", x.size, ctx), advanced, ctx)
        return advanced

    def _settle(self, advanced: Array, payload: Payload, ctx: Context) -> None:
        """Make that u, less what was sent."""
        sent = ctx.workspace.array("momentum", advanced.size)
        self.wrapped_compressor.decompress(payload, sent, ctx)
        settle(advanced, sent, self._masks(), remembered("u", advanced.size, ctx), ctx)

    def _masks(self) -> bool:
        # Payloads that add up hold every element: nothing is delayed that could be stale.
        return self.masking and self.wrapped_compressor.traits().combine != "sum"

    def _scale(self, x: Array, ctx: Context) -> Any:
        """Return what clipping multiplies the gradient by; None: nothing is clipped."""
        if not self.clip or x.size == 0:
            return None
        return shrinking(x, self.clip / ctx.size**0.5, ctx)


def _momentum(n: int, ctx: Context) -> Array | None:
    """Return u; a sum of what ranks sent has had its momentum."""
    return remembered("u", n, ctx) if ctx.stage == 1 else None
