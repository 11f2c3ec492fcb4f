"""Small floats with a power of two per block of 32: the MX formats.

OCP Microscaling Formats (MX) v1.0, 2023; Rouhani et al., "Microscaling data formats for deep
learning", arXiv:2310.10537.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ringlet.compressors.base.block_scaled import BlockScaled
from ringlet.compressors.base.bucketed import Kernel
from ringlet.compressors.base.contract import Payload, Traits
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.minifloats import E2M1, FORMATS, MiniFloat, decoded, encoded
from ringlet.compressors.core.options import option
from ringlet.compressors.core.packing import blanked, pack_bits, unpack_bits
from ringlet.compressors.core.rng import squares
from ringlet.compressors.specs.registry import register

if TYPE_CHECKING:
    from ringlet.compressors.kernels.cuda.common.bucketed import BucketedCodec

BLOCK = 32
_NAN = 255


class Microscaling(BlockScaled):
    """Base of the MX formats: codes of ``form()``, and an exponent byte (E8M0) per 32 elements.

    A block's scale is 2**(floor(log2(max|x|)) - emax), at least 2**-127, where 2**emax is the
    largest power of two among the elements; larger elements than the largest there is saturate. A
    block with a NaN or an Inf gets the scale NaN and decodes to NaN, so that overflow stays visible
    in all formats alike; codes that are NaN or Inf by themselves, which others may send, are
    decoded as such. ``stochastic`` rounds up or down at random, without bias but for what
    saturates and what is below 2**(mantissa - 24) of the smallest element.
    """

    stochastic: bool = option(False, doc="round at random, without bias up to saturation")

    def form(self) -> MiniFloat:
        """Return the format of the elements."""
        raise TypeError(f"{type(self).__name__} does not say which format its elements have")

    def traits(self) -> Traits:
        """Cut at blocks; contracts by what saturates, is rounded, or is below the smallest."""
        form = self.form()
        saturated = 1 - form.maximum / 2.0 ** (form.emax + 1)
        rounded = 2.0 ** -(form.mantissa + 1)
        # The others of a block may all lie half-way to the smallest element, the largest does not.
        smallest = 2.0 ** (form.lowest - 127 - form.mantissa)
        least = (BLOCK - 1) * (smallest / 2) ** 2 / 4.0**form.emax
        lost = max(saturated, rounded) ** 2 + least
        return Traits(fixed_size=True, granularity=BLOCK, delta=1 - lost)

    # -- array code: the kernels agree with it bit for bit ------------------------------------

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Scale each block by a power of two and round its values."""
        xp, n, form = ctx.xp, x.size, self.form()
        rows = xp.zeros((-(-n // BLOCK), BLOCK), "float32")
        rows.reshape(-1)[:n] = x
        top = (rows.view("uint32") & 0x7FFFFFFF).max(axis=1)
        finite = top < 0x7F800000
        byte = xp.maximum((top >> 23).astype("int32") - form.emax, 0)
        byte = xp.where(finite, byte, 127).astype("uint32")
        inverse = ((254 - byte) << 23).astype("uint32").view("float32")
        noise = squares(xp, ctx.key(), ctx.offset, rows.size) if self.stochastic else None
        with np.errstate(all="ignore"):
            scaled = (rows * inverse[:, None]).reshape(-1)
            codes = encoded(scaled, form, noise, xp)[:n]
        width = BLOCK * form.bits // 8
        return {
            "codes": blanked(xp, pack_bits(xp, codes, form.bits), finite, width),
            "scales": xp.where(finite, byte, _NAN).astype("uint8"),
        }

    def decode_array(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Decode each code and scale it."""
        xp, form = ctx.xp, self.form()
        byte = payload["scales"].astype("uint32")
        half = xp.where((byte == 0) | (byte == _NAN), 0x400000, 0)  # 2**-127 is subnormal
        scale = ((byte << 23) | half).astype("uint32").view("float32")
        codes = unpack_bits(xp, payload["codes"], form.bits, out.size)
        out[...] = decoded(codes, form, xp) * scale.repeat(BLOCK)[: out.size]

    # -- kernels ------------------------------------------------------------------------------

    @property
    def granule(self) -> int:
        """The elements that share an exponent."""
        return BLOCK

    @property
    def width(self) -> int:
        """The format's."""
        return self.form().bits

    def draws(self) -> bool:
        """Only to round at random."""
        return self.stochastic

    def encoding(self, feedback: bool) -> Kernel:
        """The kernel of the format and rounding."""
        from ringlet.compressors.kernels.cpu.quantizers.microscaling import encoder

        kernel: Kernel = encoder(self.form(), self.stochastic, feedback)
        return kernel

    def decoding(self, add: bool) -> Kernel:
        """The kernel of the format."""
        from ringlet.compressors.kernels.cpu.quantizers.microscaling import decoder

        kernel: Kernel = decoder(self.form(), add)
        return kernel

    def cuda(self) -> BucketedCodec:
        """The kernels of the format and rounding."""
        from ringlet.compressors.kernels.cuda.common.minifloats import codec

        return codec("quantizers/microscaling", self.form(), BLOCK, self.stochastic)


@register("mxfp8")
class MXFP8(Microscaling):
    """Send MXFP8: 8-bit floats (e4m3 or e5m2), and an exponent byte per 32 elements.

    As OCP MX v1.0 has it, the largest element of a block may saturate, by an eighth at most;
    ``fp8`` has the same codes with scales at which none does. Rounds to nearest even: the relative
    error is at most 2**-4 (e4m3) or 2**-3 (e5m2) above the smallest normal element, which is 2**-14
    or 2**-29 of the largest.
    """

    paper: ClassVar[str] = "Rouhani, arXiv:2310.10537"
    format: str = option("e4m3", choices=("e4m3", "e5m2"), doc="bits of exponent and mantissa")

    def form(self) -> MiniFloat:
        """E4M3 or E5M2."""
        return FORMATS[self.format]


@register("mxfp6")
class MXFP6(Microscaling):
    """Send MXFP6: 6-bit floats (e2m3 or e3m2), and an exponent byte per 32 elements (OCP MX v1.0).

    E2M3 suits blocks of like magnitudes; E3M2 keeps four octaves more of small values.
    """

    paper: ClassVar[str] = "Rouhani, arXiv:2310.10537"
    format: str = option("e2m3", choices=("e2m3", "e3m2"), doc="bits of exponent and mantissa")

    def form(self) -> MiniFloat:
        """E2M3 or E3M2."""
        return FORMATS[self.format]


@register("mxfp4")
class MXFP4(Microscaling):
    """Send MXFP4: 4-bit floats (e2m1), and an exponent byte per 32 elements (OCP MX v1.0).

    Elements are 0, 0.5, 1, 1.5, 2, 3, 4 and 6 times the scale; a quarter of the largest value of a
    block is the most that saturates.
    """

    paper: ClassVar[str] = "Rouhani, arXiv:2310.10537"

    def form(self) -> MiniFloat:
        """E2M1."""
        return E2M1
