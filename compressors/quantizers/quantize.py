"""Bucketed quantisation to 1..8 bits, nearest or stochastic.

Alistarh et al., "QSGD: communication-efficient SGD via gradient quantization and encoding",
NeurIPS 2017; min-max buckets as in Markov et al., "CGX", Middleware 2022.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ringlet.compressors.base.batched import Batched
from ringlet.compressors.base.bucketed import (
    NAN_BITS,
    Kernel,
    Packed,
    rounded_up,
    widened,
)
from ringlet.compressors.base.contract import Part, Payload, Traits, grows_rotated, keeps
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.options import fixed, option
from ringlet.compressors.core.packing import blanked, pack_bits, unpack_bits
from ringlet.compressors.core.rng import squares
from ringlet.compressors.specs.registry import register

if TYPE_CHECKING:
    from ringlet.compressors.kernels.cuda.common.bucketed import BucketedCodec

_TINY = np.float32(1.5e-36)
_NO_LOWS: Array = np.empty(0, np.float32)


class BucketQuantizer(Packed):
    """Base of the bucketed quantisers: codes of ``bits`` bits, a bfloat16 scale per bucket.

    Scales are rounded up, so that no value falls outside the levels. A bucket with a NaN or Inf
    decodes to NaN, so that overflow stays visible. A bucket that is tinier than 1.5e-36 is sent
    as zeros; error feedback keeps what it held. Random rounding draws 16 bits, as many as float32
    adds to a code without rounding: what lies less than 2**-16 of a level above one (with 4 bits
    2e-6 of the largest value) is always rounded down, and error feedback alone sends it.
    """

    bits: int = option(4, ge=2, le=8, doc="bits of a code")
    bucket: int = option(512, ge=32, le=65536, doc="elements that share a scale, a multiple of 8")
    stochastic: bool = option(False, doc="round at random, without bias above 2**-16 of a level")

    @property
    def levels(self) -> int:
        """How many levels lie between zero and the scale."""
        return (1 << (self.bits - 1)) - 1

    def scheme(self) -> Any:
        """Return what the kernels' scales are made of."""
        from ringlet.compressors.kernels.cpu.quantizers.quantize import Scheme

        return Scheme.MAX

    # -- array code: the kernels agree with it bit for bit ------------------------------------

    def extents(self, rows: Array, xp: Any) -> tuple[Array, Array]:
        """Return (extent, smallest value) of each row of ``rows``; NaN or Inf where it has one."""
        return xp.abs(rows).max(axis=1), xp.zeros(len(rows), "float32")

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Quantise: code = zero + round((x - low) / scale)."""
        xp, n = ctx.xp, x.size
        rows, zero, highest = self._rows(x, xp), self._zero(), np.float32(self._highest())
        with np.errstate(all="ignore"):
            extent, low = self.extents(rows, xp)
            finite = xp.isfinite(extent)
            usable = finite & (extent >= _TINY)
            scales = xp.where(usable, rounded_up(extent / np.float32(self.levels), xp), 0)
            low = xp.where(finite, low, np.float32(0))
            scale = widened(xp.where(usable, scales, 0x3F80))[:, None]
            place = (rows - low[:, None]) * (np.float32(1) / scale)
            if self.stochastic:
                drawn = squares(xp, ctx.key(), ctx.offset, rows.size).reshape(rows.shape) >> 16
                steps = drawn.astype("float32") * np.float32(2.0**-16)
                codes = xp.trunc(xp.minimum((place + zero) + steps, highest))
            else:
                codes = xp.rint(place) + zero
        codes = xp.where(usable[:, None], codes, xp.where(finite, zero, np.float32(0))[:, None])
        payload = {
            "codes": pack_bits(xp, codes.astype("uint8").reshape(-1)[:n], self.bits),
            "scales": xp.where(finite, scales, NAN_BITS).astype("uint16"),
        }
        payload["codes"] = blanked(xp, payload["codes"], finite, self.bucket * self.bits // 8)
        return self._with_lows(payload, low.astype("float32"))

    def decode_array(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Decode: (code - zero) * scale + low."""
        n = out.size
        codes = unpack_bits(ctx.xp, payload["codes"], self.bits, n).astype("float32")
        out[...] = (codes - self._zero()) * self.spread(payload["scales"], n)
        if "lows" in payload:
            out += payload["lows"].repeat(self.bucket)[:n]

    def encoder(self, feedback: bool, ctx: Context) -> Kernel:
        """The kernel of the scheme and rounding."""
        from ringlet.compressors.kernels.cpu.quantizers.quantize import encoder

        kernel, bits, bucket = (
            encoder(self.scheme(), self.stochastic, feedback),
            self.bits,
            self.bucket,
        )

        def encode(
            x: Array, held: Array, decay: Any, key: Any, start: int, codes: Array, scales: Array,
            lows: Array = _NO_LOWS,
        ) -> None:  # fmt: skip
            scratch = np.empty(bucket, np.uint8)
            kernel(x, held, decay, bits, bucket, key, start, codes, scales, lows, scratch)

        return encode

    def draws(self) -> bool:
        """Whether codes are rounded at random."""
        return self.stochastic

    def decoder(self, add: bool, ctx: Context) -> Kernel:
        """The kernel of the scheme."""
        from ringlet.compressors.kernels.cpu.quantizers.quantize import decoder

        kernel, bits, bucket = decoder(self.scheme()), self.bits, self.bucket

        def decode(codes: Array, scales: Array, *rest: Array) -> None:
            lows, out = rest if len(rest) == 2 else (_NO_LOWS, *rest)
            kernel(codes, scales, lows, bits, bucket, add, np.empty(bucket, np.uint8), out)

        return decode

    def batched(self) -> Batched | None:
        """The kernels of the scheme and rounding, for many tensors a call."""
        own = keeps(self, BucketQuantizer, "encoder", "decoder", "measure", "draws")
        if not (own and self.relies_on_kernels()):
            return None
        from ringlet.compressors.kernels.cpu.quantizers import quantize as kernels

        scheme, bits, bucket = self.scheme(), self.bits, self.bucket
        return self.looped(
            lambda fed: kernels.placed_encoder(scheme, self.stochastic, fed),
            kernels.placed_decoder(scheme),
            lambda: (bits, bucket, np.empty(bucket, np.uint8)),
        )

    def cuda(self) -> BucketedCodec:
        """The kernels of the scheme and rounding."""
        drawing = self.stochastic
        return self.cuda_codec(
            "quantizers/quantize",
            random=drawing,
            SCHEME=int(self.scheme()),
            STOCHASTIC=int(drawing),
        )

    def _rows(self, x: Array, xp: Any) -> Array:
        """Return the buckets as rows, the last one filled up with its own last value."""
        count = -(-x.size // self.bucket)
        rows: Array = xp.zeros((count, self.bucket), "float32")
        flat = rows.reshape(-1)
        flat[: x.size] = x
        if x.size:
            flat[x.size :] = self._filler(x)
        return rows

    def _filler(self, x: Array) -> Any:
        return np.float32(0)

    def _zero(self) -> np.float32:
        return np.float32(self.levels)

    def _highest(self) -> int:
        return 2 * self.levels

    def _with_lows(self, payload: Payload, low: Array) -> Payload:
        return payload


@register("maxnorm")
class MaxNorm(BucketQuantizer):
    """Send round(x / scale) per bucket, scale = max|x| / (2**(bits-1) - 1). Zero stays zero.

    Best of the quantisers for gradients with outliers. To nearest, an element's error is at most
    half a level; stochastic, it is below a level and zero in expectation.
    """

    paper: ClassVar[str] = "Alistarh, NeurIPS 2017"

    def traits(self) -> Traits:
        """Cut at buckets; unbiased when stochastic."""
        # An element's variance is at most scale**2 / 4, and ||x||^2 is at least max|x|^2.
        spread = self.bucket / (4 * self.levels**2) * (1 + 2**-7) ** 2
        contraction = 1 - spread if spread < 1 else None
        return Traits(
            fixed_size=True,
            granularity=self.bucket,
            omega=spread if self.stochastic else None,
            delta=None if self.stochastic else contraction,
        )

    def divergence(self) -> str | None:
        """None: no error exceeds a level, so that residuals are bounded as the largest value is."""
        return None

    def rotated_divergence(self) -> str | None:
        """None but where one level is rounded to at random."""
        if not self.stochastic or self.levels > 1:
            return None
        return grows_rotated(self, "write bits=3")


@register("int8")
class Int8(MaxNorm):
    """``maxnorm(bits=8)``: 8 bits and a scale per bucket."""

    paper: ClassVar[str] = "Alistarh, NeurIPS 2017"
    bits: int = fixed(8)


@register("int4")
class Int4(MaxNorm):
    """``maxnorm(bits=4)``: 4 bits and a scale per bucket."""

    paper: ClassVar[str] = "Alistarh, NeurIPS 2017"
    bits: int = fixed(4)


@register("qsgd")
class QSGD(BucketQuantizer):
    """Quantise to multiples of ||x||_2 / (2**(bits-1) - 1) per bucket, stochastically.

    Alistarh et al., NeurIPS 2017. Unbiased. Below 8 bits ``maxnorm`` has a far smaller error. A
    bucket whose norm exceeds float32's range decodes to NaN.
    """

    paper: ClassVar[str] = "Alistarh, NeurIPS 2017"
    bits: int = option(8, ge=2, le=8, doc="bits of a code, sign included")
    stochastic: bool = fixed(True)

    def scheme(self) -> Any:
        """The Euclidean norm."""
        from ringlet.compressors.kernels.cpu.quantizers.quantize import Scheme

        return Scheme.L2

    def traits(self) -> Traits:
        """Cut at buckets; unbiased."""
        d, s = self.bucket, self.levels
        slack = (1 + 2**-7) ** 2  # of the scale's rounding
        return Traits(fixed_size=True, granularity=d, omega=min(d / s**2, d**0.5 / s) * slack)

    def extents(self, rows: Array, xp: Any) -> tuple[Array, Array]:
        """Return each row's Euclidean norm, summed in eight lanes of float64 as the kernels do."""
        squared = xp.square(rows.astype("float64"))  # a power need not be exact on a GPU
        lanes = squared.reshape(len(rows), self.bucket // 8, 8)
        sums = xp.zeros((len(rows), 8), "float64")
        for i in range(lanes.shape[1]):
            sums += lanes[:, i]
        total = xp.zeros(len(rows), "float64")
        for j in range(8):
            total = total + sums[:, j]
        return xp.sqrt(total).astype("float32"), xp.zeros(len(rows), "float32")


@register("minmax")
class MinMax(BucketQuantizer):
    """Send round((x - min) / scale) per bucket, scale = (max - min) / (2**bits - 1).

    Uses every level, which is best for values without outliers; the smallest value is exact, and
    a constant bucket decodes to its constant. Sends the minimum as float32. A bucket whose range
    exceeds float32 decodes to NaN. Zero is no level where a bucket has both signs: without error
    feedback what is 0 moves by up to half a level in each step, which ``int4`` does not.
    """

    paper: ClassVar[str] = "Markov, Middleware 2022"
    bits: int = option(4, ge=1, le=8, doc="bits of a code")
    bucket: int = option(1024, ge=32, le=65536, doc="elements that share a scale, a multiple of 8")

    @property
    def levels(self) -> int:
        """How many levels lie above the minimum."""
        return (1 << self.bits) - 1

    def scheme(self) -> Any:
        """The range."""
        from ringlet.compressors.kernels.cpu.quantizers.quantize import Scheme

        return Scheme.RANGE

    def traits(self) -> Traits:
        """Cut at buckets; unbiased when stochastic."""
        # The range is at most 2 max|x|, so an element's variance at most (max|x| / levels)^2.
        spread = self.bucket / self.levels**2 * (1 + 2**-7) ** 2
        return Traits(
            fixed_size=True,
            granularity=self.bucket,
            omega=spread if self.stochastic else None,
            delta=None if self.stochastic or spread >= 1 else 1 - spread,
        )

    def layout(self, n: int) -> tuple[Part, ...]:
        """Packed codes, a scale and a minimum per bucket begun."""
        return (*super().layout(n), Part("lows", "float32", -(-n // self.bucket)))

    def strides(self) -> dict[str, int]:
        """Bytes of codes, a scale, a minimum."""
        return super().strides() | {"lows": 1}

    def extents(self, rows: Array, xp: Any) -> tuple[Array, Array]:
        """Return each row's range and minimum."""
        low, high = rows.min(axis=1), rows.max(axis=1)
        top = xp.abs(rows).max(axis=1)
        return xp.where(xp.isfinite(top), high - low, top), low

    def _filler(self, x: Array) -> Any:
        return x[-1]

    def _zero(self) -> np.float32:
        return np.float32(0)

    def _highest(self) -> int:
        return self.levels

    def _with_lows(self, payload: Payload, low: Array) -> Payload:
        return payload | {"lows": low}

    def divergence(self) -> str | None:
        """One bit loses half the range, which then grows."""
        if self.bits > 1:
            return None
        return "one bit loses half a bucket's range, in every step anew; write 'onebit'"
