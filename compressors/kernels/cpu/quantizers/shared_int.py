"""Integer codes on scales that all ranks share: find a bucket's largest value, round, decode."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import types

from ringlet.compressors.kernels.cpu.common.intrinsics import ROUNDER, bits_f32, f32_bits
from ringlet.compressors.kernels.cpu.common.rng import uniform16
from ringlet.ring.jit import jit

_INF = 0x7F800000
# Below this the inverse of a level may overflow; such a bucket is sent as zeros.
TINY = 1.2e-38


@jit
def extents(x: Any, bucket: int, out: Any) -> None:
    """Fill ``out`` with each bucket's largest magnitude; Inf where it holds a NaN or an Inf."""
    for b in range(out.size):
        values = x[b * bucket : (b + 1) * bucket]
        top = types.uint32(0)
        for i in range(values.size):
            top = max(top, f32_bits(values[i]) & types.uint32(0x7FFFFFFF))
        out[b] = bits_f32(min(top, types.uint32(_INF)))


@cache
def encoder(stochastic: bool) -> Any:
    """Return the kernel ``encode(x, extents, levels, bucket, key, start, codes)``.

    ``levels`` is a float32; ``start`` is the counter of x[0] for random numbers.
    """

    @jit
    def encode(
        x: Any, extents: Any, levels: Any, bucket: int, key: Any, start: Any, codes: Any
    ) -> None:
        for b in range(extents.size):
            values = x[b * bucket : (b + 1) * bucket]
            target = codes[b * bucket : (b + 1) * bucket]
            unit = extents[b] / levels
            if not types.float32(TINY) <= unit < bits_f32(types.uint32(_INF)):
                target[:] = 0
                continue
            inverse = types.float32(1) / unit
            first = types.uint64(start + b * bucket)
            for i in range(values.size):
                place = values[i] * inverse
                if stochastic:
                    drawn = np.floor(place + uniform16(key, first + types.uint64(i)))
                    target[i] = types.int32(max(min(drawn, levels), -levels))
                else:
                    rounded = (place + types.float32(ROUNDER)) - types.float32(ROUNDER)
                    target[i] = types.int32(rounded)

    return encode


@jit
def decode(codes: Any, units: Any, bucket: int, out: Any) -> None:
    """Fill ``out`` with ``codes`` times the unit of their bucket."""
    for b in range(units.size):
        source = codes[b * bucket : (b + 1) * bucket]
        target = out[b * bucket : (b + 1) * bucket]
        unit = units[b]
        for i in range(target.size):
            target[i] = types.float32(source[i]) * unit
