"""Counter-based random numbers: a function of a key and an element's index, nothing else.

Widynski, "Squares: a fast counter-based RNG", arXiv:2004.06278. The same numbers come out of array
code, of CPU kernels and of GPU kernels, for any number of threads and any way of cutting a tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
_BLOCK = 1 << 13  # numbers: a core's cache holds all that is between their counters and them


def uniform(xp: Any, key: int, start: int, n: int) -> Array:
    """Return n float32 in [0, 1), for the counters start .. start + n - 1."""
    if xp is np and n > _BLOCK:
        return _in_blocks(uniform, key, start, n)
    drawn: Array = (squares(xp, key, start, n) >> 8).astype("float32") * xp.float32(2.0**-24)
    return drawn


class DeviceGenerator:
    """A NumPy generator whose arrays are arrays of ``xp``: drawn on the host, then copied."""

    def __init__(self, generator: np.random.Generator, xp: Any) -> None:
        self._generator, self._xp = generator, xp

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._generator, name)
        if not callable(found):
            return found

        def draw(*args: Any, **kwargs: Any) -> Any:
            drawn = found(*args, **kwargs)
            return self._xp.asarray(drawn) if isinstance(drawn, np.ndarray) else drawn

        return draw


def squares(xp: Any, key: int, start: int, n: int) -> Array:
    """Return 32 random bits (uint32) for each of the counters start .. start + n - 1."""
    if xp is np and n > _BLOCK:
        return _in_blocks(squares, key, start, n)
    half = xp.uint64(32)
    with np.errstate(over="ignore"):  # arithmetic is modulo 2**64
        y = xp.arange(start, start + n, dtype="uint64")
        y *= xp.uint64(key)
        z = y + xp.uint64(key)
        x = y
        for added in (y, z, y):
            x = x * x
            x += added
            low = x << half
            x >>= half
            x |= low  # its halves have changed places
        x *= x
        x += z
        x >>= half
        drawn: Array = x.astype("uint32")
    return drawn


def _in_blocks(draw: Callable[[Any, int, int, int], Array], key: int, start: int, n: int) -> Array:
    """Return what ``draw`` gives in a single call, in less than half of its time."""
    starts = range(start, start + n, _BLOCK)
    return np.concatenate([draw(np, key, at, min(_BLOCK, start + n - at)) for at in starts])
