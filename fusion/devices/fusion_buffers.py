"""Fusion buffers: taken when a bucket is encoded, given back when it is done."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import numpy as np

from ringlet.ring.dtypes import Array


class BufferPool:
    """Reuses byte buffers, so that a steady training step allocates none.

    Used by the engine's thread alone. A buffer may be up to four times larger than asked for. What
    lies unused is bounded by twice what was in use at once, at most: small buffers beside large
    ones, in another exchange, must not cost a large one in every step. A reserve of ``reserved``
    bytes is for one exchange that has to be made when there is no memory left. ``source`` allocates
    bytes; host memory by default.
    """

    def __init__(self, reserved: int = 0, source: Callable[[int], Array] | None = None) -> None:
        self._source = _on_host if source is None else source
        self._free: list[Array] = []  # the one given back last is at the end
        self._in_use = self._most = self._idle = 0  # bytes
        self.freed = 0  # how often buffers were given up: whoever keeps views drops them then
        self._reserve = np.empty(0, np.uint8)
        self.reserve(reserved)

    def reserve(self, nbytes: int) -> None:
        """Hold at least ``nbytes`` in reserve, if there is memory; mostly they stay untouched."""
        if nbytes > self._reserve.size:
            with suppress(MemoryError, ValueError):  # the latter for more than any machine has
                self._reserve = self._allocate(nbytes)

    @property
    def last_resort(self) -> Array:
        """The reserve (uint8), for an exchange while there is no other."""
        return self._reserve

    def take(self, nbytes: int) -> Array:
        """Return a uint8 buffer of at least ``nbytes``; its contents are undefined.

        Raises MemoryError when there is no memory even without the buffers that lie unused.
        """
        most, place = max(4 * nbytes, 1 << 16) + 1, -1
        for i, free in enumerate(self._free):
            if nbytes <= free.size < most:  # and less than the smallest that was found
                most, place = free.size, i
        if place >= 0:
            buffer = self._free.pop(place)
            self._idle -= buffer.size
        else:
            buffer = self._allocate(_rounded(nbytes))
        self._in_use += buffer.size
        self._most = max(self._most, self._in_use)
        return buffer

    def _allocate(self, nbytes: int) -> Array:
        try:
            return self._source(nbytes)
        except MemoryError:
            self._free.clear()
            self._idle = 0
            self.freed += 1
            return self._source(nbytes)

    def give_back(self, buffer: Array) -> None:
        """Return a buffer that ``take`` gave out; those unused for longest may be freed."""
        self._in_use -= buffer.size
        self._idle += buffer.size
        self._free.append(buffer)
        while self._idle > 2 * self._most:
            self._idle -= self._free.pop(0).size
            self.freed += 1


def _on_host(nbytes: int) -> Array:
    return np.empty(nbytes, np.uint8)


def _rounded(nbytes: int) -> int:
    """Round up by an eighth at most, so that payloads of slowly growing size find a buffer."""
    step = max(64, 1 << max(0, nbytes.bit_length() - 4))
    return max(1, -(-nbytes // step)) * step


class Lease:
    """Buffers taken together, for one exchange, and given back together."""

    def __init__(self, pool: BufferPool) -> None:
        self._pool = pool
        self._taken: list[Array] = []
        self._left: Array | None = None  # of the reserve, while this lease may use it

    def allocate(self, nbytes: int) -> Array:
        """Return exactly ``nbytes`` of a pooled buffer. Raises MemoryError."""
        try:
            buffer = self._pool.take(nbytes)
        except MemoryError:
            if self._left is None or self._left.size < nbytes:
                raise
            buffer, self._left = self._left[:nbytes], self._left[-(-nbytes // 64) * 64 :]
            return buffer
        self._taken.append(buffer)
        return buffer[:nbytes]

    def mark(self) -> tuple[int, Array | None]:
        """Return what ``back_to`` needs to give back what is taken from now on."""
        return len(self._taken), self._left

    def back_to(self, mark: tuple[int, Array | None]) -> None:
        """Give back what was taken since ``mark``."""
        count, self._left = mark
        while len(self._taken) > count:
            self._pool.give_back(self._taken.pop())

    def use_reserve(self) -> None:
        """Fall back on the pool's reserve until the release, while no other exchange is made."""
        if self._left is None:
            self._left = self._pool.last_resort

    def release(self) -> None:
        """Give everything back."""
        for buffer in self._taken:
            self._pool.give_back(buffer)
        self._taken.clear()
        self._left = None
