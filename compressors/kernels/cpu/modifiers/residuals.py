"""Residuals that are kept in 16 or 8 bits, rounded at random; none decodes to what is not finite.

Kernels are given the key of the tensor's own random numbers, and the counter of the first element.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, njit, types

from ringlet.compressors.kernels.cpu.common.intrinsics import (
    bf16_to_f32,
    bits_f32,
    f32_bits,
    pointer,
)
from ringlet.compressors.kernels.cpu.common.rng import squares, uniform16
from ringlet.compressors.kernels.cpu.quantizers.quantize import TINY
from ringlet.ring.jit import jit

BLOCK = 128
HIGHEST16 = 0x7F7F  # the largest finite bfloat16
HIGHEST_SCALE = 0x7BFF  # the largest bfloat16 that is finite 128 times
STREAM = 0x2545F4914F6CDD1C  # apart from what the compressor draws by the same key; it is even


@njit(inline="always")
def _own_stream(key: Any) -> Any:
    return types.uint64(key) ^ types.uint64(STREAM)


@jit
def narrow16(x: Any, key: Any, start: Any, out: Any) -> None:
    """Round float32 at random to bfloat16 bits (uint16), at most to the largest finite one."""
    own = _own_stream(key)
    for i in range(x.size):
        bits, drawn = f32_bits(x[i]), squares(own, types.uint64(start + i)) >> types.uint32(16)
        near = ((bits & types.uint32(0x7FFFFFFF)) + drawn) >> types.uint32(16)
        sign = (bits >> types.uint32(16)) & types.uint32(0x8000)
        out[i] = types.uint16(min(near, types.uint32(HIGHEST16)) | sign)


@cache
def widen16(add: bool) -> Any:
    """Return the kernel ``widen(bits, out)``; ``add`` accumulates."""

    @jit
    def widen(bits: Any, out: Any) -> None:
        for i in range(bits.size):
            value = bf16_to_f32(bits[i])
            out[i] = out[i] + value if add else value

    return widen


@jit
def narrow8(x: Any, key: Any, start: Any, codes: Any, scales: Any) -> None:
    """Round float32 at random to multiples (uint8, two's complement) of a scale.

    There is a scale, a bfloat16, for 128 values.
    """
    own = _own_stream(key)
    for b in range(scales.size):
        values, target = x[b * BLOCK : (b + 1) * BLOCK], codes[b * BLOCK : (b + 1) * BLOCK]
        top = types.uint32(0)
        for i in range(values.size):
            top = max(top, f32_bits(values[i]) & types.uint32(0x7FFFFFFF))
        extent = bits_f32(top)
        if extent < types.float32(TINY):
            scales[b] = types.uint16(0)
            target[:] = types.uint8(0)
            continue
        raised = (f32_bits(extent / types.float32(127)) + types.uint32(0xFFFF)) >> types.uint32(16)
        scales[b] = types.uint16(min(raised, types.uint32(HIGHEST_SCALE)))
        inverse = types.float32(1) / bf16_to_f32(scales[b])
        for i in range(values.size):
            drawn = uniform16(own, types.uint64(start + b * BLOCK + i))
            rounded = np.floor(values[i] * inverse + drawn)
            # 128, which the highest scale alone can ask for, has no code.
            target[i] = types.uint8(
                types.int32(min(max(rounded, types.float32(-127)), types.float32(127)))
            )

    return


@cache
def widen8(add: bool) -> Any:
    """Return the kernel ``widen(codes, scales, out)``; ``add`` accumulates."""

    @jit
    def widen(codes: Any, scales: Any, out: Any) -> None:
        for b in range(scales.size):
            source, target = codes[b * BLOCK : (b + 1) * BLOCK], out[b * BLOCK : (b + 1) * BLOCK]
            scale = bf16_to_f32(scales[b])
            for i in range(target.size):
                value = types.float32(types.int8(source[i])) * scale
                target[i] = target[i] + value if add else value

    return widen


_widen16, _widen8 = widen16(False), widen8(False)


# Rows are those of ``base.batched``: the offset is in column 3, the key of what is drawn here in
# column 5. Residuals in float32 lie at ``places`` (uint64).


@jit
def widen16_many(tensors: Any, payloads: Any, places: Any) -> None:
    """Do what ``widen16(add=False)`` does for many tensors."""
    for t in range(places.size):
        n = types.intp(payloads[t, 0])
        bits = carray(pointer(tensors[t, 1]), n, np.uint16)
        _widen16(bits, carray(pointer(places[t]), n, np.float32))


@jit
def narrow16_many(tensors: Any, payloads: Any, places: Any) -> None:
    """Do what ``narrow16`` does for many tensors."""
    for t in range(places.size):
        n = types.intp(payloads[t, 0])
        bits = carray(pointer(tensors[t, 1]), n, np.uint16)
        wide = carray(pointer(places[t]), n, np.float32)
        narrow16(wide, tensors[t, 5], types.intp(tensors[t, 3]), bits)


@jit
def widen8_many(tensors: Any, payloads: Any, places: Any) -> None:
    """Do what ``widen8(add=False)`` does for many tensors, whose second memory is scales."""
    for t in range(places.size):
        n = types.intp(payloads[t, 0])
        codes = carray(pointer(tensors[t, 1]), n, np.uint8)
        scales = carray(pointer(tensors[t, 4]), (n + BLOCK - 1) // BLOCK, np.uint16)
        _widen8(codes, scales, carray(pointer(places[t]), n, np.float32))


@jit
def narrow8_many(tensors: Any, payloads: Any, places: Any) -> None:
    """Do what ``narrow8`` does for many tensors, whose second memory is scales."""
    for t in range(places.size):
        n = types.intp(payloads[t, 0])
        codes = carray(pointer(tensors[t, 1]), n, np.uint8)
        scales = carray(pointer(tensors[t, 4]), (n + BLOCK - 1) // BLOCK, np.uint16)
        wide = carray(pointer(places[t]), n, np.float32)
        narrow8(wide, tensors[t, 5], types.intp(tensors[t, 3]), codes, scales)
