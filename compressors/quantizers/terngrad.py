"""Ternary gradients.

Wen et al., "TernGrad: ternary gradients to reduce communication in distributed deep learning",
NeurIPS 2017.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ringlet.compressors.base.bucketed import NAN_BITS, Kernel, lane_sums, rounded_up, widened
from ringlet.compressors.base.contract import Payload, Traits, grows_rotated
from ringlet.compressors.base.packed_codec import PackedCodec
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.options import fixed, option
from ringlet.compressors.core.packing import blanked, pack_bits, unpack_bits
from ringlet.compressors.core.rng import squares
from ringlet.compressors.specs.registry import register

if TYPE_CHECKING:
    from ringlet.compressors.kernels.cuda.common.bucketed import BucketedCodec


@register("terngrad")
class TernGrad(PackedCodec):
    """Send -s, 0 or +s in 2 bits: sign(x) s with probability |x| / s. Unbiased for |x| <= s.

    Wen et al., NeurIPS 2017, with a scaler s per bucket instead of per tensor: the smaller of
    max|x| and ``clip`` times the root mean square of the bucket, as a bfloat16 rounded up. What
    exceeds s is clipped to it. A ``clip`` of at least sqrt(bucket) never clips. The variance is
    s ||x||_1 - ||x||^2, which for gradients means noise above the signal: meant for large batches
    or many ranks, or use it with error feedback and less noise: ``terngrad(clip=1.5) | ef``. With
    a clip of 2.5 and error feedback, results are several times as long as gradients. A bucket with
    a NaN or Inf decodes to NaN.
    """

    paper: ClassVar[str] = "Wen, NeurIPS 2017"
    bits: int = fixed(2)
    clip: float = option(2.5, ge=1, doc="clip at this many root mean squares")

    def traits(self) -> Traits:
        """Cut at buckets; unbiased where nothing is ever clipped."""
        # s ||x||_1 / ||x||^2 is largest when all but the largest entry are s / (1 + sqrt(d)).
        worst = (1 + self.bucket**0.5) / 2 * (1 + 2**-7) - 1
        clips = self.clip < self.bucket**0.5
        return Traits(
            fixed_size=True, granularity=self.bucket, omega=None if clips else worst + 2**-10
        )

    def divergence(self) -> str | None:
        """None: no error exceeds the scale, and the largest value has none."""
        return None

    def rotated_divergence(self) -> str | None:
        """None up to a clip of 2: of Gaussian values less is lost than there is."""
        if self.clip <= 2:
            return None
        return grows_rotated(self, "write 'terngrad(clip=1.5)'")

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Draw codes: 0, 1 and 2 for -s, 0 and s."""
        xp = ctx.xp
        rows, counts = self.rows(x, xp), self.counts(x.size, xp)
        with np.errstate(all="ignore"):
            largest = xp.abs(rows).max(axis=1)
            energy = lane_sums(xp.square(rows.astype("float64")), xp)
            limit = self.clip * xp.sqrt(energy / counts)
            top = xp.minimum(largest.astype("float64"), limit).astype("float32")
        finite = xp.isfinite(largest)
        scales = xp.where(finite, rounded_up(top, xp), 0).astype("uint16")
        scale = widened(scales)[:, None]
        drawn = squares(xp, ctx.key(), ctx.offset, rows.size).reshape(rows.shape) >> 8
        kept = drawn.astype("float32") * np.float32(2.0**-24) * scale < xp.abs(rows)
        codes = xp.where(kept, xp.where(rows < 0, 0, 2), 1).astype("uint8")
        packed = pack_bits(xp, codes.reshape(-1)[: x.size], 2)
        packed = blanked(xp, packed, finite, self.bucket // 4)
        return {"codes": packed, "scales": xp.where(finite, scales, NAN_BITS).astype("uint16")}

    def decode_array(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Decode: (code - 1) * s."""
        codes = unpack_bits(ctx.xp, payload["codes"], 2, out.size).astype("float32")
        out[...] = (codes - np.float32(1)) * self.spread(payload["scales"], out.size)

    @property
    def parameter(self) -> float:
        """How many root mean squares to clip at."""
        return self.clip

    def encoding(self, feedback: bool) -> Kernel:
        """The kernel."""
        from ringlet.compressors.kernels.cpu.quantizers.terngrad import encoder

        kernel: Kernel = encoder(feedback)
        return kernel

    def cuda(self) -> BucketedCodec:
        """The kernels."""
        return self.cuda_codec("quantizers/terngrad", random=True, PARAMETER=self.clip)

    def decoding(self) -> Kernel:
        """The kernel."""
        from ringlet.compressors.kernels.cpu.quantizers.terngrad import decoder

        kernel: Kernel = decoder()
        return kernel
