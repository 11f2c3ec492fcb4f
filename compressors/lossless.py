"""Lossless compression of floats by their exponents.

Gradients use few of the 256 exponents; cf. Hao et al., "NeuZip", arXiv:2410.20650, and Johnson,
"DietGPU", 2022, which code exponents by entropy. Fixed widths per block cost half a bit to a bit
more and need no tables.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringlet.compressors.casts import BF16
from ringlet.compressors.context import Array, Context
from ringlet.compressors.contract import Compressor, Payload, Traits, exercise
from ringlet.compressors.errors import PayloadError
from ringlet.compressors.options import option
from ringlet.compressors.pool import run_ranges
from ringlet.compressors.registry import register

_BLOCK, _LANES = 512, 64
_WIDTHS = {0: 0, 2: 3, 3: 7, 4: 15, 5: 31, 8: 255}  # bits of a code: the first distance too large


@register("lossless")
class Lossless(Compressor):
    """Send sign and mantissa as they are, exponents as distances from their block's largest.

    Per block of 512, a code has the 0, 2, 3, 4, 5 or 8 bits that cost least; exponents too small
    for one are sent apart. ``dtype="bf16"`` rounds to bfloat16 and is exact from there on: 0.70 of
    bfloat16's bytes for Gaussian values, 0.73 for Laplacian ones, 0.51 for zeros, at worst 1.01.
    ``dtype="fp32"`` keeps every bit: 0.85 and 0.86 of float32's bytes. NaN and Inf travel as any.
    """

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
        if ctx.xp is not np:
            found = self._encode_on_device(x, ctx)
            return self.compress_reference(x, ctx) if found is None else found
        from ringlet.compressors.kernels.lossless import encoder, surveyor

        exact, count = self.dtype == "fp32", -(-x.size // _BLOCK)
        tops, widths = np.empty(count, np.uint8), np.empty(count, np.uint8)
        counts = np.empty(count, np.uint16)
        survey, encode = surveyor(exact), encoder(exact)

        def surveyed(start: int, stop: int) -> None:
            at = slice(start // _BLOCK, -(-stop // _BLOCK))
            survey(x[start:stop], tops[at], widths[at], counts[at])

        run_ranges(x.size, _BLOCK, surveyed)
        places, apart = _begins(np, widths, _LANES), _begins(np, counts, 1)
        codes, spares = np.empty(int(places[-1]), np.uint8), np.empty(int(apart[-1]), np.uint8)
        mantissas, rests = np.empty(x.size, np.uint8), np.empty(x.size * exact, np.uint16)

        def encoded(start: int, stop: int) -> None:
            first, last = start // _BLOCK, -(-stop // _BLOCK)
            encode(
                x[start:stop], tops[first:last], widths[first:last], places[first : last + 1],
                apart[first : last + 1], codes, spares, mantissas[start:stop], rests[start:stop],
            )  # fmt: skip

        run_ranges(x.size, _BLOCK, encoded)
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
            self.decompress_reference(payload, out, ctx)

    def accumulate(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Decode and add in one pass."""
        if ctx.xp is np:
            self._decode(payload, out, add=True)
        elif not self._decode_on_device(payload, out, ctx, add=True):
            super().accumulate(payload, out, ctx)

    def warm_up(self, ctx: Context) -> None:
        """Compile the kernels."""
        exercise(self, ctx)

    def _decode(self, payload: Payload, out: Array, add: bool) -> None:
        from ringlet.compressors.kernels.lossless import decoder

        exact = self.dtype == "fp32"
        places, apart = self._checked(payload, out.size)
        kernel, rests = decoder(exact, add), payload.get("rests", _NO_RESTS)

        def decode(start: int, stop: int) -> None:
            first, last = start // _BLOCK, -(-stop // _BLOCK)
            kernel(
                payload["tops"][first:last], payload["widths"][first:last],
                places[first : last + 1], apart[first : last + 1], payload["codes"],
                payload["spares"], payload["mantissas"][start:stop], rests[start:stop],
                out[start:stop],
            )  # fmt: skip

        run_ranges(out.size, _BLOCK, decode)

    def _encode_on_device(self, x: Array, ctx: Context) -> Payload | None:
        """Encode with CUDA kernels, waiting once for the sizes; None if there are none."""
        from ringlet.compressors.kernels.cuda import lossless as cuda
        from ringlet.compressors.kernels.cuda.device import device_of

        device = device_of(ctx.xp)
        if device is None:
            return None
        exact = self.dtype == "fp32"
        return cuda.encode(device, [x], exact, ctx.workspace.array, ctx.xp.empty)[0]

    def _decode_on_device(self, payload: Payload, out: Array, ctx: Context, add: bool) -> bool:
        """Decode with CUDA kernels, which wait for nothing; False if there are none."""
        from ringlet.compressors.kernels.cuda import lossless as cuda
        from ringlet.compressors.kernels.cuda.device import device_of

        device = device_of(ctx.xp)
        if device is None:
            return False
        self._check_sizes(payload, out.size)
        coded = cuda.Coded(out, dict(payload))
        cuda.decode(device, [coded], self.dtype == "fp32", add, ctx.workspace.array)
        return True

    def _check_sizes(self, payload: Payload, n: int) -> None:
        """Raise PayloadError where arrays are of other sizes than ``n`` elements have."""
        blocks = -(-n // _BLOCK)
        sizes = {"tops": blocks, "widths": blocks, "counts": blocks, "mantissas": n}
        if self.dtype == "fp32":
            sizes["rests"] = n
        wrong = [name for name, size in sizes.items() if payload[name].size != size]
        if wrong:
            raise PayloadError(f"lossless received {wrong} that do not fit {n} elements")

    def _checked(self, payload: Payload, n: int) -> tuple[Array, Array]:
        """Return where blocks' codes and spares begin; PayloadError where sizes disagree."""
        self._check_sizes(payload, n)
        if not np.isin(payload["widths"], list(_WIDTHS)).all():
            raise PayloadError(f"lossless received widths that do not fit {n} elements")
        places, apart = _begins(np, payload["widths"], _LANES), _begins(np, payload["counts"], 1)
        if places[-1] != payload["codes"].size or apart[-1] != payload["spares"].size:
            raise PayloadError("lossless received fewer or more codes than its blocks have")
        return places, apart

    # -- array code: the kernels agree with it bit for bit ------------------------------------

    def compress_reference(self, x: Array, ctx: Context) -> Payload:
        """Code the exponents in array code."""
        xp, n, exact = ctx.xp, x.size, self.dtype == "fp32"
        bits = x.view("uint32")
        high = (bits >> 16).astype("uint16") if exact else BF16().compress(x, ctx)["values"]
        blocks = -(-n // _BLOCK)
        exponents = xp.zeros((blocks, _BLOCK), "uint8")
        exponents.reshape(-1)[:n] = (high >> 7).astype("uint8")
        tops = exponents.max(axis=1, initial=0)
        # What the last block is filled up with lies at no distance.
        exponents.reshape(-1)[n:] = tops[-1] if n else 0
        far = tops[:, None] - exponents
        cost = xp.full(blocks, 8 * _BLOCK)
        cost[~far.any(axis=1)] = 0
        widths, counts = xp.where(cost == 0, 0, 8), xp.zeros(blocks, "int64")
        for width in (2, 3, 4, 5):
            apart = (far >= _WIDTHS[width]).sum(axis=1)
            better = width * _BLOCK + 8 * apart < cost
            cost = xp.where(better, width * _BLOCK + 8 * apart, cost)
            widths, counts = xp.where(better, width, widths), xp.where(better, apart, counts)
        places = _begins(xp, widths, _LANES)
        codes = xp.zeros(int(places[-1]), "uint8")
        limits = ((1 << widths) - 1).astype("uint8")[:, None]
        for width in _WIDTHS:
            chosen = xp.flatnonzero(widths == width)
            packed = _pack(xp, xp.minimum(far[chosen], limits[chosen]), width)
            codes[places[chosen][:, None] + xp.arange(packed.shape[1])] = packed
        spare = (far >= limits) & (counts > 0)[:, None]
        payload = {
            "tops": tops.astype("uint8"),
            "widths": widths.astype("uint8"),
            "counts": counts.astype("uint16"),
            "codes": codes,
            "spares": exponents[spare],
            "mantissas": ((high >> 8) & 0x80 | high & 0x7F).astype("uint8"),
        }
        return payload | {"rests": (bits & 0xFFFF).astype("uint16")} if exact else payload

    def decompress_reference(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Decode in array code."""
        xp, n = ctx.xp, out.size
        widths, tops = payload["widths"].astype("int64"), payload["tops"]
        places, blocks = _begins(xp, widths, _LANES), widths.size
        far = xp.zeros((blocks, _BLOCK), "uint8")
        for width in _WIDTHS:
            chosen = xp.flatnonzero(widths == width)
            at = places[chosen][:, None] + xp.arange(width * _LANES)
            far[chosen] = _unpack(xp, payload["codes"][at], width)
        spare = (far == ((1 << widths) - 1).astype("uint8")[:, None]) & (payload["counts"] > 0)[
            :, None
        ]
        exponents = tops[:, None] - far
        exponents[spare] = payload["spares"]
        bits = exponents.reshape(-1)[:n].astype("uint32") << 23
        mantissas = payload["mantissas"].astype("uint32")
        bits |= (mantissas & 0x80) << 24 | (mantissas & 0x7F) << 16
        if "rests" in payload:
            bits |= payload["rests"]
        out[...] = bits.view("float32")


_NO_RESTS: Array = np.empty(0, np.uint16)


def _begins(xp: Any, sizes: Array, unit: int) -> Array:
    """Return where each of several pieces begins, and the end of the last."""
    begins: Array = xp.zeros(sizes.size + 1, "int64")
    begins[1:] = xp.cumsum(sizes.astype("int64") * unit)
    return begins


def _pack(xp: Any, values: Array, width: int) -> Array:
    """Pack rows of 512 codes into 64 streams of ``width`` bytes each, side by side."""
    rows = values.reshape(len(values), 8, _LANES).astype("uint16")
    packed = xp.zeros((len(rows), width + 1, _LANES), "uint16")
    for row in range(8):
        byte, shift = divmod(row * width, 8)
        packed[:, byte] |= rows[:, row] << shift
        if byte < width:
            packed[:, byte + 1] |= (rows[:, row] << shift) >> 8
    flat: Array = packed[:, :width].astype("uint8").reshape(len(rows), width * _LANES)
    return flat


def _unpack(xp: Any, packed: Array, width: int) -> Array:
    """Return the rows of 512 codes that ``_pack`` packed."""
    streams = xp.zeros((len(packed), width + 2, _LANES), "uint16")
    streams[:, :width] = packed.reshape(len(packed), width, _LANES)
    rows = xp.zeros((len(packed), 8, _LANES), "uint8")
    for row in range(8):
        byte, shift = divmod(row * width, 8)
        word = streams[:, byte] | streams[:, byte + 1] << 8
        rows[:, row] = ((word >> shift) & ((1 << width) - 1)).astype("uint8")
    flat: Array = rows.reshape(len(packed), _BLOCK)
    return flat
