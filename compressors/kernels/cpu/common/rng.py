"""The random numbers of ``ringlet.compressors.core.rng`` inside CPU kernels."""

from __future__ import annotations

from typing import Any

from numba import njit, types


@njit(inline="always")
def squares(key: Any, counter: Any) -> Any:
    """Return 32 random bits (uint32) for ``counter`` under ``key``, both uint64."""
    half = types.uint64(32)
    y = counter * key
    z = y + key
    x = y * y + y
    x = (x >> half) | (x << half)
    x = x * x + z
    x = (x >> half) | (x << half)
    x = x * x + y
    x = (x >> half) | (x << half)
    return types.uint32((x * x + z) >> half)


@njit(inline="always")
def uniform(key: Any, counter: Any) -> Any:
    """Return a float32 in [0, 1) for ``counter`` under ``key``."""
    return types.float32(squares(key, counter) >> types.uint32(8)) * types.float32(2.0**-24)


@njit(inline="always")
def uniform16(key: Any, counter: Any) -> Any:
    """Return a multiple of 2**-16 in [0, 1), as float32: exact when added to 0 .. 255."""
    return types.float32(squares(key, counter) >> types.uint32(16)) * types.float32(2.0**-16)
