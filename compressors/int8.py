"""8-bit quantisation with one scale per bucket.

Dettmers, "8-bit approximations for parallelism in deep learning", ICLR 2016; the max-norm variant
of Alistarh et al., "QSGD", NeurIPS 2017, rounded to nearest.
"""

from __future__ import annotations

import numpy as np

from ringlet.compressors.context import Array, Context
from ringlet.compressors.contract import Compressor, Part, Payload, Traits, exercise
from ringlet.compressors.options import option
from ringlet.compressors.registry import register

_LEVELS = np.float32(127)
_TINY = np.float32(1.5e-36)


@register("int8")
class Int8(Compressor):
    """Send round(127 x / max|x|) per bucket, to nearest, and the scale as float32.

    The error of an element is at most max|x| / 254 of its bucket. A bucket with a NaN or Inf
    decodes to NaN, so that overflow stays visible. A bucket whose largest magnitude is below
    1.5e-36 is sent as zeros (error feedback keeps what it held).
    """

    bucket: int = option(512, ge=32, le=65536, doc="elements that share a scale")

    def traits(self) -> Traits:
        """Fixed size; cut at buckets; error at most 1/254 of the largest entry."""
        # ||error||^2 <= bucket * (max / 254)^2 and ||x||^2 >= max^2, if that is below 1.
        delta = 1.0 - self.bucket / 254**2
        return Traits(fixed_size=True, granularity=self.bucket, delta=delta if delta > 0 else None)

    def layout(self, n: int) -> tuple[Part, ...]:
        """n codes and a scale per bucket begun."""
        return (Part("codes", "int8", n), Part("scales", "float32", -(-n // self.bucket)))

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Quantise in array code; the kernels agree with it bit for bit."""
        xp, n = ctx.xp, x.size
        rows = xp.zeros((-(-n // self.bucket), self.bucket), "float32")
        rows.reshape(-1)[:n] = x
        top = xp.abs(rows).max(axis=1, initial=np.float32(0))
        usable = xp.isfinite(top) & (top >= _TINY)
        safe = xp.where(usable, top, np.float32(1))
        with np.errstate(invalid="ignore", over="ignore"):
            levels = xp.rint(rows * (_LEVELS / safe)[:, None])
        codes = xp.where(usable[:, None], levels, np.float32(0)).astype("int8")
        scales = xp.where(usable, safe / _LEVELS, np.float32(0))
        scales = xp.where(xp.isfinite(top), scales, np.float32(np.nan)).astype("float32")
        return {"codes": codes.reshape(-1)[:n], "scales": scales}

    def decompress(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Multiply codes by their bucket's scale."""
        codes, scales = payload["codes"], payload["scales"]
        if ctx.xp is np:
            from ringlet.compressors.kernels import quantize

            quantize.decode(codes, scales, self.bucket, out)
        else:
            out[...] = codes.astype("float32") * scales.repeat(self.bucket)[: out.size]

    def encode_into(self, x: Array, payload: Payload, ctx: Context) -> None:
        """Quantise in one pass."""
        if ctx.xp is not np:
            return super().encode_into(x, payload, ctx)
        from ringlet.compressors.kernels import quantize

        quantize.encode(x, self.bucket, payload["codes"], payload["scales"])
        return None

    def feedback_into(
        self, x: Array, residual: Array, decay: float, payload: Payload, ctx: Context
    ) -> None:
        """Add the residual, quantise and keep the error in one pass."""
        if ctx.xp is not np:
            return super().feedback_into(x, residual, decay, payload, ctx)
        from ringlet.compressors.kernels import quantize

        codes, scales = payload["codes"], payload["scales"]
        quantize.encode_feedback(x, residual, np.float32(decay), self.bucket, codes, scales)
        return None

    def accumulate(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Decode and add in one pass."""
        if ctx.xp is not np:
            return super().accumulate(payload, out, ctx)
        from ringlet.compressors.kernels import quantize

        quantize.accumulate(payload["codes"], payload["scales"], self.bucket, out)
        return None

    def warm_up(self, ctx: Context) -> None:
        """Compile the kernels."""
        exercise(self, ctx)
