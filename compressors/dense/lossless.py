"""Lossless compression of floats by their exponents.

Gradients use few of the 256 exponents; cf. Hao et al., "NeuZip", arXiv:2410.20650, and Johnson,
"DietGPU", 2022, which code exponents by entropy. Fixed widths per block cost half a bit to a bit
more and need no tables.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ringlet.compressors.base.batched import Batched
from ringlet.compressors.base.contract import Compressor, Part, Payload, Traits, keeps
from ringlet.compressors.base.cuda_device import device_for
from ringlet.compressors.base.precompile import precompile
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.errors import PayloadError
from ringlet.compressors.core.lengths import check_countable, check_parts
from ringlet.compressors.core.multitensor import Varying
from ringlet.compressors.core.options import option
from ringlet.compressors.core.read_only import unlocked
from ringlet.compressors.core.threads import run_ranges
from ringlet.compressors.dense import exponents
from ringlet.compressors.dense.exponents import BLOCK, LANES, WIDTHS, begins
from ringlet.compressors.specs.registry import register


@register("lossless")
class Lossless(Compressor):
    """Send sign and mantissa as they are, exponents as distances from their block's largest.

    Per block of 512, a code has the 0, 2, 3, 4, 5 or 8 bits that cost least; exponents too small
    for one are sent apart. ``dtype="bf16"`` rounds to bfloat16 and is exact from there on: 0.70 of
    bfloat16's bytes for Gaussian values, 0.73 for Laplacian ones, 0.51 for zeros, at worst 1.01.
    ``dtype="fp32"`` keeps every bit: 0.85 and 0.86 of float32's bytes. NaN and Inf travel as any.
    """

    paper: ClassVar[str] = "Hao, arXiv:2410.20650"
    dtype: str = option("bf16", choices=("bf16", "fp32"), doc="what is exact: bfloat16 or float32")

    def traits(self) -> Traits:
        """Gathered; sizes depend on the values."""
        exact = self.dtype == "fp32"
        return Traits(omega=0.0 if exact else None, delta=1.0 if exact else None)

    def chained_part(self) -> str | None:
        """None: what travels is codes."""
        return None

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Code the exponents: with kernels, whose sizes and results are those of array code."""
        check_countable(self.label(), x.size)
        if ctx.xp is not np:
            found = self._encode_on_device(x, ctx)
            return exponents.encode(x, self.dtype == "fp32", ctx) if found is None else found
        from ringlet.compressors.kernels.cpu.dense.lossless import encoder, surveyor

        exact, count, x = self.dtype == "fp32", -(-x.size // BLOCK), unlocked(x)
        tops, widths = np.empty(count, np.uint8), np.empty(count, np.uint8)
        counts = np.empty(count, np.uint16)
        survey, encode = surveyor(exact), encoder(exact)

        def surveyed(start: int, stop: int) -> None:
            at = slice(start // BLOCK, -(-stop // BLOCK))
            survey(x[start:stop], tops[at], widths[at], counts[at])

        run_ranges(x.size, BLOCK, surveyed)
        places, apart = begins(np, widths, LANES), begins(np, counts, 1)
        codes, spares = np.empty(int(places[-1]), np.uint8), np.empty(int(apart[-1]), np.uint8)
        mantissas, rests = np.empty(x.size, np.uint8), np.empty(x.size * exact, np.uint16)

        def encoded(start: int, stop: int) -> None:
            first, last = start // BLOCK, -(-stop // BLOCK)
            encode(
                x[start:stop], tops[first:last], widths[first:last], places[first : last + 1],
                apart[first : last + 1], codes, spares, mantissas[start:stop], rests[start:stop],
            )  # fmt: skip

        run_ranges(x.size, BLOCK, encoded)
        payload: Payload = {
            "tops": tops, "widths": widths, "counts": counts, "codes": codes, "spares": spares,
            "mantissas": mantissas,
        }  # fmt: skip
        return payload | {"rests": rests} if exact else payload

    def decompress(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Put exponents and mantissas together."""
        if ctx.xp is np:
            self._decode(payload, out, add=False)
        elif not self._decode_on_device(payload, out, ctx, add=False):
            exponents.decode(payload, out, ctx.xp)

    def accumulate(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Decode and add in one pass."""
        if ctx.xp is np:
            self._decode(payload, out, add=True)
        elif not self._decode_on_device(payload, out, ctx, add=True):
            super().accumulate(payload, out, ctx)

    def multi_varying(self, ctx: Context) -> Varying | None:
        """The same kernels, over many tensors."""
        own = keeps(self, Lossless, "compress", "decompress", "accumulate")
        if ctx.xp is np or not own or not keeps(self, Compressor, "sum_into"):
            return None
        device = device_for(ctx)
        if device is None:
            return None
        from ringlet.compressors.kernels.cuda.dense.lossless import Exponents

        return Exponents(device, self.dtype == "fp32", self._check_sizes)

    def batched(self) -> Batched | None:
        """The kernels for many tensors in host memory a call."""
        own = keeps(self, Lossless, "compress", "decompress", "accumulate")
        if not own or not keeps(self, Compressor, "sum_into", "compress_feedback", "keep_residual"):
            return None
        from ringlet.compressors.kernels.cpu.common.batched import batch_decoder, batch_encoder
        from ringlet.compressors.kernels.cpu.dense import lossless as kernels

        exact = self.dtype == "fp32"
        encode = batch_encoder(kernels.encode_placed(exact))
        decode = batch_decoder(kernels.decode_placed(exact))
        return Batched(
            self.label,
            self._room,
            tuple(part.name for part in self._room(0)),
            lambda *tables: encode(*tables, ()),
            None,
            lambda *tables: decode(*tables, ()),
            varies=True,
        )

    def _room(self, n: int) -> tuple[Part, ...]:
        """Return the most that the payload of ``n`` elements takes."""
        check_countable(self.label(), n)
        blocks = -(-n // BLOCK)
        return (
            *(Part(name, "uint8", blocks) for name in ("tops", "widths")),
            Part("counts", "uint16", blocks),
            Part("codes", "uint8", blocks * BLOCK),
            *(Part(name, "uint8", n) for name in ("spares", "mantissas")),
            *([Part("rests", "uint16", n)] if self.dtype == "fp32" else []),
        )

    def warm_up(self, ctx: Context) -> None:
        """Compile the kernels."""
        precompile(self, ctx)

    def _decode(self, payload: Payload, out: Array, add: bool) -> None:
        from ringlet.compressors.kernels.cpu.dense.lossless import decoder

        exact = self.dtype == "fp32"
        places, apart = self._checked(payload, out.size)
        kernel, rests = decoder(exact, add), payload.get("rests", _NO_RESTS)

        def decode(start: int, stop: int) -> None:
            first, last = start // BLOCK, -(-stop // BLOCK)
            kernel(
                payload["tops"][first:last], payload["widths"][first:last],
                places[first : last + 1], apart[first : last + 1], payload["codes"],
                payload["spares"], payload["mantissas"][start:stop], rests[start:stop],
                out[start:stop],
            )  # fmt: skip

        run_ranges(out.size, BLOCK, decode)

    def _encode_on_device(self, x: Array, ctx: Context) -> Payload | None:
        """Encode with CUDA kernels, waiting once for the sizes; None if there are none."""
        from ringlet.compressors.kernels.cuda.dense import lossless as cuda

        device = device_for(ctx)
        if device is None:
            return None
        exact = self.dtype == "fp32"
        return cuda.encode(device, [x], exact, ctx.workspace.array, ctx.xp.empty)[0]

    def _decode_on_device(self, payload: Payload, out: Array, ctx: Context, add: bool) -> bool:
        """Decode with CUDA kernels, which wait for nothing; False if there are none."""
        from ringlet.compressors.kernels.cuda.dense import lossless as cuda

        device = device_for(ctx)
        if device is None:
            return False
        self._check_sizes(payload, out.size)
        coded = cuda.Coded(out, dict(payload))
        cuda.decode(device, [coded], self.dtype == "fp32", add, ctx.workspace.array)
        return True

    def _check_sizes(self, payload: Payload, n: int) -> None:
        """Raise PayloadError where arrays are other than ``n`` elements have."""
        check_countable(self.label(), n)
        blocks = -(-n // BLOCK)
        layout = [
            Part("tops", "uint8", blocks),
            Part("widths", "uint8", blocks),
            Part("counts", "uint16", blocks),
            Part("mantissas", "uint8", n),
        ]
        # How many there are of these, widths and counts tell.
        layout += [Part(name, "uint8", payload[name].size) for name in _VARYING if name in payload]
        layout += [Part("rests", "uint16", n)] if self.dtype == "fp32" else []
        check_parts(self.label, layout, payload)
        if missing := [name for name in _VARYING if name not in payload]:
            raise PayloadError(f"{self.label()}: the payload lacks {missing}")

    def _checked(self, payload: Payload, n: int) -> tuple[Array, Array]:
        """Return where blocks' codes and spares begin; PayloadError where sizes disagree."""
        self._check_sizes(payload, n)
        if not np.isin(payload["widths"], list(WIDTHS)).all():
            raise PayloadError(f"lossless received widths that do not fit {n} elements")
        places, apart = begins(np, payload["widths"], LANES), begins(np, payload["counts"], 1)
        if places[-1] != payload["codes"].size or apart[-1] != payload["spares"].size:
            raise PayloadError("lossless received fewer or more codes than its blocks have")
        return places, apart


_VARYING = ("codes", "spares")
_NO_RESTS: Array = np.empty(0, np.uint16)
