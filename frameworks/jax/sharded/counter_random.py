"""Random numbers that are functions of a key and an element's place, as JAX's operations.

They are those of ``compressors.core.rng`` and ``Context.key``, bit for bit. All this is traced with
64-bit types switched on.
"""

from __future__ import annotations

import zlib
from typing import Any

import jax.numpy as jnp

from ringlet.compressors.core.context import scrambled


class Around:
    """What random numbers depend on, beside the element: see ``Context.key``.

    ``step`` and ``rank``, the device's place on the axis, may be arrays of JAX's.
    """

    def __init__(self, name: str, step: Any, seed: int, rank: Any = 0) -> None:
        self.name, self.step, self.seed, self.rank = name, step, seed, rank

    def shared_key(self) -> Any:
        """Return the key (uint64) that all ranks have in common."""
        return self._key() | jnp.uint64(1)

    def own_key(self) -> Any:
        """Return this rank's key (uint64)."""
        rank = jnp.asarray(self.rank).astype("uint64") + jnp.uint64(1)
        return _mix(self._key() ^ _mix(rank)) | jnp.uint64(1)

    def _key(self) -> Any:
        key: Any = jnp.uint64(scrambled(self.seed ^ 0x9E3779B97F4A7C15))
        for word in (self.step, zlib.crc32(self.name.encode()), 1):
            known = isinstance(word, int)
            mixed = jnp.uint64(scrambled(word)) if known else _mix(jnp.asarray(word, "uint64"))
            key = _mix(key ^ mixed)
        return key


def squares(key: Any, n: int) -> Any:
    """Return 32 random bits (uint32) for each of the counters below n; see ``core.rng``."""
    x = jnp.arange(n, dtype="uint64") * key
    y, z = x, x + key
    x = _turned(x * x + y)
    x = _turned(x * x + z)
    x = _turned(x * x + y)
    return ((x * x + z) >> jnp.uint64(32)).astype("uint32")


def _turned(x: Any) -> Any:
    return (x >> jnp.uint64(32)) | (x << jnp.uint64(32))


def _mix(word: Any) -> Any:
    """Scramble 64 bits that are traced, as ``core.context.scrambled`` does."""
    word = word + jnp.uint64(0x9E3779B97F4A7C15)
    word = (word ^ (word >> jnp.uint64(30))) * jnp.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> jnp.uint64(27))) * jnp.uint64(0x94D049BB133111EB)
    return word ^ (word >> jnp.uint64(31))
