"""Natural compression: every value becomes a power of two.

Horvath et al., "Natural compression for distributed deep learning", MSML 2022.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ringlet.compressors.base.bucketed import NAN_BITS, Kernel
from ringlet.compressors.base.contract import Payload, Traits
from ringlet.compressors.base.packed_codec import PackedCodec
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.options import fixed
from ringlet.compressors.core.rng import squares
from ringlet.compressors.specs.registry import register

if TYPE_CHECKING:
    from ringlet.compressors.kernels.cuda.common.bucketed import BucketedCodec


TINY = 64  # exponents below this are of buckets that have the lowest powers
RAISED = 104  # the exponent of their scale: 2**-23 times the smallest normal number is 2**-149


@register("natural")
class Natural(PackedCodec):
    """Send each value as one of its two neighbouring powers of two, at random, without bias.

    Horvath et al., MSML 2022. The variance is at most an eighth of the signal, whatever the
    distribution. 8 bits: a sign and 127 powers, of which the highest suits the largest value of
    the bucket (a power of two per bucket says which). Smaller than the lowest, 2**-126 of the
    largest or of one, is rounded to it or to zero, still without bias; a bucket whose largest is
    below 2**-64 has the powers down to 2**-149, the smallest float32. Only what exceeds 2**127 is
    rounded down for certain. A bucket with a NaN or Inf decodes to NaN.
    """

    paper: ClassVar[str] = "Horvath, MSML 2022"
    bits: int = fixed(8)

    def traits(self) -> Traits:
        """Cut at buckets; unbiased."""
        return Traits(fixed_size=True, granularity=self.bucket, omega=0.125 + 2.0**-16)

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Round the mantissa away."""
        xp = ctx.xp
        rows = self.rows(x, xp)
        top = (rows.view("uint32") & 0x7FFFFFFF).max(axis=1)
        finite = top < 0x7F800000
        highest = ((top + 0x7FFFFF) >> 23).astype("int32")
        # The smallest of a tiny bucket would be no numbers of full precision: they are raised.
        shift = xp.where((highest > 0) & (highest < TINY), RAISED, xp.clip(highest, 127, 254))
        scale = (xp.where(finite, shift, 127).astype("uint32") << 23).view("float32")
        with np.errstate(all="ignore"):
            bits = (rows * (np.float32(1) / scale)[:, None]).view("uint32")
        noise = squares(xp, ctx.key(), ctx.offset, rows.size).reshape(rows.shape) >> 9
        rank = xp.minimum(((bits & 0x7FFFFFFF) + noise) >> 23, 127)
        codes = xp.where(finite[:, None], rank | ((bits >> 24) & 0x80), 0)
        return {
            "codes": codes.astype("uint8").reshape(-1)[: x.size],
            "scales": xp.where(finite, scale.view("uint32") >> 16, NAN_BITS).astype("uint16"),
        }

    def decode_array(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Decode: the power's exponent is what follows the sign bit."""
        codes = payload["codes"].astype("uint32")
        power = (((codes & 0x7F) << 23) | ((codes & 0x80) << 24)).view("float32")
        out[...] = power * self.spread(payload["scales"], out.size)

    def encoding(self, feedback: bool) -> Kernel:
        """The kernel."""
        from ringlet.compressors.kernels.cpu.quantizers.natural import encoder

        kernel: Kernel = encoder(feedback)
        return kernel

    def cuda(self) -> BucketedCodec:
        """The kernels."""
        return self.cuda_codec("quantizers/natural", random=True)

    def decoding(self) -> Kernel:
        """The kernel."""
        from ringlet.compressors.kernels.cpu.quantizers.natural import decode

        kernel: Kernel = decode
        return kernel
