"""Exponents of floats in few bits per block; a block's codes are packed side by side.

A block's 512 codes of w bits are 8 rows of 64; the rows' bits follow one another in 64 streams of
w bytes, so that packing works on 64 elements at once.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, njit, types

from ringlet.compressors.kernels.cpu.common.intrinsics import (
    bits_f32,
    f32_bits,
    f32_to_bf16,
    pointer,
)
from ringlet.ring.jit import jit

BLOCK = 512
_LANES = 64


@njit(inline="always")
def _half(value: Any, exact: Any) -> Any:
    """Return the upper 16 bits of a float32 (uint16): as they are, or rounded to bfloat16."""
    return types.uint16(f32_bits(value) >> types.uint32(16)) if exact else f32_to_bf16(value)


@cache
def surveyor(exact: bool) -> Any:
    """Return the kernel ``survey(x, tops, widths, counts)``: what each block's codes will be.

    A block's largest exponent, the bits of a code, and how many exponents are too small for one.
    """

    @jit
    def survey(x: Any, tops: Any, widths: Any, counts: Any) -> None:
        distances = np.empty(BLOCK, np.uint8)
        for b in range(tops.size):
            values = x[b * BLOCK : (b + 1) * BLOCK]
            near = distances[: values.size]
            top = types.uint8(0)
            for i in range(values.size):
                near[i] = types.uint8(_half(values[i], exact) >> types.uint16(7))
                top = max(top, near[i])
            c0 = c1 = c2 = c3 = c4 = types.int32(0)
            for i in range(values.size):
                d = types.uint8(top - near[i])
                c0 += types.int32(d > types.uint8(0))
                c1 += types.int32(d >= types.uint8(3))
                c2 += types.int32(d >= types.uint8(7))
                c3 += types.int32(d >= types.uint8(15))
                c4 += types.int32(d >= types.uint8(31))
            width, count, least = 8, types.int32(0), 8 * BLOCK
            if c0 == 0:
                width, least = 0, 0
            if 2 * BLOCK + 8 * c1 < least:
                width, count, least = 2, c1, 2 * BLOCK + 8 * c1
            if 3 * BLOCK + 8 * c2 < least:
                width, count, least = 3, c2, 3 * BLOCK + 8 * c2
            if 4 * BLOCK + 8 * c3 < least:
                width, count, least = 4, c3, 4 * BLOCK + 8 * c3
            if 5 * BLOCK + 8 * c4 < least:
                width, count = 5, c4
            tops[b], widths[b], counts[b] = top, width, count

    return survey


@cache
def encoder(exact: bool) -> Any:
    """Return the kernel ``encode(x, tops, widths, places, spare_places, codes, spares, mantissas,
    rests)``; places are where a block's codes and spares begin, ``rests`` is unused unless exact.
    """

    @jit
    def encode(
        x: Any, tops: Any, widths: Any, places: Any, spare_places: Any, codes: Any, spares: Any,
        mantissas: Any, rests: Any,
    ) -> None:  # fmt: skip
        distances = np.zeros(BLOCK, np.uint8)
        for b in range(tops.size):
            values = x[b * BLOCK : (b + 1) * BLOCK]
            kept = mantissas[b * BLOCK : (b + 1) * BLOCK]
            top, width = tops[b], types.int64(widths[b])
            limit = types.uint8((1 << width) - 1)
            distances[:] = 0
            for i in range(values.size):
                half = _half(values[i], exact)
                distances[i] = top - types.uint8(half >> types.uint16(7))
                kept[i] = types.uint8(
                    ((half >> types.uint16(8)) & types.uint16(0x80)) | (half & types.uint16(0x7F))
                )
            if exact:
                rest = rests[b * BLOCK : (b + 1) * BLOCK]
                for i in range(values.size):
                    rest[i] = types.uint16(f32_bits(values[i]) & types.uint32(0xFFFF))
            at, end = spare_places[b], spare_places[b + 1]
            if at < end:
                for i in range(values.size):
                    if distances[i] >= limit:
                        spares[at] = top - distances[i]
                        at += 1
            if width > 0:
                for i in range(BLOCK):
                    distances[i] = min(distances[i], limit)
                _pack(distances, width, codes[places[b] : places[b + 1]])

    return encode


@cache
def decoder(exact: bool, add: bool) -> Any:
    """Return the kernel ``decode(tops, widths, places, spare_places, codes, spares, mantissas,
    rests, out)``, the inverse of ``encode``; ``add`` accumulates.
    """

    @jit
    def decode(
        tops: Any, widths: Any, places: Any, spare_places: Any, codes: Any, spares: Any,
        mantissas: Any, rests: Any, out: Any,
    ) -> None:  # fmt: skip
        exponents = np.empty(BLOCK, np.uint8)
        for b in range(tops.size):
            target = out[b * BLOCK : (b + 1) * BLOCK]
            kept = mantissas[b * BLOCK : (b + 1) * BLOCK]
            rest = rests[b * BLOCK : (b + 1) * BLOCK] if exact else rests
            top, width = tops[b], types.int64(widths[b])
            _unpack(codes[places[b] : places[b + 1]], width, exponents)
            at, end = spare_places[b], spare_places[b + 1]
            limit = types.uint8((1 << width) - 1)
            if at < end:
                for i in range(target.size):
                    if exponents[i] == limit and at < end:
                        exponents[i] = top - spares[at]
                        at += 1
            for i in range(target.size):
                mantissa = types.uint32(kept[i])
                bits = (types.uint32(types.uint8(top - exponents[i])) << types.uint32(23)) | (
                    (mantissa & types.uint32(0x80)) << types.uint32(24)
                    | (mantissa & types.uint32(0x7F)) << types.uint32(16)
                )
                if exact:
                    bits |= types.uint32(rest[i])
                if add:
                    target[i] += bits_f32(bits)
                else:
                    target[i] = bits_f32(bits)

    return decode


@cache
def encode_placed(exact: bool) -> Any:
    """Return what codes one of many tensors, for ``common.batched.batch_encoder``; no options.

    A payload's row tells of tops, widths, counts, codes, spares, mantissas, and of rests if exact.
    """
    survey, encode = surveyor(exact), encoder(exact)

    @njit(nogil=True)
    def encode_one(
        x: Any, residual: Any, decay: Any, key: Any, start: Any, row: Any, options: Any
    ) -> None:
        n, blocks = x.size, (x.size + BLOCK - 1) // BLOCK
        tops = carray(pointer(row[1]), blocks, np.uint8)
        widths = carray(pointer(row[3]), blocks, np.uint8)
        counts = carray(pointer(row[5]), blocks, np.uint16)
        survey(x, tops, widths, counts)
        places, apart = _begins(widths, _LANES), _begins(counts, 1)
        codes = carray(pointer(row[7]), places[blocks], np.uint8)
        spares = carray(pointer(row[9]), apart[blocks], np.uint8)
        mantissas = carray(pointer(row[11]), n, np.uint8)
        rests = carray(pointer(row[13 if exact else 11]), n if exact else 0, np.uint16)
        encode(x, tops, widths, places, apart, codes, spares, mantissas, rests)
        row[2] = row[4] = row[6] = types.uint64(blocks)
        row[8], row[10] = types.uint64(codes.size), types.uint64(spares.size)
        row[12] = types.uint64(n)
        if exact:
            row[14] = types.uint64(n)

    return encode_one


@cache
def decode_placed(exact: bool) -> Any:
    """Return what decodes one, for ``common.batched.batch_decoder``; False if it makes no sense."""
    write, add_to = decoder(exact, False), decoder(exact, True)

    @njit(nogil=True)
    def decode_one(row: Any, add: bool, out: Any, options: Any) -> Any:
        n, blocks = out.size, (out.size + BLOCK - 1) // BLOCK
        for column in (2, 4, 6):
            if row[column] != blocks:
                return False
        if row[12] != n or (exact and row[14] != n):
            return False
        tops = carray(pointer(row[1]), blocks, np.uint8)
        widths = carray(pointer(row[3]), blocks, np.uint8)
        for b in range(blocks):
            if widths[b] > 8 or widths[b] == 1 or widths[b] == 6 or widths[b] == 7:
                return False
        places = _begins(widths, _LANES)
        apart = _begins(carray(pointer(row[5]), blocks, np.uint16), 1)
        if places[blocks] != row[8] or apart[blocks] != row[10]:
            return False
        codes = carray(pointer(row[7]), places[blocks], np.uint8)
        spares = carray(pointer(row[9]), apart[blocks], np.uint8)
        mantissas = carray(pointer(row[11]), n, np.uint8)
        rests = carray(pointer(row[13 if exact else 11]), n if exact else 0, np.uint16)
        if add:
            add_to(tops, widths, places, apart, codes, spares, mantissas, rests, out)
        else:
            write(tops, widths, places, apart, codes, spares, mantissas, rests, out)
        return True

    return decode_one


@njit(nogil=True)
def _begins(sizes: Any, unit: int) -> Any:
    """Return where each of several pieces begins, and the end of the last."""
    begins = np.zeros(sizes.size + 1, np.int64)
    for b in range(sizes.size):
        begins[b + 1] = begins[b] + types.int64(sizes[b]) * unit
    return begins


@jit
def _pack(values: Any, width: int, out: Any) -> None:
    out[:] = 0
    for row in range(8):
        byte, shift = row * width // 8, types.uint8(row * width % 8)
        source = values[row * _LANES : (row + 1) * _LANES]
        target = out[byte * _LANES : (byte + 1) * _LANES]
        for i in range(_LANES):
            target[i] |= source[i] << shift
        if shift + width > 8:
            target = out[(byte + 1) * _LANES : (byte + 2) * _LANES]
            back = types.uint8(8) - shift
            for i in range(_LANES):
                target[i] |= source[i] >> back


@jit
def _unpack(packed: Any, width: int, out: Any) -> None:
    mask = types.uint8((1 << width) - 1)
    if width == 0:
        out[:] = 0
        return
    for row in range(8):
        byte, shift = row * width // 8, types.uint8(row * width % 8)
        source = packed[byte * _LANES : (byte + 1) * _LANES]
        target = out[row * _LANES : (row + 1) * _LANES]
        for i in range(_LANES):
            target[i] = source[i] >> shift
        if shift + width > 8:
            source = packed[(byte + 1) * _LANES : (byte + 2) * _LANES]
            back = types.uint8(8) - shift
            for i in range(_LANES):
                target[i] |= source[i] << back
        for i in range(_LANES):
            target[i] &= mask
