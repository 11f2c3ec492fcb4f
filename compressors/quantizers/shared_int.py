"""Integers on a scale that all ranks share, which add up on the wire.

Scaler sharing as in Wen et al., "TernGrad", NeurIPS 2017; sums of codes as in Li et al., "THC:
accelerating distributed deep learning using tensor homomorphic compression", NSDI 2024.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from ringlet.compressors.base.batched import BatchedRounds, Exchanged, ExchangeOfMany
from ringlet.compressors.base.contract import (
    Compressor,
    Exchange,
    Round,
    Traits,
    grows_rotated,
    keeps,
)
from ringlet.compressors.base.cuda_device import device_for
from ringlet.compressors.base.norms import clip
from ringlet.compressors.base.precompile import precompile
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.errors import CompressorError
from ringlet.compressors.core.lengths import check_lengths
from ringlet.compressors.core.options import fixed, option
from ringlet.compressors.core.read_only import unlocked
from ringlet.compressors.core.rng import squares
from ringlet.compressors.core.threads import run_ranges
from ringlet.compressors.specs.registry import register

_TINY = np.float32(1.2e-38)
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

    paper: ClassVar[str] = "Li, NSDI 2024"
    most_rounds: ClassVar[int] = 2  # that ``exchange`` makes
    bits: int = option(8, choices=(8, 16, 32), doc="bits of an integer on the wire")
    bucket: int = option(512, ge=32, le=65536, doc="elements that share a scale")
    stochastic: bool = option(False, doc="round at random, without bias above 2**-16 of a level")
    levels: int = option(0, ge=0, le=_MOST, doc="levels of a sign; 0: as many as cannot overflow")

    def traits(self) -> Traits:
        """Two rounds; the error is relative to the largest rank's values, so nothing is claimed."""
        return Traits("rounds")

    def rotated_divergence(self) -> str | None:
        """None but where one level is rounded to at random."""
        if not self.stochastic or self.levels != 1:
            return None
        return grows_rotated(self, "use more levels")

    def chained_part(self) -> str | None:
        """None: what travels are integers already."""
        return None

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
        levels, buckets = np.float32(self.steps(ctx.size)), -(-x.size // self.bucket)
        held, wire = ctx.workspace.held, f"int{self.bits}"
        room = x.size if self.bound else 0
        with held(room) as clipped, held(buckets) as extents, held(x.size, wire) as codes:
            if self.bound:
                clip(x, self.bound, clipped, ctx)
                x = clipped
            elif ctx.xp is np:
                x = unlocked(x)
            self.measure(x, extents, ctx)
            extents[...] = yield Round(extents, "max")
            self.encode(x, extents, levels, codes, ctx)
            total = yield Round(codes, "sum")
            units = extents
            with np.errstate(invalid="ignore"):
                units /= levels
                units *= units >= _TINY  # tiny levels are 0; NaN and Inf stay
            if local is not None:
                self._decode(codes, units, local, ctx)
            units /= np.float32(ctx.size)
            self._decode(total, units, out, ctx)

    def batched_rounds(self) -> BatchedRounds | None:
        """The kernels for many tensors a call."""
        own = keeps(self, SharedInt, "exchange", "exchange_feedback", "measure", "encode", "steps")
        return BatchedRounds(_any, self._many, self._many) if own else None

    def _many(self, tensors: Sequence[Exchanged], decay: float = 1.0) -> ExchangeOfMany:
        from ringlet.compressors.quantizers.shared_int_many import exchange_many

        scaled = self.steps(tensors[0].ctx.size), self.bits, self.bucket
        return exchange_many(*scaled, self.stochastic, tensors, decay, self.bound)

    def _decode(self, codes: Array, units: Array, out: Array, ctx: Context) -> None:
        self._check(out.size, units, codes)
        if ctx.xp is np:
            from ringlet.compressors.kernels.cpu.quantizers.shared_int import decode

            def decoded(start: int, stop: int) -> None:
                buckets = slice(start // self.bucket, -(-stop // self.bucket))
                decode(codes[start:stop], units[buckets], self.bucket, out[start:stop])

            run_ranges(out.size, self.bucket, decoded)
            return
        if self._on_device("decode", out.size, units, ctx, codes=codes, out=out):
            return
        with np.errstate(invalid="ignore"):
            out[...] = codes.astype("float32") * units.repeat(self.bucket)[: out.size]

    @property
    def bound(self) -> float:
        """At how many root mean squares of its tensor a value is clipped; 0: at none.

        Where these are not finite nothing is: an overflow must not be clipped away.
        """
        return 0.0

    def measure(self, x: Array, largest: Array, ctx: Context) -> None:
        """Set ``largest`` to max|x| of each bucket, Inf where that is not finite."""
        self._check(x.size, largest)
        xp = ctx.xp
        if xp is np:
            from ringlet.compressors.kernels.cpu.quantizers import shared_int as kernels

            def measure(start: int, stop: int) -> None:
                buckets = slice(start // self.bucket, -(-stop // self.bucket))
                kernels.extents(x[start:stop], self.bucket, largest[buckets])

            run_ranges(x.size, self.bucket, measure)
            return
        if self._on_device("measure", x.size, largest, ctx, x=x):
            return
        rows = xp.zeros((largest.size, self.bucket), "float32")
        rows.reshape(-1)[: x.size] = xp.abs(x)
        rows = xp.where(xp.isnan(rows), np.float32(np.inf), rows)
        largest[...] = rows.max(axis=1)

    def encode(self, x: Array, largest: Array, levels: Any, codes: Array, ctx: Context) -> None:
        """Set ``codes`` to round(x * levels / largest)."""
        self._check(x.size, largest, codes)
        xp, bucket = ctx.xp, self.bucket
        if xp is np:
            from ringlet.compressors.kernels.cpu.quantizers.shared_int import encoder

            kernel, key = encoder(self.stochastic), np.uint64(ctx.key())

            def encode(start: int, stop: int) -> None:
                scales = largest[start // bucket : -(-stop // bucket)]
                first = ctx.offset + start
                kernel(x[start:stop], scales, levels, bucket, key, first, codes[start:stop])

            run_ranges(x.size, bucket, encode)
            return
        if self._on_device("encode", x.size, largest, ctx, float(levels), x=x, codes=codes):
            return
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

    def _check(self, n: int, extents: Array, codes: Array | None = None) -> None:
        check_lengths(self.label(), -(-n // self.bucket), extents=extents)
        check_lengths(self.label(), n, codes=codes)

    def _on_device(
        self, kernel: str, n: int, extents: Array, ctx: Context, levels: float = 1.0,
        **arrays: Array,
    ) -> bool:  # fmt: skip
        """Run a CUDA kernel; False if there are none for these arrays."""
        from ringlet.compressors.kernels.cuda.quantizers import shared_int as kernels

        device = device_for(ctx)
        if device is None:
            return False
        code = kernels.program(self.bits, self.bucket, self.stochastic)
        kernels.run(device, code, kernel, n, extents, ctx.key(), ctx.offset, levels, **arrays)
        return True

    def warm_up(self, ctx: Context) -> None:
        """Compile the kernels."""
        precompile(self, ctx)


def _any(shape: tuple[int, ...]) -> bool:
    return True


@register("terngrad_shared")
class TernGradShared(SharedInt):
    """Send -1, 0 or 1 in a byte, at random and without bias, on a scale shared by all ranks.

    Wen et al., NeurIPS 2017, with scaler sharing. Values are clipped at ``clip`` root mean squares
    of their tensor first, which is the only bias; the sum allows 127 ranks.
    """

    paper: ClassVar[str] = "Wen, NeurIPS 2017"
    bits: int = fixed(8)
    stochastic: bool = fixed(True)
    levels: int = fixed(1)
    clip: float = option(2.5, ge=0, doc="root mean squares at which values are clipped; 0: none")

    @property
    def bound(self) -> float:
        """What ``clip`` says."""
        return self.clip
