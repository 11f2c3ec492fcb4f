"""Ternary codes: clip at a multiple of the root mean square, keep a sign with probability |x|/s."""

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
from ringlet.compressors.kernels.cpu.common.packing import pack
from ringlet.compressors.kernels.cpu.common.rng import uniform
from ringlet.compressors.kernels.cpu.common.target import largest_bits, target_at
from ringlet.compressors.kernels.cpu.quantizers import quantize
from ringlet.ring.jit import jit

_NAN = 0x7FC0


@njit(nogil=True)
def _extent(values: Any, held: Any, decay: Any, feedback: bool) -> Any:
    top = largest_bits(values, held, decay, feedback)
    sums = np.zeros(LANES, np.float64)
    for start in range(0, values.size, LANES):
        block = values[start : start + LANES]
        kept = held[start : start + LANES] if feedback else held
        for i in range(block.size):
            wide = types.float64(target_at(block, kept, decay, i, feedback))
            sums[i] += wide * wide
    return bits_f32(top), fold(sums)


@njit(nogil=True)
def _draw(
    values: Any,
    held: Any,
    decay: Any,
    scale: Any,
    key: Any,
    start: Any,
    target: Any,
    feedback: bool,
) -> None:
    for i in range(values.size):
        value = target_at(values, held, decay, i, feedback)
        bits = f32_bits(value)
        magnitude = bits_f32(bits & types.uint32(0x7FFFFFFF))
        # Multiplied, not divided: a tiny scale has no inverse.
        kept = uniform(key, types.uint64(start + i)) * scale < magnitude
        side = types.int32(2) - (types.int32(bits >> types.uint32(31)) << types.int32(1))
        code = types.int32(side if kept else types.int32(1))
        target[i] = types.uint8(code)
        if feedback:
            held[i] = value - types.float32(code - types.int32(1)) * scale


@cache
def encoder(feedback: bool) -> Any:
    """Return the kernel ``encode(x, residual, decay, bucket, parameter, key, start, codes,
    scales)``; ``parameter`` is the clipping factor.
    """

    @jit
    def encode(
        x: Any, residual: Any, decay: Any, bucket: Any, parameter: Any, key: Any, start: Any,
        codes: Any, scales: Any,
    ) -> None:  # fmt: skip
        scratch = np.empty(bucket, np.uint8)
        width = bucket // 4
        for b in range(scales.size):
            values = x[b * bucket : (b + 1) * bucket]
            held = residual[b * bucket : (b + 1) * bucket] if feedback else residual
            out = codes[b * width : (b + 1) * width]
            largest, energy = _extent(values, held, decay, feedback)
            if not is_finite(largest):  # the bucket decodes to NaN: overflow must not be hidden
                scales[b] = types.uint16(_NAN)
                out[:] = 0
                continue
            # Compared in double precision: the product may exceed float32.
            limit = parameter * np.sqrt(energy / values.size)
            top = min(types.float64(largest), limit)
            scales[b] = quantize.round_up_bf16(types.float32(top))
            target = scratch[: values.size]
            counter = start + b * bucket
            _draw(values, held, decay, bf16_to_f32(scales[b]), key, counter, target, feedback)
            pack(target, 2, out)

    return encode


@cache
def decoder() -> Any:
    """Return the kernel ``decode(codes, scales, bucket, add, out)``; ``add`` accumulates."""
    levels = quantize.decoder(quantize.Scheme.MAX)  # ternary codes are levels at equal distances

    @jit
    def decode(codes: Any, scales: Any, bucket: Any, add: Any, out: Any) -> None:
        no_lows, scratch = np.empty(0, np.float32), np.empty(bucket, np.uint8)
        levels(codes, scales, no_lows, 2, bucket, add, scratch, out)

    return decode


__all__ = ["decoder", "encoder"]
