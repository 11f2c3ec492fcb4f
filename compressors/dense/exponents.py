"""Exponents of floats in few bits per block, in array code, for lossless coding."""

from __future__ import annotations

from typing import Any

from ringlet.compressors.base.contract import Payload
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.dense.casts import BF16

BLOCK, LANES = 512, 64
WIDTHS = {0: 0, 2: 3, 3: 7, 4: 15, 5: 31, 8: 255}  # bits of a code: the first distance too large


def encode(x: Array, exact: bool, ctx: Context) -> Payload:
    """Return the payload of ``x``: of float32 if ``exact``, else rounded to bfloat16."""
    xp, n, bits = ctx.xp, x.size, x.view("uint32")
    high = (bits >> 16).astype("uint16") if exact else BF16().compress(x, ctx)["values"]
    blocks = -(-n // BLOCK)
    exponents = xp.zeros((blocks, BLOCK), "uint8")
    exponents.reshape(-1)[:n] = (high >> 7).astype("uint8")
    tops = exponents.max(axis=1)
    # What the last block is filled up with lies at no distance.
    exponents.reshape(-1)[n:] = tops[-1] if n else 0
    far = tops[:, None] - exponents
    cost = xp.full(blocks, 8 * BLOCK)
    cost[~far.any(axis=1)] = 0
    widths, counts = xp.where(cost == 0, 0, 8), xp.zeros(blocks, "int64")
    for width in (2, 3, 4, 5):
        apart = (far >= WIDTHS[width]).sum(axis=1)
        better = width * BLOCK + 8 * apart < cost
        cost = xp.where(better, width * BLOCK + 8 * apart, cost)
        widths, counts = xp.where(better, width, widths), xp.where(better, apart, counts)
    places = begins(xp, widths, LANES)
    codes = xp.zeros(int(places[-1]), "uint8")
    limits = ((1 << widths) - 1).astype("uint8")[:, None]
    for width in WIDTHS:
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


def decode(payload: Payload, out: Array, xp: Any) -> None:
    """Fill ``out`` (float32) with what ``payload`` encodes."""
    n = out.size
    widths, tops = payload["widths"].astype("int64"), payload["tops"]
    places, blocks = begins(xp, widths, LANES), widths.size
    far = xp.zeros((blocks, BLOCK), "uint8")
    for width in WIDTHS:
        chosen = xp.flatnonzero(widths == width)
        at = places[chosen][:, None] + xp.arange(width * LANES)
        far[chosen] = _unpack(xp, payload["codes"][at], width)
    spare = (far == ((1 << widths) - 1).astype("uint8")[:, None]) & (payload["counts"] > 0)[:, None]
    exponents = tops[:, None] - far
    exponents[spare] = payload["spares"]
    bits = exponents.reshape(-1)[:n].astype("uint32") << 23
    mantissas = payload["mantissas"].astype("uint32")
    bits |= (mantissas & 0x80) << 24 | (mantissas & 0x7F) << 16
    if "rests" in payload:
        bits |= payload["rests"]
    out[...] = bits.view("float32")


def begins(xp: Any, sizes: Array, unit: int) -> Array:
    """Return where each of several pieces begins, and the end of the last."""
    begins: Array = xp.zeros(sizes.size + 1, "int64")
    begins[1:] = xp.cumsum(sizes.astype("int64") * unit)
    return begins


def _pack(xp: Any, values: Array, width: int) -> Array:
    """Pack rows of 512 codes into 64 streams of ``width`` bytes each, side by side."""
    rows = values.reshape(len(values), 8, LANES).astype("uint16")
    packed = xp.zeros((len(rows), width + 1, LANES), "uint16")
    for row in range(8):
        byte, shift = divmod(row * width, 8)
        packed[:, byte] |= rows[:, row] << shift
        if byte < width:
            packed[:, byte + 1] |= (rows[:, row] << shift) >> 8
    flat: Array = packed[:, :width].astype("uint8").reshape(len(rows), width * LANES)
    return flat


def _unpack(xp: Any, packed: Array, width: int) -> Array:
    """Return the rows of 512 codes that ``_pack`` packed."""
    streams = xp.zeros((len(packed), width + 2, LANES), "uint16")
    streams[:, :width] = packed.reshape(len(packed), width, LANES)
    rows = xp.zeros((len(packed), 8, LANES), "uint8")
    for row in range(8):
        byte, shift = divmod(row * width, 8)
        word = streams[:, byte] | streams[:, byte + 1] << 8
        rows[:, row] = ((word >> shift) & ((1 << width) - 1)).astype("uint8")
    flat: Array = rows.reshape(len(packed), BLOCK)
    return flat
