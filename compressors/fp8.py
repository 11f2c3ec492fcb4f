"""8-bit floats with a power-of-two scale per block.

OCP Microscaling Formats (MX) v1.0, 2023; Rouhani et al., "Microscaling data formats for deep
learning", arXiv:2310.10537; scales rounded up as in Mishra et al., "Recipes for pre-training LLMs
with MXFP8", arXiv:2506.08027.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ringlet.compressors.context import Array, Context
from ringlet.compressors.contract import Compressor, Part, Payload, Traits, exercise
from ringlet.compressors.errors import OptionError
from ringlet.compressors.options import option
from ringlet.compressors.pool import run_ranges
from ringlet.compressors.registry import register

_OVERFLOW = 0x7F700000


@register("fp8")
class FP8(Compressor):
    """Send 8-bit floats (e4m3 or e5m2) and an exponent byte (e8m0) per block, as in OCP MX.

    The exponent is the smallest with which no value of the block saturates. Rounds to nearest
    even: a value's relative error is at most 2**-4 (e4m3) or 2**-3 (e5m2) down to 2**-14 or 2**-29
    of the block's largest, absolute below. Keeps small values better than ``int8`` does, large ones
    worse. A block with a NaN, an Inf or a magnitude from 3.19e38 decodes to NaN; one below 2**-118
    loses precision.
    """

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

    def layout(self, n: int) -> tuple[Part, ...]:
        """A byte per element and one per block begun."""
        return (Part("codes", "uint8", n), Part("scales", "uint8", -(-n // self.block)))

    # -- array code: the kernels agree with it bit for bit ------------------------------------

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Scale each block by a power of two and round its values to 8 bits."""
        xp, m, n = ctx.xp, self.mantissa, x.size
        emax, lowest = (8, 121) if m == 3 else (15, 113)
        rows = xp.zeros((-(-n // self.block), self.block), "float32")
        rows.reshape(-1)[:n] = x
        top = (rows.view("uint32") & 0x7FFFFFFF).max(axis=1, initial=0)
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

    def decompress(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Decode each code and scale it."""
        if ctx.xp is np:
            self._decode(payload, out, add=False)
            return
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

    def encode_into(self, x: Array, payload: Payload, ctx: Context) -> None:
        """Scale, round and pack in one pass."""
        if ctx.xp is not np:
            return super().encode_into(x, payload, ctx)
        self._encode(x, x, 1.0, payload, feedback=False)
        return None

    def feedback_into(
        self, x: Array, residual: Array, decay: float, payload: Payload, ctx: Context
    ) -> None:
        """Add the residual, round and keep the error in one pass."""
        if ctx.xp is not np:
            return super().feedback_into(x, residual, decay, payload, ctx)
        self._encode(x, residual, decay, payload, feedback=True)
        return None

    def accumulate(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Decode and add in one pass."""
        if ctx.xp is not np:
            return super().accumulate(payload, out, ctx)
        self._decode(payload, out, add=True)
        return None

    def warm_up(self, ctx: Context) -> None:
        """Compile the kernels."""
        exercise(self, ctx)

    def _encode(
        self, x: Array, residual: Array, decay: float, payload: Payload, feedback: bool
    ) -> None:
        from ringlet.compressors.kernels.fp8 import encoder

        kernel, block = encoder(self.mantissa, self.block, feedback), self.block
        codes, scales, weight = payload["codes"], payload["scales"], np.float32(decay)

        def encode(start: int, stop: int) -> None:
            places = slice(start, stop)
            kernel(x[places], residual[places], weight, codes[places], scales[start // block :])

        full = x.size // block * block
        if full:
            run_ranges(full, block, encode)
        if full < x.size:
            _encode_tail(kernel, block, x, residual, weight, codes, scales, feedback)

    def _decode(self, payload: Payload, out: Array, add: bool) -> None:
        from ringlet.compressors.kernels.fp8 import decoder

        kernel, block = decoder(self.mantissa, self.block, add), self.block
        codes, scales = payload["codes"], payload["scales"]

        def decode(start: int, stop: int) -> None:
            kernel(codes[start:stop], scales[start // block : -(-stop // block)], out[start:stop])

        run_ranges(out.size, block, decode)


def _encode_tail(
    kernel: Callable[..., Any], block: int, x: Array, residual: Array, decay: Any,
    codes: Array, scales: Array, feedback: bool,
) -> None:  # fmt: skip
    """Encode what is left behind the last whole block, filled up with zeros."""
    left = x.size % block
    values, held = np.zeros((2, block), np.float32)
    values[:left], held[:left] = x[-left:], residual[-left:]
    coded = np.empty(block, np.uint8)
    kernel(values, held, decay, coded, scales[-1:])
    codes[-left:] = coded[:left]
    if feedback:
        residual[-left:] = held[:left]
