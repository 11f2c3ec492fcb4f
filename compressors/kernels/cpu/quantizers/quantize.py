"""Bucketed quantisation to 1..8 bits: find the scale, round, pack, and keep what was lost.

A bucket of 128 to 1024 elements stays in the first-level cache between the pass that finds its
scale and the one that rounds, so memory is read once. Codes are unsigned and packed behind one
another (see ``bits``); scales are bfloat16, rounded up, so that no code leaves its range.

Kernels are made for one combination of ``Scheme``, rounding and feedback each; what does not
apply is compiled away.
"""

from __future__ import annotations

from enum import IntEnum
from functools import cache
from typing import Any

import numpy as np
from numba import carray, njit, types

from ringlet.compressors.kernels.cpu.common.intrinsics import (
    ROUNDER,
    bf16_to_f32,
    bits_f32,
    f32_bits,
    is_finite,
    pointer,
)
from ringlet.compressors.kernels.cpu.common.packing import pack, unpack
from ringlet.compressors.kernels.cpu.common.rng import uniform16
from ringlet.compressors.kernels.cpu.common.target import largest_bits, target_at
from ringlet.ring.jit import jit

# Below this a scale's inverse may overflow; such a bucket is sent as zeros.
TINY = 1.5e-36
_NAN = 0x7FC0


class Scheme(IntEnum):
    """What the scale of a bucket is made of."""

    MAX = 0  # the largest magnitude
    L2 = 1  # the Euclidean norm
    RANGE = 2  # the distance from the smallest to the largest value


@njit(inline="always")
def _magnitude(value: Any) -> Any:
    """Bits of |value|: they order like the magnitudes, with Inf and NaN on top."""
    return f32_bits(value) & types.uint32(0x7FFFFFFF)


@njit(inline="always")
def _ordered(value: Any) -> Any:
    """Return an int32 that orders as the float32 values do, for compilers to use vectors."""
    bits = types.int32(f32_bits(value))
    return bits ^ ((bits >> types.int32(31)) & types.int32(0x7FFFFFFF))


@njit(inline="always")
def _unordered(place: Any) -> Any:
    bits = place ^ ((place >> types.int32(31)) & types.int32(0x7FFFFFFF))
    return bits_f32(types.uint32(bits))


@njit(inline="always")
def round_up_bf16(value: Any) -> Any:
    """Round a finite, non-negative float32 up to bfloat16, at most to the largest finite one."""
    bits = (f32_bits(value) + types.uint32(0xFFFF)) >> types.uint32(16)
    return types.uint16(min(bits, types.uint32(0x7F7F)))


@njit(nogil=True)
def _norm(values: Any, held: Any, decay: Any, feedback: bool) -> Any:
    # In double precision squares of float32 neither overflow nor vanish. Eight sums side by side
    # let the compiler use vectors, in an order that array code can repeat.
    sums = np.zeros(8, np.float64)
    full = values.size // 8 * 8
    for i in range(0, full, 8):
        for j in range(8):
            value = types.float64(target_at(values, held, decay, i + j, feedback))
            sums[j] += value * value
    for i in range(full, values.size):
        value = types.float64(target_at(values, held, decay, i, feedback))
        sums[i - full] += value * value
    total = 0.0
    for j in range(8):
        total += sums[j]
    return types.float32(np.sqrt(total))


@njit(nogil=True)
def _range(values: Any, held: Any, decay: Any, feedback: bool) -> Any:
    """Return (smallest value, range), the range NaN or Inf where a value is."""
    low, high = types.int32(2147483647), types.int32(-2147483648)
    top = types.uint32(0)
    for i in range(values.size):
        value = target_at(values, held, decay, i, feedback)
        place = _ordered(value)
        low, high = min(low, place), max(high, place)
        top = max(top, _magnitude(value))
    first, last = _unordered(low), _unordered(high)
    return first, last - first if is_finite(bits_f32(top)) else bits_f32(top)


@njit(inline="always")
def _round(
    values: Any, held: Any, decay: Any, scale: Any, low: Any, zero: Any, highest: Any,
    key: Any, start: Any, target: Any, by_range: bool, stochastic: bool, feedback: bool,
) -> None:  # fmt: skip
    inverse = types.float32(1.0) / scale
    for i in range(values.size):
        value = target_at(values, held, decay, i, feedback)
        place = (value - low) * inverse if by_range else value * inverse
        if stochastic:
            drawn = (place + zero) + uniform16(key, types.uint64(start + i))
            code = types.float32(types.int32(min(drawn, highest)))
        else:
            code = (place + types.float32(ROUNDER)) - types.float32(ROUNDER) + zero
        target[i] = types.uint8(types.int32(code))
        if feedback:
            kept = (code - zero) * scale
            lost = value - (kept + low if by_range else kept)
            held[i] = lost if is_finite(lost) else held[i]  # the highest level may be Inf


