"""Casts between float32 and the two half precisions; half arrays are uint16 views."""

from __future__ import annotations

from typing import Any, NamedTuple

from numba import njit

from ringlet.compressors.kernels.cpu.common.intrinsics import (
    bf16_to_f32,
    f16_to_f32,
    f32_to_bf16,
    f32_to_f16,
    is_finite,
)


class Casts(NamedTuple):
    """The kernels of one half precision: a codec's four, and three that multiply on the way."""

    encode: Any  # (x, out)
    encode_feedback: Any  # (x, residual, decay, out)
    decode: Any  # (bits, out)
    accumulate: Any  # (bits, out): out += bits
    widen: Any  # (bits, factor, out): out = factor * bits
    narrow: Any  # (x, factor, out): the same from float32 to half precision
    rescale: Any  # (bits, factor, out): the same from half precision to half precision


def _family(half: bool) -> Casts:
    """Make the kernels of float16 if ``half``, else of bfloat16."""
    # What a cached kernel closes over must be plain values: dispatchers differ between processes.

    @njit(nogil=True, cache=True)
    def encode(x: Any, out: Any) -> None:
        for i in range(x.size):
            out[i] = f32_to_f16(x[i]) if half else f32_to_bf16(x[i])

    @njit(nogil=True, cache=True)
    def encode_feedback(x: Any, residual: Any, decay: Any, out: Any) -> None:
        for i in range(x.size):
            target = x[i] + decay * residual[i]
            bits = f32_to_f16(target) if half else f32_to_bf16(target)
            lost = target - (f16_to_f32(bits) if half else bf16_to_f32(bits))
            out[i] = bits
            residual[i] = lost if is_finite(lost) else residual[i]

    @njit(nogil=True, cache=True)
    def decode(bits: Any, out: Any) -> None:
        for i in range(bits.size):
            out[i] = f16_to_f32(bits[i]) if half else bf16_to_f32(bits[i])

    @njit(nogil=True, cache=True)
    def accumulate(bits: Any, out: Any) -> None:
        for i in range(bits.size):
            out[i] += f16_to_f32(bits[i]) if half else bf16_to_f32(bits[i])

    @njit(nogil=True, cache=True)
    def widen(bits: Any, factor: Any, out: Any) -> None:
        for i in range(bits.size):
            out[i] = factor * (f16_to_f32(bits[i]) if half else bf16_to_f32(bits[i]))

    @njit(nogil=True, cache=True)
    def narrow(x: Any, factor: Any, out: Any) -> None:
        for i in range(x.size):
            out[i] = f32_to_f16(factor * x[i]) if half else f32_to_bf16(factor * x[i])

    @njit(nogil=True, cache=True)
    def rescale(bits: Any, factor: Any, out: Any) -> None:
        for i in range(bits.size):
            x = factor * (f16_to_f32(bits[i]) if half else bf16_to_f32(bits[i]))
            out[i] = f32_to_f16(x) if half else f32_to_bf16(x)

    return Casts(encode, encode_feedback, decode, accumulate, widen, narrow, rescale)


f16 = _family(True)
bf16 = _family(False)
