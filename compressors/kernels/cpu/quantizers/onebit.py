"""One bit per entry: find a bucket's scale, take signs, pack them, and keep what was lost.

Kernels are made for one combination of scale (mean magnitude, or given) and feedback each.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from ringlet.compressors.kernels.cpu.common.intrinsics import (
    bf16_to_f32,
    bits_f32,
    f32_bits,
    is_finite,
)
from ringlet.compressors.kernels.cpu.common.ordered_sums import LANES, fold
from ringlet.compressors.kernels.cpu.common.rng import squares
from ringlet.compressors.kernels.cpu.common.target import target_at
from ringlet.ring.jit import jit

_NAN = 0x7FC0
_SIGN = 0x80000000
# Multiplied with eight bytes of 0 or 1, this gathers them in the highest byte, first in bit 0.
_GATHER = 0x0102040810204080


@njit(inline="always")
def nearest_bf16(value: Any) -> Any:
    """Round a finite, non-negative float32 to bfloat16, at most to the largest finite one."""
    bits = f32_bits(value)
    odd = (bits >> types.uint32(16)) & types.uint32(1)
    return types.uint16(
        min((bits + types.uint32(0x7FFF) + odd) >> types.uint32(16), types.uint32(0x7F7F))
    )


@njit(nogil=True)
def _total(values: Any, held: Any, decay: Any, feedback: bool) -> Any:
    # Sums side by side let the compiler use vectors, in an order that array code can repeat.
    sums = np.zeros(LANES, np.float64)
    for start in range(0, values.size, LANES):
        block = values[start : start + LANES]
        kept = held[start : start + LANES] if feedback else held
        for i in range(block.size):
            sums[i] += types.float64(abs(target_at(block, kept, decay, i, feedback)))
    return fold(sums)


@njit(nogil=True)
def _extremes(values: Any, held: Any, decay: Any, feedback: bool) -> Any:
    """Return the bits of the smallest and the largest magnitude, as ``largest_bits`` does."""
    least, top = types.uint32(0x7FFFFFFF), types.uint32(0)
    for i in range(values.size):
        magnitude = f32_bits(target_at(values, held, decay, i, feedback)) & types.uint32(0x7FFFFFFF)
        least, top = min(least, magnitude), max(top, magnitude)
    return least, top


@njit(nogil=True)
def _signs(values: Any, held: Any, decay: Any, scale: Any, flags: Any, feedback: bool) -> None:
    for i in range(values.size):
        value = target_at(values, held, decay, i, feedback)
        negative = value < types.float32(0.0)
        flags[i] = types.uint8(negative)
        if feedback:
            lost = value + scale if negative else value - scale
            held[i] = lost if is_finite(lost) else held[i]


@njit(nogil=True)
def _signs_drawn(
    values: Any, held: Any, decay: Any, scale: Any, key: Any, start: Any, flags: Any, feedback: bool
) -> None:
    """Do the same, and draw the signs of zeros: a number for each eight elements."""
    first = types.uint64(start) >> types.uint64(3)
    for j in range((values.size + 7) // 8):
        drawn = squares(key, first + types.uint64(j)) >> types.uint32(24)
        for i in range(8):
            flags[8 * j + i] = types.uint8((drawn >> types.uint32(i)) & types.uint32(1))
    for i in range(values.size):
        value = target_at(values, held, decay, i, feedback)
        zero = types.uint8(value == types.float32(0.0)) & flags[i]
        flags[i] = types.uint8(value < types.float32(0.0)) | zero
        if feedback:
            lost = value + scale if flags[i] else value - scale
            held[i] = lost if is_finite(lost) else held[i]


@cache
def encoder(given: bool, feedback: bool) -> Any:
    """Return the kernel ``encode(x, residual, decay, bucket, parameter, key, start, codes,
    scales)``; ``given``: the scale is ``parameter``, not the mean magnitude.
    """

    @jit
    def encode(
        x: Any, residual: Any, decay: Any, bucket: Any, parameter: Any, key: Any, start: Any,
        codes: Any, scales: Any,
    ) -> None:  # fmt: skip
        flags = np.zeros(bucket, np.uint8)
        width = bucket // 8
        for b in range(scales.size):
            values = x[b * bucket : (b + 1) * bucket]
            held = residual[b * bucket : (b + 1) * bucket] if feedback else residual
            out = codes[b * width : b * width + (values.size + 7) // 8]
            least, top = _extremes(values, held, decay, feedback)
            if given:
                extent = types.float64(bits_f32(top))
            else:
                extent = _total(values, held, decay, feedback)
            if not np.isfinite(extent):  # the bucket decodes to NaN: overflow must not be hidden
                scales[b] = types.uint16(_NAN)
                out[:] = 0
                continue
            mean = types.float32(parameter if given else extent / values.size)
            scales[b] = nearest_bf16(mean)
            scale, first = bf16_to_f32(scales[b]), start + b * bucket
            if least == types.uint32(0):  # seldom, and it takes twice as long
                _signs_drawn(values, held, decay, scale, key, first, flags, feedback)
            else:
                _signs(values, held, decay, scale, flags, feedback)
            for i in range(values.size, out.size * 8):
                flags[i] = 0
            words = flags.view(np.uint64)
            for j in range(out.size):
                out[j] = types.uint8((words[j] * types.uint64(_GATHER)) >> types.uint64(56))

    return encode


@njit(nogil=True)
def _write(codes: Any, scale: Any, target: Any, add: bool) -> None:
    positive = f32_bits(scale)
    full = target.size // 8
    for j in range(full):
        byte = types.uint32(codes[j])
        for i in range(8):
            sign = (byte << types.uint32(31 - i)) & types.uint32(_SIGN)
            value = bits_f32(positive | sign)
            target[8 * j + i] = target[8 * j + i] + value if add else value
    for i in range(8 * full, target.size):
        sign = (types.uint32(codes[full]) << types.uint32(31 - i % 8)) & types.uint32(_SIGN)
        value = bits_f32(positive | sign)
        target[i] = target[i] + value if add else value


@jit
def decode(codes: Any, scales: Any, bucket: Any, add: Any, out: Any) -> None:
    """Put signs to their bucket's scale; ``add`` accumulates."""
    width = bucket // 8
    for b in range(scales.size):
        target = out[b * bucket : (b + 1) * bucket]
        _write(codes[b * width : (b + 1) * width], bf16_to_f32(scales[b]), target, add)


@jit
def vote(sums: Any, scale: Any, turn: Any) -> None:
    """Replace sums of votes by their sign times ``scale``; ties are of either sign by turns.

    That of element i is negative where ``turn`` + i is odd.
    """
    for i in range(sums.size):
        odd = (turn + i) & 1 != 0
        negative = sums[i] < types.float32(0) or (odd and sums[i] == types.float32(0))
        sums[i] = sums[i] if np.isnan(sums[i]) else (-scale if negative else scale)


__all__ = ["decode", "encoder", "nearest_bf16", "vote"]
