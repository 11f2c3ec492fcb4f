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


def _family(narrow: Any, widen: Any) -> tuple[Any, Any, Any, Any]:
    """Make the four kernels of one half precision."""

    @njit(nogil=True, cache=True)
    def encode(x: Any, out: Any) -> None:
        for i in range(x.size):
            out[i] = narrow(x[i])

    @njit(nogil=True, cache=True)
    def encode_feedback(x: Any, residual: Any, decay: Any, out: Any) -> None:
        for i in range(x.size):
            target = x[i] + decay * residual[i]
            bits = narrow(target)
            lost = target - widen(bits)
            out[i] = bits
            residual[i] = lost if is_finite(lost) else residual[i]

    @njit(nogil=True, cache=True)
    def decode(bits: Any, out: Any) -> None:
        for i in range(bits.size):
            out[i] = widen(bits[i])

    @njit(nogil=True, cache=True)
    def accumulate(bits: Any, out: Any) -> None:
        for i in range(bits.size):
            out[i] += widen(bits[i])

    return encode, encode_feedback, decode, accumulate


f16 = _family(f32_to_f16, f16_to_f32)
bf16 = _family(f32_to_bf16, bf16_to_f32)

__all__ = ["bf16", "f16"]
