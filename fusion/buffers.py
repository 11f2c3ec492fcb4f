"""Fusion buffers: taken when a bucket is encoded, given back when it is done."""

from __future__ import annotations

import numpy as np

from ringlet.ring.dtypes import Array


class BufferPool:
    """Reuses byte buffers, so that a steady training step allocates none.

    Used by the engine's thread alone. A buffer may be up to four times larger than asked for.
    """

    def __init__(self) -> None:
        self._free: list[Array] = []

    def take(self, nbytes: int) -> Array:
        """Return a uint8 buffer of at least ``nbytes``; its contents are undefined."""
        fitting = [b for b in self._free if nbytes <= b.size <= max(4 * nbytes, 1 << 16)]
        if fitting:
            best = min(fitting, key=lambda buffer: buffer.size)
            self._free = [b for b in self._free if b is not best]
            return best
        return np.empty(max(nbytes, 64), np.uint8)

    def give_back(self, buffer: Array) -> None:
        """Return a buffer that ``take`` gave out."""
        self._free.append(buffer)


class Lease:
    """Buffers taken together, for one collective, and given back together."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._taken: list[Array] = []

    def allocate(self, nbytes: int) -> Array:
        """Return exactly ``nbytes`` of a pooled buffer."""
        buffer = self._pool.take(nbytes)
        self._taken.append(buffer)
        return buffer[:nbytes]

    def release(self) -> None:
        """Give everything back."""
        for buffer in self._taken:
            self._pool.give_back(buffer)
        self._taken.clear()
