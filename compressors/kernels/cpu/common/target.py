"""What a quantiser rounds: the values, or with error feedback their sum with the residual."""

from __future__ import annotations

from typing import Any

from numba import njit, types

from ringlet.compressors.kernels.cpu.common.intrinsics import f32_bits


@njit(inline="always")
def target_at(values: Any, held: Any, decay: Any, i: Any, feedback: bool) -> Any:
    """Return element ``i``."""
    return values[i] + decay * held[i] if feedback else values[i]


@njit(nogil=True)
def largest_bits(values: Any, held: Any, decay: Any, feedback: bool) -> Any:
    """Return the bits of the largest magnitude: they order like magnitudes, Inf and NaN on top."""
    top = types.uint32(0)
    for i in range(values.size):
        value = target_at(values, held, decay, i, feedback)
        top = max(top, f32_bits(value) & types.uint32(0x7FFFFFFF))
    return top
