"""One bit per entry: signs with a scale, and signs put to the vote.

Seide et al., "1-bit stochastic gradient descent", Interspeech 2014; Bernstein et al., "signSGD:
compressed optimisation for non-convex problems", ICML 2018.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ringlet.compressors.base.bucketed import NAN_BITS, Kernel, lane_sums, rounded
from ringlet.compressors.base.contract import Payload, Traits
from ringlet.compressors.base.feedback import on_device
from ringlet.compressors.base.packed_codec import PackedCodec
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.errors import OptionError
from ringlet.compressors.core.options import fixed, option
from ringlet.compressors.core.packing import pack_bits, unpack_bits
from ringlet.compressors.core.rng import squares
from ringlet.compressors.core.threads import run_ranges
from ringlet.compressors.specs.registry import register

if TYPE_CHECKING:
    from ringlet.compressors.kernels.cuda.common.bucketed import BucketedCodec


class Signs(PackedCodec):
    """Base of the one-bit compressors: a bit per entry, set where it is negative.

    For what is zero it is drawn: of one sign, it would move the same way in every step. A bucket
    with a NaN or Inf decodes to NaN, so that overflow stays visible.
    """

    bits: int = fixed(1)
    bucket: int = option(1024, ge=32, le=65536, doc="elements that share a scale, a multiple of 8")

    def magnitudes(self, rows: Array, counts: Array, xp: Any) -> Array:
        """Return each row's scale (float32), NaN or Inf where it has one."""
        raise TypeError(f"{type(self).__name__} has no scale")

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Take signs, and draw those of zeros: a number for each eight elements."""
        xp = ctx.xp
        rows, counts = self.rows(x, xp), self.counts(x.size, xp)
        with np.errstate(all="ignore"):
            scale = self.magnitudes(rows, counts, xp)
        finite = xp.isfinite(scale)
        eights = squares(xp, ctx.key(), ctx.offset >> 3, -(-rows.size // 8)) >> 24
        drawn = (eights[:, None] >> xp.arange(8, dtype="uint32") & 1).reshape(rows.shape)
        negative = (rows < 0) | ((rows == 0) & (drawn != 0))
        codes = (negative & finite[:, None]).astype("uint8").reshape(-1)[: x.size]
        return {
            "codes": pack_bits(xp, codes, 1),
            "scales": xp.where(finite, rounded(scale, xp), NAN_BITS).astype("uint16"),
        }

    def decode_array(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Put the signs to the scales."""
        xp, n = ctx.xp, out.size
        negative = unpack_bits(xp, payload["codes"], 1, n)
        scale = self.spread(payload["scales"], n)
        out[...] = xp.where(negative, -scale, scale)

    def decoding(self) -> Kernel:
        """The kernel of both."""
        from ringlet.compressors.kernels.cpu.quantizers.onebit import decode

        kernel: Kernel = decode
        return kernel


@register("onebit")
class OneBit(Signs):
    """Send signs, and the mean magnitude of each bucket, which is the best scale for signs.

    Seide et al., Interspeech 2014, with one mean instead of two. Loses much in a single step: use
    it with error feedback, ``onebit | ef``; without, what is 0 moves by the mean magnitude, to
    either side, in each step. 31.5 times smaller than float32. The scale is a bfloat16: the error
    depends on it only to second order, so 2**-8 costs a share of 2**-16.
    """

    paper: ClassVar[str] = "Seide, Interspeech 2014"

    def traits(self) -> Traits:
        """Cut at buckets; contracts by ||x||_1^2 / (d ||x||_2^2), which is at least 1 / d."""
        return Traits(fixed_size=True, granularity=self.bucket, delta=(1 - 2.0**-12) / self.bucket)

    def cuda(self) -> BucketedCodec:
        """The kernels that find the mean."""
        return self.cuda_codec("quantizers/onebit", random=True, GIVEN=0, PARAMETER=0.0)

    def magnitudes(self, rows: Array, counts: Array, xp: Any) -> Array:
        """Return each row's mean magnitude."""
        mean: Array = (lane_sums(xp.abs(rows).astype("float64"), xp) / counts).astype("float32")
        return mean

    def encoding(self, feedback: bool) -> Kernel:
        """The kernel that finds the mean."""
        from ringlet.compressors.kernels.cpu.quantizers.onebit import encoder

        kernel: Kernel = encoder(given=False, feedback=feedback)
        return kernel


