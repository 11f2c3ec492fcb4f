"""Packing of small codes into bytes, such as int4's nibbles, in array code; kernels do it too."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringlet.compressors.core.context import Array


def packed_size(n: int, bits: int) -> int:
    """Return the bytes that n codes of ``bits`` bits take."""
    return (n * bits + 7) // 8


def pack_bits(xp: Any, codes: Array, bits: int) -> Array:
    """Pack uint8 ``codes`` below 2**bits, least significant bits first; the tail is zero."""
    if bits == 8:
        return codes
    places = xp.arange(bits, dtype="uint8")
    stream = ((codes[:, None] >> places) & 1).astype("uint8").reshape(-1)
    packed: Array = xp.packbits(stream, bitorder="little")
    return packed


def unpack_bits(xp: Any, packed: Array, bits: int, n: int) -> Array:
    """Return the n codes (uint8) that ``pack_bits`` packed."""
    if bits == 8:
        return packed[:n]
    stream = xp.unpackbits(packed, bitorder="little")[: n * bits].reshape(n, bits)
    weights = (1 << xp.arange(bits)).astype("uint8")
    codes: Array = (stream * weights).sum(axis=1).astype("uint8")
    return codes


def blanked(xp: Any, codes: Array, finite: Array, width: int) -> Array:
    """Zero the bytes of buckets that are not ``finite``, as the kernels do, tail bits included.

    A bucket has ``width`` bytes.
    """
    kept: Array = xp.where(finite.repeat(width)[: codes.size], codes, np.uint8(0))
    return kept
