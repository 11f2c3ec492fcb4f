"""Momentum before compression.

Lin et al., "Deep gradient compression: reducing the communication bandwidth for distributed
training", ICLR 2018.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ringlet.compressors.context import Array, Context
from ringlet.compressors.contract import Payload, Traits, keep_residual
from ringlet.compressors.energy import energy
from ringlet.compressors.modifier import Modifier
from ringlet.compressors.options import option
from ringlet.compressors.pool import run_ranges
from ringlet.compressors.registry import register


@register("momentum_correction")
class MomentumCorrection(Modifier):
    """Keep u = momentum * u + x and v = v + u per tensor; send C(v), keep what that lost in v.

    For sparsifiers, in place of ``ef``; the optimizer's own momentum must then be 0. ``masking``
    also zeroes u where something was sent, so that old momentum does not push on; wherever
    everything is sent that is no momentum at all, so it does nothing over casts and ``none``, and
    should be off over quantisers. ``clip`` bounds a rank's gradient, per tensor, at clip /
    sqrt(ranks) in norm. Costs two float32 per element. NaN and Inf are sent but not remembered.
    """

    momentum: float = option(0.9, ge=0, lt=1, doc="share of u that stays")
    clip: float = option(0.0, ge=0, doc="norm of a tensor's mean gradient; 0: no clipping")
    masking: bool = option(True, doc="forget the momentum of what was sent")

    def validate(self) -> None:
        """Refuse a second memory, and what has no payload to decode again."""
        if self.is_bound():
            self.refuse_second_memory()

    def traits(self) -> Traits:
        """Return the wrapped traits; a norm to clip at is that of the whole tensor."""
        inner = self.wrapped_compressor.traits()
        granularity = None if self.clip else inner.granularity
        return dataclasses.replace(
            inner, stateful=True, omega=None, delta=None, granularity=granularity
        )

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Advance, compress, and keep what was lost."""
        inner, xp = self.wrapped_compressor, ctx.xp
        if ctx.stage == 2:  # a sum of what ranks sent has had its momentum: only keep the loss
            return inner.compress_feedback(x, _state("v", x, ctx), 1.0, ctx)
        u, v = _state("u", x, ctx), _state("v", x, ctx)
        with np.errstate(invalid="ignore", over="ignore"):
            advanced = np.float32(self.momentum) * u + self._scale(x, ctx) * x
            target = v + advanced
        payload = inner.compress(target, ctx)
        keep_residual(inner, target, payload, v, ctx)
        sent = ctx.workspace.array("momentum", x.size)
        inner.decompress(payload, sent, ctx)
        kept = xp.where((sent != 0) & self._masks(), np.float32(0), advanced)
        xp.copyto(u, kept, where=xp.isfinite(advanced) & xp.isfinite(sent))
        return payload

    def encode_into(self, x: Array, payload: Payload, ctx: Context) -> None:
        """Do the same with the wrapped compressor's fused feedback."""
        if ctx.xp is not np:
            return super(Modifier, self).encode_into(x, payload, ctx)
        from ringlet.compressors.kernels import memory

        inner, masks = self.wrapped_compressor, self._masks()
        if ctx.stage == 2:
            return inner.feedback_into(x, _state("v", x, ctx), 1.0, payload, ctx)
        u, v = _state("u", x, ctx), _state("v", x, ctx)
        momentum, scale = np.float32(self.momentum), self._scale(x, ctx)
        advanced = ctx.workspace.array("momentum.advanced", x.size)

        def advance(start: int, stop: int) -> None:
            at = slice(start, stop)
            memory.advance(x[at], scale, momentum, u[at], advanced[at])

        run_ranges(x.size, 1, advance)
        inner.feedback_into(advanced, v, 1.0, payload, ctx)
        sent = ctx.workspace.array("momentum", x.size)
        inner.decompress(payload, sent, ctx)

        def settle(start: int, stop: int) -> None:
            at = slice(start, stop)
            memory.settle(advanced[at], sent[at], masks, u[at])

        run_ranges(x.size, 1, settle)
        return None

    def _masks(self) -> bool:
        # Payloads that add up hold every element: nothing is delayed that could be stale.
        return self.masking and self.wrapped_compressor.traits().combine != "sum"

    def _scale(self, x: Array, ctx: Context) -> Any:
        """Return what clipping multiplies the gradient by, as float32."""
        if not self.clip or x.size == 0:
            return np.float32(1)
        norm = energy(x, ctx) ** 0.5
        bound = self.clip / ctx.size**0.5
        # Not so where the norm is not finite: an overflow must not be scaled away.
        return np.float32(bound / norm) if bound < norm < np.inf else np.float32(1)


def _state(name: str, x: Array, ctx: Context) -> Array:
    """Return the remembered piece that ``x`` is, zeros at first."""
    if name not in ctx.state:
        ctx.state[name] = ctx.xp.zeros(max(ctx.numel, x.size), "float32")
    piece: Array = ctx.state[name][ctx.offset : ctx.offset + x.size]
    return piece