@cache
def encoder(scheme: Scheme, stochastic: bool, feedback: bool) -> Any:
    """Return the kernel ``encode(x, residual, decay, bits, bucket, key, start, codes, scales, lows,
    scratch)``; ``residual`` is unused without feedback, ``lows`` without Scheme.RANGE.

    ``start`` is the counter of x[0] for random numbers; all slices begin at a bucket. ``scratch``
    has room for the codes of a bucket, unpacked.
    """
    by_norm, by_range = scheme == Scheme.L2, scheme == Scheme.RANGE

    @jit
    def encode(
        x: Any, residual: Any, decay: Any, bits: Any, bucket: Any, key: Any, start: Any,
        codes: Any, scales: Any, lows: Any, scratch: Any,
    ) -> None:  # fmt: skip
        levels = types.float32((1 << bits) - 1 if by_range else (1 << (bits - 1)) - 1)
        zero = types.float32(0.0) if by_range else levels
        highest = levels if by_range else types.float32(2.0) * levels
        width = bucket * bits // 8
        for b in range(scales.size):
            values = x[b * bucket : (b + 1) * bucket]
            held = residual[b * bucket : (b + 1) * bucket] if feedback else residual
            low = types.float32(0.0)
            if by_range:
                low, extent = _range(values, held, decay, feedback)
                lows[b] = low if is_finite(extent) else types.float32(0.0)
            elif by_norm:
                extent = _norm(values, held, decay, feedback)
            else:
                extent = bits_f32(largest_bits(values, held, decay, feedback))
            out = codes[b * width : (b + 1) * width]
            target = out if bits == 8 else scratch[: values.size]
            if not is_finite(extent):  # the bucket decodes to NaN: overflow must not be hidden
                scales[b] = types.uint16(_NAN)
                out[:] = 0
                continue
            if extent >= types.float32(TINY):
                scales[b] = round_up_bf16(extent / levels)
                scale, at = bf16_to_f32(scales[b]), start + b * bucket
                _round(
                    values, held, decay, scale, low, zero, highest, key, at, target,
                    by_range, stochastic, feedback,
                )  # fmt: skip
            else:
                scales[b] = types.uint16(0)
                target[:] = types.uint8(zero)
                if feedback:
                    for i in range(values.size):
                        held[i] = values[i] + decay * held[i] - low
            if bits != 8:
                pack(target, bits, out)

    return encode


@cache
def placed_encoder(scheme: Scheme, stochastic: bool, feedback: bool) -> Any:
    """Return the same for many tensors, for ``common.batched.batch_encoder``.

    The arrays are codes, scales and lows; options are the bits, the bucket, and scratch.
    """
    by_range, one = scheme == Scheme.RANGE, encoder(scheme, stochastic, feedback)

    @njit(inline="always")
    def encode(
        x: Any, residual: Any, decay: Any, key: Any, start: Any, places: Any, options: Any
    ) -> None:
        bits, bucket, scratch = options
        count = (x.size + bucket - 1) // bucket
        codes = carray(pointer(places[1]), (x.size * bits + 7) // 8, np.uint8)
        scales = carray(pointer(places[2]), count, np.uint16)
        lows = carray(pointer(places[3]), count if by_range else 0, np.float32)
        one(x, residual, decay, bits, bucket, key, start, codes, scales, lows, scratch)

    return encode


@njit(inline="always")
def _write(
    source: Any, zero: Any, scale: Any, low: Any, target: Any, by_range: bool, add: bool
) -> None:
    for i in range(target.size):
        value = (types.float32(source[i]) - zero) * scale
        if by_range:
            value += low
        if add:
            target[i] += value
        else:
            target[i] = value


@cache
def decoder(scheme: Scheme) -> Any:
    """Return the kernel ``decode(codes, scales, lows, bits, bucket, add, scratch, out)``.

    It adds to ``out``, or overwrites it. ``scratch`` is as for ``encoder``.
    """
    by_range = scheme == Scheme.RANGE

    @jit
    def decode(
        codes: Any, scales: Any, lows: Any, bits: Any, bucket: Any, add: Any, scratch: Any,
        out: Any,
    ) -> None:  # fmt: skip
        zero = types.float32(0.0 if by_range else (1 << (bits - 1)) - 1)
        width = bucket * bits // 8
        for b in range(scales.size):
            target = out[b * bucket : (b + 1) * bucket]
            source = codes[b * width : (b + 1) * width]
            scale = bf16_to_f32(scales[b])
            low = lows[b] if by_range else types.float32(0.0)
            if bits == 8:
                _write(source, zero, scale, low, target, by_range, add)
            else:
                unpack(source, bits, scratch[: target.size])
                _write(scratch, zero, scale, low, target, by_range, add)

    return decode


@cache
def placed_decoder(scheme: Scheme) -> Any:
    """Return the same for ``common.batched.batch_decoder``; with arrays and options as above."""
    by_range, one = scheme == Scheme.RANGE, decoder(scheme)

    @njit(inline="always")
    def decode(places: Any, add: bool, out: Any, options: Any) -> bool:
        bits, bucket, scratch = options
        count = (out.size + bucket - 1) // bucket
        codes = carray(pointer(places[1]), (out.size * bits + 7) // 8, np.uint8)
        scales = carray(pointer(places[2]), count, np.uint16)
        lows = carray(pointer(places[3]), count if by_range else 0, np.float32)
        one(codes, scales, lows, bits, bucket, add, scratch, out)
        return True

    return decode
