"""Packing of small codes into bytes, least significant bits first: of int4 two nibbles each.

Code i of b bits occupies bits i*b .. i*b+b-1 of the stream; bits behind the last code are zero.
Eight codes fill exactly b bytes, so ranges that start at a multiple of 8 pack independently.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types

from ringlet.ring.jit import jit


@jit
def pack(codes: Any, bits: int, out: Any) -> None:
    """Pack ``codes`` (uint8, each below 2**bits) into ``out`` (uint8, ceil(n * bits / 8))."""
    full = codes.size // 8
    if bits == 4:
        for j in range(full * 4):
            out[j] = codes[2 * j] | (codes[2 * j + 1] << types.uint8(4))
    elif bits == 2:
        for j in range(full * 2):
            low = codes[4 * j] | (codes[4 * j + 1] << types.uint8(2))
            out[j] = (
                low | (codes[4 * j + 2] << types.uint8(4)) | (codes[4 * j + 3] << types.uint8(6))
            )
    elif bits == 6:
        for j in range(full * 2):
            b, c = codes[4 * j + 1], codes[4 * j + 2]
            out[3 * j] = codes[4 * j] | (b << types.uint8(6))
            out[3 * j + 1] = (b >> types.uint8(2)) | (c << types.uint8(4))
            out[3 * j + 2] = (c >> types.uint8(4)) | (codes[4 * j + 3] << types.uint8(2))
    elif bits == 8:
        for j in range(full * 8):
            out[j] = codes[j]
    else:
        _pack_groups(codes, bits, full, out)
    word = types.uint64(0)
    left = codes.size - full * 8
    for j in range(left):
        word |= types.uint64(codes[full * 8 + j]) << types.uint64(j * bits)
    for j in range((left * bits + 7) // 8):
        out[full * bits + j] = types.uint8(word >> types.uint64(8 * j))


@njit(nogil=True)
def _pack_groups(codes: Any, bits: int, full: int, out: Any) -> None:
    for group in range(full):
        word = types.uint64(0)
        for j in range(8):
            word |= types.uint64(codes[group * 8 + j]) << types.uint64(j * bits)
        for j in range(bits):
            out[group * bits + j] = types.uint8(word >> types.uint64(8 * j))


@jit
def unpack(packed: Any, bits: int, out: Any) -> None:
    """Unpack ``out.size`` codes of ``bits`` bits from ``packed`` (uint8) into ``out`` (uint8)."""
    mask = types.uint64((1 << bits) - 1)
    full = out.size // 8
    if bits == 4:
        for j in range(full * 4):
            out[2 * j] = packed[j] & types.uint8(15)
            out[2 * j + 1] = packed[j] >> types.uint8(4)
    elif bits == 2:
        for j in range(full * 2):
            out[4 * j] = packed[j] & types.uint8(3)
            out[4 * j + 1] = (packed[j] >> types.uint8(2)) & types.uint8(3)
            out[4 * j + 2] = (packed[j] >> types.uint8(4)) & types.uint8(3)
            out[4 * j + 3] = packed[j] >> types.uint8(6)
    elif bits == 6:
        low = types.uint8(63)
        for j in range(full * 2):
            a, b, c = packed[3 * j], packed[3 * j + 1], packed[3 * j + 2]
            out[4 * j] = a & low
            out[4 * j + 1] = ((a >> types.uint8(6)) | (b << types.uint8(2))) & low
            out[4 * j + 2] = ((b >> types.uint8(4)) | (c << types.uint8(4))) & low
            out[4 * j + 3] = c >> types.uint8(2)
    elif bits == 8:
        for j in range(full * 8):
            out[j] = packed[j]
    else:
        _unpack_groups(packed, bits, full, out)
    word = types.uint64(0)
    left = out.size - full * 8
    for j in range((left * bits + 7) // 8):
        word |= types.uint64(packed[full * bits + j]) << types.uint64(8 * j)
    for j in range(left):
        out[full * 8 + j] = types.uint8((word >> types.uint64(j * bits)) & mask)


@njit(nogil=True)
def _unpack_groups(packed: Any, bits: int, full: int, out: Any) -> None:
    mask = types.uint64((1 << bits) - 1)
    for group in range(full):
        word = types.uint64(0)
        for j in range(bits):
            word |= types.uint64(packed[group * bits + j]) << types.uint64(8 * j)
        for j in range(8):
            out[group * 8 + j] = types.uint8((word >> types.uint64(j * bits)) & mask)
