"""Casts between float32 and the two half precisions; half arrays are uint16 views."""

from __future__ import annotations

from typing import Any

from numba import njit

from ringlet.compressors.kernels.intrinsics import (
    bf16_to_f32,
    f16_to_f32,
    f32_to_bf16,
    f32_to_f16,
    is_finite,
)


def _family(half: bool) -> tuple[Any, Any, Any, Any]:
    """Make the four kernels of one half precision: float16 if ``half``, else bfloat16."""
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

    return encode, encode_feedback, decode, accumulate


f16 = _family(True)
bf16 = _family(False)

__all__ = ["bf16", "f16"]