@register("signsgd")
class SignSGD(Signs):
    """Send signs and take a majority vote: the result is +scale or -scale, and no mean.

    Bernstein et al., ICML 2018. A vote is the sign of x, for 0 a coin's. A tie, possible for an
    even number of ranks and frequent with two, goes to + and - by turns, of an element's steps and
    of a step's elements. So what is 0 on all ranks, as rows of an embedding are, moves by +-scale
    too, but not to one side. Magnitudes are lost, so the learning rate has to be chosen for steps
    of +-scale, and a loss scale must not divide them afterwards. Error feedback cannot stand behind
    it, for votes do not grow with what is held back. For a mean use ``onebit | ef``.
    """

    paper: ClassVar[str] = "Bernstein, ICML 2018"
    scale: float = option(1.0, gt=0, doc="magnitude of the result, a power of two")

    def validate(self) -> None:
        """Votes are powers of two, so that they add up exactly and a tie is exactly zero."""
        super().validate()
        if math.frexp(self.scale)[0] != 0.5 or not 2.0**-100 <= self.scale <= 2.0**100:
            raise OptionError(
                f"signsgd: scale must be a power of two within 2**-100 and 2**100, "
                f"got {self.scale!r}"
            )

    def traits(self) -> Traits:
        """Cut at buckets; magnitudes are lost, in small tensors too: a rate fits all or none."""
        return Traits(fixed_size=True, granularity=self.bucket, scales=False, min_size=0)

    def divergence(self) -> str | None:
        """A vote is of one size, however much is held back."""
        return (
            f"a vote is +-{self.scale:g} however large a gradient is, so that residuals of larger "
            "ones grow without bound; use 'onebit' instead of 'signsgd'"
        )

    def cuda(self) -> BucketedCodec:
        """The kernels that use a given scale."""
        scale = float(self.scale)
        return self.cuda_codec("quantizers/onebit", random=True, GIVEN=1, PARAMETER=scale)

    def magnitudes(self, rows: Array, counts: Array, xp: Any) -> Array:
        """Return the scale that is given, where a row is finite."""
        top = xp.abs(rows).max(axis=1)
        given: Array = xp.where(xp.isfinite(top), np.float32(self.scale), top)
        return given

    @property
    def parameter(self) -> float:
        """The given scale."""
        return self.scale

    def encoding(self, feedback: bool) -> Kernel:
        """The kernel that uses a given scale."""
        from ringlet.compressors.kernels.cpu.quantizers.onebit import encoder

        kernel: Kernel = encoder(given=True, feedback=feedback)
        return kernel

    def finish(self, out: Array, ctx: Context) -> None:
        """Replace the sum or mean of the votes by its sign, ties by turns; NaN stays NaN."""
        scale, turn, xp = np.float32(self.scale), (ctx.step + ctx.offset) & 1, ctx.xp
        if on_device("vote", ctx, out, self.scale, turn):
            return
        if xp is not np:
            odd = (xp.arange(out.size, dtype="int64") + turn) & 1 != 0
            negative = (out < 0) | ((out == 0) & odd)
            out[...] = xp.where(xp.isnan(out), out, xp.where(negative, -scale, scale))
            return
        from ringlet.compressors.kernels.cpu.quantizers.onebit import vote

        run_ranges(out.size, 1, lambda a, b: vote(out[a:b], scale, (turn + a) & 1))
