"""Integers on a scale that all ranks share, which add up on the wire.

Scaler sharing as in Wen et al., "TernGrad", NeurIPS 2017; sums of codes as in Li et al., "THC:
accelerating distributed deep learning using tensor homomorphic compression", NSDI 2024.
"""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import numpy as np

from ringlet.compressors.context import Array, Context
from ringlet.compressors.contract import Compressor, Exchange, Round, Traits
from ringlet.compressors.errors import CompressorError
from ringlet.compressors.options import fixed, option
from ringlet.compressors.pool import run_ranges
from ringlet.compressors.random import squares
from ringlet.compressors.registry import register

_TINY = np.float32(1.2e-38)
_PART = 1 << 16
_MOST = 1 << 22  # levels beyond which float32 cannot round


@register("shared_int")
class SharedInt(Compressor):
    """Send integers of ``bits`` bits on a scale per bucket that is the largest over all ranks.

    Two rounds: the maximum of everybody's max|x| (4 bytes a bucket), then the sum of the codes,
    which is the code of the sum, so it rides any allreduce and is the same for every order of
    adding. So that sums cannot overflow, codes have (2**(bits-1) - 1) // ranks levels: with 8 bits
    and 8 ranks 15. A bucket in which any rank has a NaN or Inf comes out as NaN everywhere.
    ``levels`` asks for fewer. A bucket whose levels are tinier than 1.2e-38 is sent as zeros. Put
    ``hadamard`` behind it to tame outliers.
    """

    bits: int = option(8, choices=(8, 16, 32), doc="bits of an integer on the wire")
    bucket: int = option(512, ge=32, le=65536, doc="elements that share a scale")
    stochastic: bool = option(False, doc="round up or down at random, without bias")
    levels: int = option(0, ge=0, le=_MOST, doc="levels of a sign; 0: as many as cannot overflow")

    def traits(self) -> Traits:
        """Two rounds; the error is relative to the largest rank's values, so nothing is claimed."""
        return Traits("rounds")

    def steps(self, size: int) -> int:
        """Return the levels per sign among ``size`` ranks; CompressorError where none is left."""
        fitting = min(((1 << (self.bits - 1)) - 1) // size, _MOST)
        if fitting < max(self.levels, 1):
            raise CompressorError(
                f"{self}: the sum of {max(self.levels, 1)} levels over {size} ranks does not fit "
                f"{self.bits} bits; use bits={16 if self.bits == 8 else 32}"
            )
        return self.levels or fitting

    def exchange(self, x: Array, out: Array, ctx: Context, local: Array | None = None) -> Exchange:
        """Agree on the scales, then add the codes."""
        levels = np.float32(self.steps(ctx.size))
        x = self.prepared(x, ctx)
        largest = ctx.xp.array((yield Round(self.extents(x, ctx), "max")))
        codes = self.codes(x, largest, levels, ctx)
        total = yield Round(codes, "sum")
        with np.errstate(invalid="ignore"):
            units = largest / levels
            units = ctx.xp.where(units >= _TINY, units, units * np.float32(0))
        self._decode(total, (units / np.float32(ctx.size)).astype("float32"), out, ctx)
        if local is not None:
            self._decode(codes, units, local, ctx)

    def _decode(self, codes: Array, units: Array, out: Array, ctx: Context) -> None:
        if ctx.xp is np:
            from ringlet.compressors.kernels.shared import decode

            def decoded(start: int, stop: int) -> None:
                buckets = slice(start // self.bucket, -(-stop // self.bucket))
                decode(codes[start:stop], units[buckets], self.bucket, out[start:stop])

            run_ranges(out.size, self.bucket, decoded)
            return
        with np.errstate(invalid="ignore"):
            out[...] = codes.astype("float32") * units.repeat(self.bucket)[: out.size]

    def prepared(self, x: Array, ctx: Context) -> Array:
        """Return what is quantised in place of ``x``."""
        return x

    def extents(self, x: Array, ctx: Context) -> Array:
        """Return max|x| of each bucket (float32), Inf where that is not finite."""
        xp = ctx.xp
        largest: Array = xp.empty(-(-x.size // self.bucket), "float32")
        if xp is np:
            from ringlet.compressors.kernels import shared

            def measure(start: int, stop: int) -> None:
                buckets = slice(start // self.bucket, -(-stop // self.bucket))
                shared.extents(x[start:stop], self.bucket, largest[buckets])

            run_ranges(x.size, self.bucket, measure)
            return largest
        rows = xp.zeros((largest.size, self.bucket), "float32")
        rows.reshape(-1)[: x.size] = xp.abs(x)
        rows = xp.where(xp.isnan(rows), np.float32(np.inf), rows)
        largest[...] = rows.max(axis=1, initial=np.float32(0))
        return largest

    def codes(self, x: Array, largest: Array, levels: Any, ctx: Context) -> Array:
        """Return round(x * levels / largest) as integers of ``bits`` bits."""
        xp, bucket = ctx.xp, self.bucket
        codes: Array = xp.empty(x.size, f"int{self.bits}")
        if xp is np:
            from ringlet.compressors.kernels.shared import encoder

            kernel, key = encoder(self.stochastic), np.uint64(ctx.key())

            def encode(start: int, stop: int) -> None:
                scales = largest[start // bucket : -(-stop // bucket)]
                first = ctx.offset + start
                kernel(x[start:stop], scales, levels, bucket, key, first, codes[start:stop])

            run_ranges(x.size, bucket, encode)
            return codes
        unit = largest / levels
        usable = (unit >= _TINY) & xp.isfinite(unit)
        inverse = np.float32(1) / xp.where(usable, unit, np.float32(1))
        with np.errstate(invalid="ignore", over="ignore"):
            place = x * inverse.repeat(bucket)[: x.size]
            if self.stochastic:
                drawn = squares(xp, ctx.key(), ctx.offset, x.size) >> 16
                place = xp.floor(place + drawn.astype("float32") * np.float32(2.0**-16))
                place = xp.maximum(xp.minimum(place, levels), -levels)
        codes[...] = xp.where(usable.repeat(bucket)[: x.size], xp.rint(place), 0)
        return codes

    def warm_up(self, ctx: Context) -> None:
        """Compile the kernels, on a few zeros and one rank."""
        x = ctx.xp.zeros(8, "float32")
        rounds = self.exchange(x, ctx.xp.empty_like(x), Context(numel=x.size, xp=ctx.xp))
        sent = next(rounds)
        with suppress(StopIteration):
            while True:
                sent = rounds.send(sent.values)


@register("terngrad_shared")
class TernGradShared(SharedInt):
    """Send -1, 0 or 1 in a byte, at random and without bias, on a scale shared by all ranks.

    Wen et al., NeurIPS 2017, with scaler sharing. Values are clipped at ``clip`` root mean squares
    of their tensor first, which is the only bias; the sum allows 127 ranks.
    """

    bits: int = fixed(8)
    stochastic: bool = fixed(True)
    levels: int = fixed(1)
    clip: float = option(2.5, ge=0, doc="root mean squares at which values are clipped; 0: none")

    def prepared(self, x: Array, ctx: Context) -> Array:
        """Clip, unless the bound is not finite: an overflow must not be clipped away."""
        if self.clip == 0 or x.size == 0:
            return x
        # By parts that stay in the cache, because squares need double precision.
        parts = (x[i : i + _PART] for i in range(0, x.size, _PART))
        energy = sum(float(ctx.xp.square(part, dtype="float64").sum()) for part in parts)
        bound = self.clip * (energy / x.size) ** 0.5
        return ctx.xp.clip(x, -bound, bound).astype("float32") if math.isfinite(bound) else x
