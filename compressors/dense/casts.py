"""Casts to 16 bits: payloads that add up on the wire.

Micikevicius et al., "Mixed precision training", ICLR 2018.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ringlet.compressors.base.batched import Batched
from ringlet.compressors.base.bucketed import Bucketed, Kernel, widened
from ringlet.compressors.base.contract import Part, Payload, Traits, keeps
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.specs.registry import register

if TYPE_CHECKING:
    from ringlet.compressors.kernels.cpu.dense.casts import Casts
    from ringlet.compressors.kernels.cuda.common.bucketed import BucketedCodec

_AT_ONCE = 1024  # elements that a warp casts on a GPU


class Cast(Bucketed):
    """Base of the casts: one array of ``wire`` values, rounded to nearest, ties to even."""

    def wire(self) -> str:
        """Return the dtype that travels."""
        raise TypeError(f"{type(self).__name__} does not say which dtype travels")

    def kernels(self) -> Casts:
        """Return the CPU kernels."""
        from ringlet.compressors.kernels.cpu.dense import casts

        return casts.f16 if self.wire() == "float16" else casts.bf16

    def layout(self, n: int) -> tuple[Part, ...]:
        """n values of 16 bits."""
        return (Part("values", self.wire(), n),)

    @property
    def granule(self) -> int:
        """Every value is cast by itself."""
        return 1

    def strides(self) -> dict[str, int]:
        """A value."""
        return {"values": 1}

    def encoder(self, feedback: bool, ctx: Context) -> Kernel:
        """The kernel; bits of half precision are uint16."""
        kernels = self.kernels()

        def encode(x: Array, held: Array, decay: Any, key: Any, start: int, values: Array) -> None:
            bits = values.view(np.uint16)
            if feedback:
                kernels.encode_feedback(x, held, decay, bits)
            else:
                kernels.encode(x, bits)

        return encode

    def draws(self) -> bool:
        """Nothing is random."""
        return False

    def batched(self) -> Batched | None:
        """The kernels for many tensors a call."""
        own = keeps(self, Cast, "encoder", "decoder", "measure", "layout")
        if not (own and self.relies_on_kernels()):
            return None
        kernels = self.kernels()
        return self.looped(
            lambda fed: kernels.encode_feedback_placed if fed else kernels.encode_placed,
            kernels.decode_placed,
            tuple,
        )

    def cuda(self) -> BucketedCodec:
        """The kernels of one half precision."""
        from ringlet.compressors.kernels.cuda.common.bucketed import BucketedCodec

        return BucketedCodec(
            "dense/casts", 16, _AT_ONCE, (("HALF", int(self.wire() == "float16")),)
        )

    def decoder(self, add: bool, ctx: Context) -> Kernel:
        """The kernel."""
        kernel = self.kernels().accumulate if add else self.kernels().decode
        return lambda values, out: kernel(values.view(np.uint16), out)


@register("fp16")
class FP16(Cast):
    """Send IEEE half precision: 16 bits, range 6e-8 to 65504, relative error at most 2**-11.

    Overflow becomes Inf and stays visible. Averages divide before they cast, so that the sum of
    all ranks stays in range. So what is below 6e-8 times the number of ranks becomes 0, and
    gradients of about 1e-5 on 64 ranks lose a tenth: scale the loss, or take ``bf16``. Behind a
    sparsifier with feedback, too, ``bf16`` is safer: what once was held back above 65504 is sent as
    Inf in every step.
    """

    paper: ClassVar[str] = "Micikevicius, ICLR 2018"

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

    def decode_array(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Widen."""
        out[...] = payload["values"]


@register("bf16")
class BF16(Cast):
    """Send bfloat16: 16 bits with the range of float32, relative error at most 2**-8."""

    paper: ClassVar[str] = "Kalamkar, arXiv:1905.12322"

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

    def decode_array(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Widen: bfloat16 is the upper half of a float32."""
        out[...] = widened(payload["values"])
