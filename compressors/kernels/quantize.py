"""Bucketed 8-bit quantisation: one float32 scale per bucket, codes in -127..127.

A bucket of 128 to 1024 elements stays in the first-level cache between the pass that finds its
largest magnitude and the one that rounds, so memory is read once.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types

from ringlet.compressors.kernels.intrinsics import bits_f32, f32_bits, is_finite

LEVELS = 127
# Below this magnitude 127 / amax may overflow; such a bucket is sent as zeros.
TINY = 1.5e-36
# Adding 1.5 * 2**23 to a small float leaves it rounded to nearest even in the lowest bits.
_MAGIC = 12582912.0


@njit(nogil=True, cache=True)
def encode(x: Any, bucket: int, codes: Any, scales: Any) -> None:
    """Quantise ``x`` (float32) into int8 ``codes`` and a float32 scale per bucket."""
    for b in range(scales.size):
        values = x[b * bucket : (b + 1) * bucket]
        target = codes[b * bucket : (b + 1) * bucket]
        top = types.uint32(0)
        for i in range(values.size):
            top = max(top, _magnitude(values[i]))
        scale, inverse = _scale(top)
        scales[b] = scale
        if inverse == types.float32(0.0):
            target[:] = 0
            continue
        for i in range(values.size):
            target[i] = _code(values[i] * inverse + types.float32(_MAGIC))


@njit(nogil=True, cache=True)
def encode_feedback(
    x: Any, residual: Any, decay: Any, bucket: int, codes: Any, scales: Any
) -> None:
    """Quantise x + decay * residual; leave in ``residual`` what was lost, where finite."""
    for b in range(scales.size):
        values = x[b * bucket : (b + 1) * bucket]
        left = residual[b * bucket : (b + 1) * bucket]
        target = codes[b * bucket : (b + 1) * bucket]
        top = types.uint32(0)
        for i in range(values.size):
            top = max(top, _magnitude(values[i] + decay * left[i]))
        scale, inverse = _scale(top)
        scales[b] = scale
        if inverse == types.float32(0.0):
            target[:] = 0
            if scale == types.float32(0.0):
                for i in range(values.size):
                    left[i] = values[i] + decay * left[i]
            continue
        for i in range(values.size):
            value = values[i] + decay * left[i]
            shifted = value * inverse + types.float32(_MAGIC)
            target[i] = _code(shifted)
            lost = value - (shifted - types.float32(_MAGIC)) * scale
            left[i] = lost


@njit(nogil=True, cache=True)
def decode(codes: Any, scales: Any, bucket: int, out: Any) -> None:
    """Overwrite ``out`` (float32) with codes times scales."""
    for b in range(scales.size):
        source = codes[b * bucket : (b + 1) * bucket]
        target = out[b * bucket : (b + 1) * bucket]
        scale = scales[b]
        for i in range(source.size):
            target[i] = types.float32(source[i]) * scale


@njit(nogil=True, cache=True)
def accumulate(codes: Any, scales: Any, bucket: int, out: Any) -> None:
    """Add codes times scales to ``out`` (float32)."""
    for b in range(scales.size):
        source = codes[b * bucket : (b + 1) * bucket]
        target = out[b * bucket : (b + 1) * bucket]
        scale = scales[b]
        for i in range(source.size):
            target[i] += types.float32(source[i]) * scale


@njit(inline="always")
def _magnitude(value: Any) -> Any:
    """Bits of |value|: they order like the magnitudes, with Inf and NaN on top."""
    return f32_bits(value) & types.uint32(0x7FFFFFFF)


@njit(inline="always")
def _code(shifted: Any) -> Any:
    return types.int8(f32_bits(shifted))


@njit(inline="always")
def _scale(top: Any) -> Any:
    """Return (scale, its inverse) for the bits of a bucket's largest magnitude."""
    amax = bits_f32(top)
    if not is_finite(amax):  # the whole bucket decodes to NaN: overflow must not be hidden
        return bits_f32(types.uint32(0x7FC00000)), types.float32(0.0)
    if amax < types.float32(TINY):
        return types.float32(0.0), types.float32(0.0)
    return amax / types.float32(LEVELS), types.float32(LEVELS) / amax
