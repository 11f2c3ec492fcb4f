"""8-bit floats with a power-of-two scale per block.

OCP Microscaling Formats (MX) v1.0, 2023; Rouhani et al., "Microscaling data formats for deep
learning", arXiv:2310.10537; scales rounded up as in Mishra et al., "Recipes for pre-training LLMs
with MXFP8", arXiv:2506.08027.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ringlet.compressors.base.block_scaled import BlockScaled
from ringlet.compressors.base.bucketed import Kernel
from ringlet.compressors.base.contract import Payload, Traits
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.errors import OptionError
from ringlet.compressors.core.options import option
from ringlet.compressors.specs.registry import register

if TYPE_CHECKING:
    from ringlet.compressors.kernels.cuda.common.bucketed import BucketedCodec

_OVERFLOW = 0x7F700000


@register("fp8")
class FP8(BlockScaled):
    """Send 8-bit floats (e4m3 or e5m2) and an exponent byte (e8m0) per block, as in OCP MX.

    The exponent is the smallest with which no value of the block saturates. Rounds to nearest
    even: a value's relative error is at most 2**-4 (e4m3) or 2**-3 (e5m2) down to 2**-14 or 2**-29
    of the block's largest, absolute below. Keeps small values better than ``int8`` does, large ones
    worse. A block with a NaN, an Inf or a magnitude from 3.19e38 decodes to NaN; one below 2**-118
    loses precision.
    """

    paper: ClassVar[str] = "Rouhani, arXiv:2310.10537"
    format: str = option("e4m3", choices=("e4m3", "e5m2"), doc="bits of exponent and mantissa")
    block: int = option(32, ge=8, le=1024, doc="elements that share an exponent, a multiple of 8")

    def validate(self) -> None:
        """Blocks suit vectors."""
        if self.block % 8:
            raise OptionError(f"fp8: block must be a multiple of 8, got {self.block}")

    @property
    def mantissa(self) -> int:
        """How many bits of mantissa a code has."""
        return 3 if self.format == "e4m3" else 2

    def traits(self) -> Traits:
        """Cut at blocks; contracts by the square of the relative error."""
        # One part in a hundred is more than what values in a block's subnormal range can add.
        contraction = 1 - 1.01 * 4.0 ** -(self.mantissa + 1)
        return Traits(fixed_size=True, granularity=self.block, delta=contraction)

    # -- array code: the kernels agree with it bit for bit ------------------------------------

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Scale each block by a power of two and round its values to 8 bits."""
        xp, m, n = ctx.xp, self.mantissa, x.size
        emax, lowest = (8, 121) if m == 3 else (15, 113)
        rows = xp.zeros((-(-n // self.block), self.block), "float32")
        rows.reshape(-1)[:n] = x
        top = (rows.view("uint32") & 0x7FFFFFFF).max(axis=1)
        bad = top >= _OVERFLOW
        byte = (top >> 23).astype("int32") - emax + ((top & 0x7FFFFF) > 0x600000)
        byte = xp.where(bad, 1, xp.maximum(byte, 1)).astype("uint32")
        inverse = ((254 - byte) << 23).astype("uint32").view("float32")
        with np.errstate(all="ignore"):
            bits = (rows * inverse[:, None]).view("uint32")
            sign, bits = (bits >> 24) & 0x80, bits & 0x7FFFFFFF
            exponent = xp.maximum(bits >> 23, lowest)
            # In the sum with 2**(e + 23 - m), the lowest bits are the rounded mantissa.
            anchor = ((exponent + (23 - m)) << 23).astype("uint32").view("float32")
            rounded = (bits.view("float32") + anchor).view("uint32") & ((4 << m) - 1)
        codes = ((exponent - (lowest - 1)) << m) + rounded - (1 << m) | sign
        codes = xp.where(bad[:, None], 0, codes).astype("uint8").reshape(-1)[:n]
        return {"codes": codes, "scales": xp.where(bad, 255, byte).astype("uint8")}

    def decode_array(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Decode each code and scale it."""
        xp, m = ctx.xp, self.mantissa
        codes, scales = payload["codes"].astype("uint32"), payload["scales"].astype("uint32")
        rest = (codes & 0x7F).astype("int32")
        normal = xp.maximum(rest >> m, 1)  # the exponent; a subnormal's is that of the smallest
        fraction = xp.where(rest >> m, (rest & ((1 << m) - 1)) | (1 << m), rest).astype("float32")
        value = xp.ldexp(fraction, normal - (10 if m == 3 else 17))
        value = (value.view("uint32") | ((codes & 0x80) << 24)).view("float32")
        scale = (scales << 23) | xp.where(scales == 255, 0x400000, 0).astype("uint32")
        out[...] = value * scale.view("float32").repeat(self.block)[: out.size]

    # -- kernels ------------------------------------------------------------------------------

    @property
    def granule(self) -> int:
        """The elements that share an exponent."""
        return self.block

    @property
    def width(self) -> int:
        """A byte."""
        return 8

    def draws(self) -> bool:
        """Nothing is random."""
        return False

    def encoding(self, feedback: bool) -> Kernel:
        """The kernel of the format and block."""
        from ringlet.compressors.kernels.cpu.quantizers.fp8 import encoder

        kernel: Kernel = encoder(self.mantissa, self.block, feedback)
        return kernel

    def decoding(self, add: bool) -> Kernel:
        """The kernel of the format and block."""
        from ringlet.compressors.kernels.cpu.quantizers.fp8 import decoder

        kernel: Kernel = decoder(self.mantissa, self.block, add)
        return kernel

    def cuda(self) -> BucketedCodec:
        """The kernels of the format and block."""
        from ringlet.compressors.kernels.cuda.common.bucketed import BucketedCodec

        return BucketedCodec("quantizers/fp8", 8, self.block, (("MANTISSA", self.mantissa),))
