"""Taking a loss scale off gradients, and whether they are finite, in one pass."""

from __future__ import annotations

from typing import Any

from numba import types

from ringlet.compressors.kernels.cpu.common.intrinsics import f32_bits
from ringlet.ring.jit import jit


@jit
def unscale(x: Any, factor: Any) -> Any:
    """Multiply ``x`` (float32) by ``factor`` (float32) in place; return whether all is finite."""
    largest = types.uint32(0)  # magnitudes order like their bits, with Inf and NaN on top
    for i in range(x.size):
        product = factor * x[i]
        x[i] = product
        largest = max(largest, f32_bits(product) & types.uint32(0x7FFFFFFF))
    return largest < types.uint32(0x7F800000)


__all__ = ["unscale"]
