"""Powers of two: round the mantissa away at random, by one integer addition."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import njit, types

from ringlet.compressors.kernels.cpu.common.intrinsics import (
    bf16_to_f32,
    bits_f32,
    f32_bits,
    is_finite,
)
from ringlet.compressors.kernels.cpu.common.rng import squares
from ringlet.compressors.kernels.cpu.common.target import largest_bits, target_at
from ringlet.ring.jit import jit

_NAN = 0x7FC0
_TINY, _RAISED = 64, 104  # as in compressors/quantizers/natural.py


@njit(inline="always")
def _power(code: Any) -> Any:
    """Return the signed power of two of a code: its exponent is one less than the code's rank."""
    wide = types.uint32(code)
    magnitude = (wide & types.uint32(0x7F)) << types.uint32(23)
    return bits_f32(magnitude | ((wide & types.uint32(0x80)) << types.uint32(24)))


@njit(nogil=True)
def _round(
    values: Any, held: Any, decay: Any, scale: Any, inverse: Any, key: Any, start: Any,
    out: Any, feedback: bool,
) -> None:  # fmt: skip
    for i in range(values.size):
        value = target_at(values, held, decay, i, feedback)
        bits = f32_bits(value * inverse)
        # Adding noise to the mantissa carries into the exponent as often as it should.
        noise = squares(key, types.uint64(start + i)) >> types.uint32(9)
        magnitude = types.uint32((bits & types.uint32(0x7FFFFFFF)) + noise)
        rank = min(types.uint32(magnitude >> types.uint32(23)), types.uint32(127))
        code = types.uint8(rank | ((bits >> types.uint32(24)) & types.uint32(0x80)))
        out[i] = code
        if feedback:
            held[i] = value - _power(code) * scale


@cache
def encoder(feedback: bool) -> Any:
    """Return the kernel ``encode(x, residual, decay, bucket, parameter, key, start, codes,
    scales)``; it needs no ``parameter``.
    """

    @jit
    def encode(
        x: Any, residual: Any, decay: Any, bucket: Any, parameter: Any, key: Any, start: Any,
        codes: Any, scales: Any,
    ) -> None:  # fmt: skip
        for b in range(scales.size):
            values = x[b * bucket : (b + 1) * bucket]
            held = residual[b * bucket : (b + 1) * bucket] if feedback else residual
            out = codes[b * bucket : (b + 1) * bucket]
            top = largest_bits(values, held, decay, feedback)
            if not is_finite(bits_f32(top)):  # the bucket decodes to NaN: it must not be hidden
                scales[b] = types.uint16(_NAN)
                out[:] = 0
                continue
            # The highest power that rounding up may need gets code 127; a shift is a power of two.
            highest = types.int32((top + types.uint32(0x7FFFFF)) >> types.uint32(23))
            shift = max(min(highest, types.int32(254)) - types.int32(127), types.int32(0))
            if types.int32(0) < highest < types.int32(_TINY):
                shift = types.int32(_RAISED - 127)
            scale = bits_f32(types.uint32(shift + types.int32(127)) << types.uint32(23))
            inverse = types.float32(1.0) / scale
            scales[b] = types.uint16(f32_bits(scale) >> types.uint32(16))
            _round(values, held, decay, scale, inverse, key, start + b * bucket, out, feedback)

    return encode


@njit(nogil=True)
def _write(codes: Any, scale: Any, target: Any, add: bool) -> None:
    for i in range(target.size):
        value = _power(codes[i]) * scale
        target[i] = target[i] + value if add else value


@jit
def decode(codes: Any, scales: Any, bucket: Any, add: Any, out: Any) -> None:
    """Decode powers of two; ``add`` accumulates."""
    for b in range(scales.size):
        target = out[b * bucket : (b + 1) * bucket]
        _write(codes[b * bucket : (b + 1) * bucket], bf16_to_f32(scales[b]), target, add)


__all__ = ["decode", "encoder"]
