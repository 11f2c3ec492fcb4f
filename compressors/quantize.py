"""Bucketed quantisation to 1..8 bits, nearest or stochastic.

Alistarh et al., "QSGD: communication-efficient SGD via gradient quantization and encoding",
NeurIPS 2017; min-max buckets as in Markov et al., "CGX", Middleware 2022.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringlet.compressors.context import Array, Context
from ringlet.compressors.contract import Compressor, Part, Payload, Traits, exercise
from ringlet.compressors.errors import OptionError
from ringlet.compressors.options import fixed, option
from ringlet.compressors.packing import pack_bits, packed_size, unpack_bits
from ringlet.compressors.pool import run_ranges
from ringlet.compressors.random import squares
from ringlet.compressors.registry import register

_TINY = np.float32(1.5e-36)
_CACHED = 1 << 16  # elements whose float32 sum stays in a core's cache
_NAN = 0x7FC0


class BucketQuantizer(Compressor):
    """Base of the bucketed quantisers: codes of ``bits`` bits, a bfloat16 scale per bucket.

    Scales are rounded up, so that no value falls outside the levels. A bucket with a NaN or Inf
    decodes to NaN, so that overflow stays visible. A bucket that is tinier than 1.5e-36 is sent
    as zeros; error feedback keeps what it held.
    """

    bits: int = option(4, ge=2, le=8, doc="bits of a code")
    bucket: int = option(512, ge=32, le=65536, doc="elements that share a scale, a multiple of 8")
    stochastic: bool = option(False, doc="round up or down at random, without bias")

    def validate(self) -> None:
        """Buckets begin at whole bytes."""
        if self.bucket % 8:
            raise OptionError(f"{self.label()}: bucket must be a multiple of 8, got {self.bucket}")

    @property
    def levels(self) -> int:
        """How many levels lie between zero and the scale."""
        return (1 << (self.bits - 1)) - 1

    def scheme(self) -> Any:
        """Return what the kernels' scales are made of."""
        from ringlet.compressors.kernels.quantize import Scheme

        return Scheme.MAX

    def layout(self, n: int) -> tuple[Part, ...]:
        """Packed codes and a scale per bucket begun."""
        buckets = -(-n // self.bucket)
        codes = Part("codes", "uint8", packed_size(n, self.bits))
        return (codes, Part("scales", "bfloat16", buckets))

    # -- array code: the kernels agree with it bit for bit ------------------------------------

    def extents(self, rows: Array, xp: Any) -> tuple[Array, Array]:
        """Return (extent, smallest value) of each row of ``rows``; NaN or Inf where it has one."""
        return xp.abs(rows).max(axis=1, initial=np.float32(0)), xp.zeros(len(rows), "float32")

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Quantise: code = zero + round((x - low) / scale)."""
        xp, n = ctx.xp, x.size
        rows, zero, highest = self._rows(x, xp), self._zero(), np.float32(self._highest())
        with np.errstate(all="ignore"):
            extent, low = self.extents(rows, xp)
            finite = xp.isfinite(extent)
            usable = finite & (extent >= _TINY)
            scales = xp.where(usable, _round_up(xp, extent / np.float32(self.levels)), 0)
            low = xp.where(finite, low, np.float32(0))
            scale = _widen(xp, xp.where(usable, scales, 0x3F80))[:, None]
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
            "scales": xp.where(finite, scales, _NAN).astype("uint16"),
        }
        if not finite.all():
            self._blank(payload, xp.flatnonzero(~finite), n)
        return self._with_lows(payload, low.astype("float32"))

    def decompress(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Decode: (code - zero) * scale + low."""
        if ctx.xp is np:
            self._decode(payload, out, add=False)
            return
        xp, n = ctx.xp, out.size
        codes = unpack_bits(xp, payload["codes"], self.bits, n).astype("float32")
        scale = _widen(xp, payload["scales"]).repeat(self.bucket)[:n]
        out[...] = (codes - self._zero()) * scale
        if "lows" in payload:
            out += payload["lows"].repeat(self.bucket)[:n]

    # -- kernels ------------------------------------------------------------------------------

    def encode_into(self, x: Array, payload: Payload, ctx: Context) -> None:
        """Quantise and pack in one pass."""
        if ctx.xp is not np:
            return super().encode_into(x, payload, ctx)
        self._encode(x, x, 1.0, payload, ctx, feedback=False)
        return None

    def feedback_into(
        self, x: Array, residual: Array, decay: float, payload: Payload, ctx: Context
    ) -> None:
        """Add the residual, quantise, pack and keep the error in one pass."""
        if ctx.xp is not np:
            return super().feedback_into(x, residual, decay, payload, ctx)
        self._encode(x, residual, decay, payload, ctx, feedback=True)
        return None

    def accumulate(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Decode and add in one pass."""
        if ctx.xp is not np:
            return super().accumulate(payload, out, ctx)
        self._decode(payload, out, add=True)
        return None

    def sum_into(self, payloads: Sequence[Payload], out: Array, ctx: Context) -> None:
        """Decode and add all payloads piece by piece, each piece while it is in the cache."""
        if ctx.xp is not np:
            return super().sum_into(payloads, out, ctx)
        from ringlet.compressors.kernels.quantize import decoder

        write, add = (decoder(self.scheme(), adds) for adds in (False, True))
        arrays = [self._arrays(payload) for payload in payloads]
        bits, bucket = self.bits, self.bucket
        piece = max(1, _CACHED // bucket) * bucket

        def total(start: int, stop: int) -> None:
            for a in range(start, stop, piece):
                b = min(a + piece, stop)
                first, last, target = a // bucket, -(-b // bucket), out[a:b]
                kernel = write
                for codes, scales, lows in arrays:
                    part = codes[a * bits // 8 :]
                    kernel(part, scales[first:last], lows[first:last], bits, bucket, target)
                    kernel = add

        run_ranges(out.size, bucket, total)
        return None

    def warm_up(self, ctx: Context) -> None:
        """Compile the kernels."""
        exercise(self, ctx)

    def _encode(
        self, x: Array, residual: Array, decay: float, payload: Payload, ctx: Context,
        feedback: bool,
    ) -> None:  # fmt: skip
        from ringlet.compressors.kernels.quantize import encoder

        kernel = encoder(self.scheme(), self.stochastic, feedback)
        codes, scales, lows = self._arrays(payload)
        key, weight, bits, bucket = np.uint64(ctx.key()), np.float32(decay), self.bits, self.bucket

        def encode(start: int, stop: int) -> None:
            part, first, last = codes[start * bits // 8 :], start // bucket, -(-stop // bucket)
            kernel(
                x[start:stop], residual[start:stop], weight, bits, bucket, key, ctx.offset + start,
                part, scales[first:last], lows[first:last],
            )  # fmt: skip

        run_ranges(x.size, bucket, encode)

    def _decode(self, payload: Payload, out: Array, add: bool) -> None:
        from ringlet.compressors.kernels.quantize import decoder

        kernel = decoder(self.scheme(), add)
        codes, scales, lows = self._arrays(payload)
        bits, bucket = self.bits, self.bucket

        def decode(start: int, stop: int) -> None:
            part, first, last = codes[start * bits // 8 :], start // bucket, -(-stop // bucket)
            kernel(part, scales[first:last], lows[first:last], bits, bucket, out[start:stop])

        run_ranges(out.size, bucket, decode)

    def _arrays(self, payload: Payload) -> tuple[Array, Array, Array]:
        return payload["codes"], payload["scales"], payload.get("lows", _NO_LOWS)

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

    def _blank(self, payload: Payload, buckets: Array, n: int) -> None:
        """Zero the bytes of buckets that are not finite, as the kernels do, tail bits included."""
        width = self.bucket * self.bits // 8
        for b in buckets.tolist():
            payload["codes"][b * width : (b + 1) * width] = 0


_NO_LOWS: Array = np.empty(0, np.float32)


@register("maxnorm")
class MaxNorm(BucketQuantizer):
    """Send round(x / scale) per bucket, scale = max|x| / (2**(bits-1) - 1). Zero stays zero.

    Best of the quantisers for gradients with outliers. To nearest, an element's error is at most
    half a level; stochastic, it is below a level and zero in expectation.
    """

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


@register("int8")
class Int8(MaxNorm):
    """``maxnorm(bits=8)``: 8 bits and a scale per bucket."""

    bits: int = fixed(8)


@register("int4")
class Int4(MaxNorm):
    """``maxnorm(bits=4)``: 4 bits and a scale per bucket."""

    bits: int = fixed(4)


@register("qsgd")
class QSGD(BucketQuantizer):
    """Quantise to multiples of ||x||_2 / (2**(bits-1) - 1) per bucket, stochastically.

    Alistarh et al., NeurIPS 2017. Unbiased. Below 8 bits ``maxnorm`` has a far smaller error.
    """

    bits: int = option(8, ge=2, le=8, doc="bits of a code, sign included")
    stochastic: bool = fixed(True)

    def scheme(self) -> Any:
        """The Euclidean norm."""
        from ringlet.compressors.kernels.quantize import Scheme

        return Scheme.L2

    def traits(self) -> Traits:
        """Cut at buckets; unbiased."""
        d, s = self.bucket, self.levels
        slack = (1 + 2**-7) ** 2  # of the scale's rounding
        return Traits(fixed_size=True, granularity=d, omega=min(d / s**2, d**0.5 / s) * slack)

    def extents(self, rows: Array, xp: Any) -> tuple[Array, Array]:
        """Return each row's Euclidean norm, summed in eight lanes of float64 as the kernels do."""
        squared = rows.astype("float64") ** 2
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
    exceeds float32 decodes to NaN.
    """

    bits: int = option(4, ge=1, le=8, doc="bits of a code")
    bucket: int = option(1024, ge=32, le=65536, doc="elements that share a scale, a multiple of 8")

    @property
    def levels(self) -> int:
        """How many levels lie above the minimum."""
        return (1 << self.bits) - 1

    def scheme(self) -> Any:
        """The range."""
        from ringlet.compressors.kernels.quantize import Scheme

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


def _round_up(xp: Any, values: Array) -> Array:
    """Round non-negative float32 up to bfloat16 bits, at most to the largest finite one."""
    bits = values.astype("float32").view("uint32")
    rounded: Array = xp.minimum((bits.astype("uint64") + 0xFFFF) >> 16, 0x7F7F).astype("uint16")
    return rounded


def _widen(xp: Any, bits: Array) -> Array:
    wide: Array = (bits.astype("uint32") << 16).view("float32")
    return wide
