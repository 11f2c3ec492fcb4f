"""4-bit floats with an 8-bit float per block of 16, and a float32 per tensor: NVFP4.

NVIDIA, "Pretraining large language models with NVFP4", arXiv:2509.25149.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ringlet.compressors.base.batched import Batched
from ringlet.compressors.base.bucketed import Bucketed, Kernel
from ringlet.compressors.base.contract import Part, Payload, Traits, keeps
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.minifloats import E2M1, E4M3, decoded, encoded
from ringlet.compressors.core.options import option
from ringlet.compressors.core.packing import blanked, pack_bits, packed_size, unpack_bits
from ringlet.compressors.core.read_only import unlocked
from ringlet.compressors.core.rng import squares
from ringlet.compressors.core.threads import run_ranges
from ringlet.compressors.specs.registry import register

if TYPE_CHECKING:
    from ringlet.compressors.kernels.cuda.common.bucketed import BucketedCodec

BLOCK = 16
_NAN = 0x7F  # of E4M3
_HIGHEST = np.float32(6 * 448)  # the largest element times the largest scale
_TINY = np.float32(2.0**-126)


@register("nvfp4")
class NVFP4(Bucketed):
    """Send NVFP4: 4-bit floats (e2m1), an 8-bit scale (E4M3) per 16, and a float32 per tensor.

    The float32, ``unit``, is max|x| / 2688 of what is finite, at least 2**-126; a block's scale is
    max|block| / (6 unit), rounded to nearest even; its elements are rounded to those of ``mxfp4``
    times scale times unit, and saturate where the scale was rounded down. A block with a NaN or an
    Inf gets the scale NaN and decodes to NaN. A block 2**-19 times as large as the tensor's largest
    value, or smaller, is sent as zeros, and so is one below 6 * 2**-126. ``stochastic`` rounds
    elements up or down at random, without bias but for what saturates. The unit belongs to the
    whole tensor, which is why it travels by all-gather, never in shards.
    """

    paper: ClassVar[str] = "NVIDIA, arXiv:2509.25149"
    stochastic: bool = option(False, doc="round at random, without bias up to saturation")

    def traits(self) -> Traits:
        """Never cut, for the tensor shares a float32; contracts."""
        # At most 0.17 of the energy of a block that is sent, and of 2**34 elements 0.08 in others.
        return Traits(fixed_size=True, delta=0.75)

    def layout(self, n: int) -> tuple[Part, ...]:
        """Packed codes, a byte per block begun, and a number, if there is anything."""
        return (
            Part("codes", "uint8", packed_size(n, 4)),
            Part("scales", "uint8", -(-n // BLOCK)),
            Part("unit", "float32", min(n, 1)),
        )

    # -- array code: the kernels agree with it bit for bit ------------------------------------

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Find the unit, then scale each block and round its values."""
        xp, n = ctx.xp, x.size
        rows = xp.zeros((-(-n // BLOCK), BLOCK), "float32")
        rows.reshape(-1)[:n] = x
        bits = rows.view("uint32") & 0x7FFFFFFF
        finite = (bits < 0x7F800000).all(axis=1)
        known = xp.where(bits < 0x7F800000, bits, 0).astype("uint32").view("float32")
        unit = xp.maximum(known.max(keepdims=True).reshape(-1), 0) if n else known.reshape(-1)
        unit = xp.maximum(unit / _HIGHEST, _TINY)
        noise = squares(xp, ctx.key(), ctx.offset, rows.size) if self.stochastic else None
        with np.errstate(all="ignore"):
            top = xp.where(finite, known.max(axis=1) if n else known[:, 0], np.float32(0))
            scales = encoded(top / (np.float32(6) * unit), E4M3, None, xp)
            whole = decoded(scales, E4M3, xp) * unit
            inverse = xp.where(whole >= _TINY, np.float32(1) / whole, np.float32(0))
            codes = encoded((rows * inverse[:, None]).reshape(-1), E2M1, noise, xp)[:n]
        return {
            "codes": blanked(xp, pack_bits(xp, codes, 4), finite, BLOCK // 2),
            "scales": xp.where(finite, scales, _NAN).astype("uint8"),
            "unit": unit,
        }

    def decode_array(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Decode codes and scales, and multiply."""
        whole = decoded(payload["scales"], E4M3, ctx.xp) * payload["unit"]
        codes = unpack_bits(ctx.xp, payload["codes"], 4, out.size)
        out[...] = decoded(codes, E2M1, ctx.xp) * whole.repeat(BLOCK)[: out.size]

    # -- kernels ------------------------------------------------------------------------------

    @property
    def granule(self) -> int:
        """The elements that share a scale."""
        return BLOCK

    def strides(self) -> dict[str, int]:
        """Bytes of codes, a scale, and what all blocks share."""
        return {"codes": BLOCK // 2, "scales": 1, "unit": 0}

    def measure(
        self, x: Array, residual: Array | None, decay: float, payload: Payload, ctx: Context
    ) -> None:
        """Find the unit on the CPU."""
        from ringlet.compressors.kernels.cpu.quantizers.nvfp4 import largest

        kernel, x = largest(residual is not None), unlocked(x)
        held = x if residual is None else residual
        tops: list[float] = [0.0]
        weight = np.float32(decay)

        def find(start: int, stop: int) -> None:
            tops.append(kernel(x[start:stop], held[start:stop], weight))

        run_ranges(x.size, 1, find)
        payload["unit"][...] = max(np.float32(max(tops)) / _HIGHEST, _TINY)

    def encoder(self, feedback: bool, ctx: Context) -> Kernel:
        """The kernel of the rounding."""
        from ringlet.compressors.kernels.cpu.quantizers.nvfp4 import encoder

        kernel: Kernel = encoder(self.stochastic, feedback)
        return kernel

    def decoder(self, add: bool, ctx: Context) -> Kernel:
        """The kernel."""
        from ringlet.compressors.kernels.cpu.quantizers.nvfp4 import decoder

        kernel: Kernel = decoder(add)
        return kernel

    def draws(self) -> bool:
        """Only to round at random."""
        return self.stochastic

    def batched(self) -> Batched | None:
        """The kernels of the rounding, for many tensors a call."""
        own = keeps(self, NVFP4, "encoder", "decoder", "measure", "layout", "strides")
        if not (own and self.relies_on_kernels()):
            return None
        from ringlet.compressors.kernels.cpu.quantizers import nvfp4 as kernels

        return self.looped(
            lambda fed: kernels.placed_encoder(self.stochastic, fed),
            kernels.placed_decoder(),
            tuple,
        )

    def cuda(self) -> BucketedCodec:
        """The kernels of the rounding."""
        from ringlet.compressors.kernels.cuda.common.minifloats import codec
        from ringlet.compressors.kernels.cuda.quantizers.nvfp4 import Measured

        return codec("quantizers/nvfp4", E2M1, BLOCK, self.stochastic, Measured)
