"""Error feedback: what compression dropped is added to the next gradient.

Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; Karimireddy et al., "Error
feedback fixes SignSGD", ICML 2019.
"""

from __future__ import annotations

import dataclasses

from ringlet.compressors.context import Array, Context
from ringlet.compressors.contract import Exchange, Payload, Traits, keep_residual
from ringlet.compressors.errors import CompressorError
from ringlet.compressors.modifier import Modifier
from ringlet.compressors.options import option
from ringlet.compressors.registry import register


@register("ef")
class ErrorFeedback(Modifier):
    """Keep a residual e per tensor: send C(x + decay * e), keep what that lost.

    With decay 1, over any number of steps the sum of what was sent plus the last residual equals
    the sum of the gradients. Costs one float32 per element of memory on every rank. Elements whose
    new residual would not be finite keep the old one, so that one overflow cannot poison a run.
    """

    decay: float = option(1.0, gt=0, le=1, doc="how much of the residual is carried over")

    def validate(self) -> None:
        """Refuse what keeps its own memory of what was not sent."""
        if self.inner is not None and self.inner.is_bound():
            inner = self.inner.traits()
            if inner.stateful and inner.combine != "rounds":
                raise CompressorError(
                    f"{self.inner} remembers what it did not send by itself; leave '| ef' away"
                )

    def traits(self) -> Traits:
        """Return the wrapped traits; feedback makes them stateful and breaks unbiasedness."""
        inner = self.wrapped_compressor.traits()
        return dataclasses.replace(inner, stateful=True, omega=None, delta=None)

    def residual(self, x: Array, ctx: Context) -> Array:
        """Return the residual of the piece that ``x`` is, creating zeros at the first step."""
        whole = ctx.state.get("residual")
        if whole is None:
            whole = ctx.state["residual"] = ctx.xp.zeros(max(ctx.numel, x.size), "float32")
        if whole.size != max(ctx.numel, x.size):  # kernels would write beyond its end
            raise CompressorError(
                f"the residual of {ctx.name!r} is of {whole.size} elements, the tensor of "
                f"{ctx.numel}; a tensor of another size needs another name"
            )
        piece: Array = whole[ctx.offset : ctx.offset + x.size]
        return piece

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Compress x plus the residual; keep what was lost."""
        inner, residual = self.wrapped_compressor, self.residual(x, ctx)
        target = x + ctx.xp.float32(self.decay) * residual
        payload = inner.compress(target, ctx)
        keep_residual(inner, target, payload, residual, ctx)
        return payload

    def encode_into(self, x: Array, payload: Payload, ctx: Context) -> None:
        """Do the same in the wrapped compressor's fused kernel, if it has one."""
        self.wrapped_compressor.feedback_into(x, self.residual(x, ctx), self.decay, payload, ctx)

    def exchange(self, x: Array, out: Array, ctx: Context, local: Array | None = None) -> Exchange:
        """Exchange x plus the residual; keep what this rank's share of the result lacks of it."""
        residual = self.residual(x, ctx)
        target = x + ctx.xp.float32(self.decay) * residual
        # Less the mean, residuals would take up how ranks differ, in every step anew.
        sent = ctx.xp.empty_like(x) if local is None else local
        yield from self.wrapped_compressor.exchange(target, out, ctx, sent)
        target -= sent
        finite = ctx.xp.isfinite(target) & ctx.xp.isfinite(out)
        ctx.xp.copyto(residual, target, where=finite)
