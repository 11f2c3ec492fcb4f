"""Counter-based random numbers: a function of a key and an element's index, nothing else.

Widynski, "Squares: a fast counter-based RNG", arXiv:2004.06278. The same numbers come out of array
code, of CPU kernels and of GPU kernels, for any number of threads and any way of cutting a tensor.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringlet.compressors.context import Array, Context


def uniform(ctx: Context, n: int, shared: bool = False) -> Array:
    """Return n float32 in [0, 1), one for each element from ``ctx.offset`` on.

    They depend on seed, step, tensor, stage and element, and on the rank unless ``shared``.
    """
    bits = squares(ctx.xp, ctx.key(shared), ctx.offset, n)
    drawn: Array = (bits >> 8).astype("float32") * ctx.xp.float32(2.0**-24)
    return drawn


def squares(xp: Any, key: int, start: int, n: int) -> Array:
    """Return 32 random bits (uint32) for each of the counters start .. start + n - 1."""
    with np.errstate(over="ignore"):  # arithmetic is modulo 2**64
        x = xp.arange(start, start + n, dtype="uint64") * xp.uint64(key)
        y, z = x.copy(), x + xp.uint64(key)
        x = _turn(xp, x * x + y)
        x = _turn(xp, x * x + z)
        x = _turn(xp, x * x + y)
        drawn: Array = ((x * x + z) >> xp.uint64(32)).astype("uint32")
    return drawn


def _turn(xp: Any, x: Array) -> Array:
    turned: Array = (x >> xp.uint64(32)) | (x << xp.uint64(32))
    return turned
