"""Casts to 16 bits: payloads that add up on the wire.

Micikevicius et al., "Mixed precision training", ICLR 2018.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringlet.compressors.context import Array, Context
from ringlet.compressors.contract import Compressor, Part, Payload, Traits, exercise
from ringlet.compressors.registry import register


class Cast(Compressor):
    """Base of the casts: one array of ``wire`` values, rounded to nearest, ties to even."""

    def wire(self) -> str:
        """Return the dtype that travels."""
        raise TypeError(f"{type(self).__name__} does not say which dtype travels")

    def kernels(self) -> Any:
        """Return the CPU kernels (encode, encode with feedback, decode, accumulate)."""
        from ringlet.compressors.kernels import casts

        return casts.f16 if self.wire() == "float16" else casts.bf16

    def layout(self, n: int) -> tuple[Part, ...]:
        """n values of 16 bits."""
        return (Part("values", self.wire(), n),)

    def encode_into(self, x: Array, payload: Payload, ctx: Context) -> None:
        """Cast in one pass."""
        if ctx.xp is not np:
            return super().encode_into(x, payload, ctx)
        self.kernels()[0](x, payload["values"].view(np.uint16))
        return None

    def feedback_into(
        self, x: Array, residual: Array, decay: float, payload: Payload, ctx: Context
    ) -> None:
        """Cast x + decay * residual and keep the rounding error, in one pass."""
        if ctx.xp is not np:
            return super().feedback_into(x, residual, decay, payload, ctx)
        self.kernels()[1](x, residual, np.float32(decay), payload["values"].view(np.uint16))
        return None

    def accumulate(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Widen and add in one pass."""
        if ctx.xp is not np:
            return super().accumulate(payload, out, ctx)
        self.kernels()[3](payload["values"].view(np.uint16), out)
        return None

    def warm_up(self, ctx: Context) -> None:
        """Compile the kernels."""
        exercise(self, ctx)


@register("fp16")
class FP16(Cast):
    """Send IEEE half precision: 16 bits, range 6e-8 to 65504, relative error at most 2**-11.

    Overflow becomes Inf and stays visible. Averages divide before they cast, so that the sum of
    all ranks stays in range.
    """

    def wire(self) -> str:
        """float16."""
        return "float16"

    def traits(self) -> Traits:
        """Sums on the wire; cut anywhere."""
        return Traits("sum", fixed_size=True, granularity=1, predivide=True, min_size=0)

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Round to float16."""
        with np.errstate(over="ignore"):
            return {"values": x.astype("float16")}

    def decompress(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Widen."""
        if ctx.xp is np and out.dtype == np.float32:
            self.kernels()[2](payload["values"].view(np.uint16), out)
        else:
            out[...] = payload["values"]


@register("bf16")
class BF16(Cast):
    """Send bfloat16: 16 bits with the range of float32, relative error at most 2**-8."""

    def wire(self) -> str:
        """bfloat16 (uint16 arrays in NumPy)."""
        return "bfloat16"

    def traits(self) -> Traits:
        """Sums on the wire; cut anywhere; contracts, for it neither over- nor underflows."""
        return Traits("sum", fixed_size=True, granularity=1, min_size=0)

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Round to bfloat16 by integer arithmetic; NaN stays NaN."""
        bits = x.view("uint32")
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype("uint32")) >> 16
        quiet = (bits >> 16) | 0x40
        return {"values": ctx.xp.where(ctx.xp.isnan(x), quiet, rounded).astype("uint16")}

    def decompress(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Widen: bfloat16 is the upper half of a float32."""
        if ctx.xp is np:
            self.kernels()[2](payload["values"], out)
        else:
            out[...] = (payload["values"].astype("uint32") << 16).view("float32")
