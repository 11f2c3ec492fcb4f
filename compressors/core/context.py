"""What a compressor may know besides the values: whose they are, when, and what it remembers."""

from __future__ import annotations

import threading
import zlib
from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from types import ModuleType
from typing import Any

import numpy as np
import numpy.typing as npt

from ringlet.compressors.core.rng import DeviceGenerator, uniform

Array = npt.NDArray[Any]
State = dict[str, Any]
# In a tensor's state, with where a shard begins: what its owner remembers of the shard's sum.
SECOND_STAGE = "stage2."

_MASK = (1 << 64) - 1
_START = 0x9E3779B97F4A7C15


class Workspace:
    """Scratch arrays that grow to the largest size asked for and are then reused.

    An ``array`` is valid until the next call with the same name, on the same thread: any
    compressor of any tensor may make it. Arrays that are ``held`` are their holder's alone, and
    threads that share a kernel's work may hold some.
    """

    def __init__(self, xp: ModuleType = np) -> None:
        self.xp = xp
        self._buffers: dict[str, Array] = {}
        self._free: list[Array] = []  # by size
        self._lock = threading.Lock()

    def array(self, name: str, n: int, dtype: npt.DTypeLike = np.float32) -> Array:
        """Return an uninitialised flat array of ``n`` elements of ``dtype``."""
        nbytes = n * np.dtype(dtype).itemsize
        buffer = self._buffers.get(name)
        if buffer is None or buffer.size < nbytes:
            buffer = self._buffers[name] = self.xp.empty(max(nbytes, 64), np.uint8)
        return buffer[:nbytes].view(dtype)

    def lends(self, array: Array) -> bool:
        """Whether ``array`` lies in scratch memory, which others will overwrite."""
        buffers = [*self._buffers.values(), *self._free]
        return array.size > 0 and any(np.shares_memory(array, buffer) for buffer in buffers)

    def lend(self, n: int, dtype: npt.DTypeLike = np.float32) -> Array:
        """Return an uninitialised flat array that is the caller's until it is given ``back``.

        There are as many buffers as were ever lent at once: equal steps after the first allocate
        nothing. What is never given back is merely forgotten.
        """
        nbytes, free = n * np.dtype(dtype).itemsize, self._free
        with self._lock:
            place = bisect_left(free, nbytes, key=len)
            if place < len(free):
                buffer = free.pop(place)
            else:
                if free:  # the largest, which would not do: the new one takes its place
                    free.pop()
                buffer = self.xp.empty(max(nbytes, 64), np.uint8)
        return buffer[:nbytes].view(dtype)

    def back(self, array: Array) -> None:
        """Take back what ``lend`` returned."""
        buffer = array
        while isinstance(buffer.base, type(array)):
            buffer = buffer.base
        with self._lock:
            insort(self._free, buffer.view(np.uint8), key=len)

    @contextmanager
    def held(self, n: int, dtype: npt.DTypeLike = np.float32) -> Iterator[Array]:
        """Lend an array until the with-block ends, over yields too."""
        array = self.lend(n, dtype)
        try:
            yield array
        finally:
            self.back(array)


@dataclass
class Context:
    """The surroundings of one call of a compressor.

    ``x`` in a call is the piece ``[offset : offset + x.size]`` of the flattened tensor; it is the
    whole tensor unless the compressor's traits allow cutting. ``state`` belongs to the tensor, not
    to the piece: what a compressor keeps there it keeps for ``numel`` elements.
    """

    name: str = "tensor"
    shape: tuple[int, ...] = ()
    numel: int = 0
    state: State = field(default_factory=dict)
    step: int = 0
    rank: int = 0
    size: int = 1
    seed: int = 0
    offset: int = 0
    stage: int = 1
    xp: ModuleType = np
    workspace: Workspace = field(default_factory=Workspace)

    def key(self, shared: bool = False) -> int:
        """Return the 64-bit key of this call's random numbers.

        A function of seed, step, tensor and stage, and of the rank unless ``shared``.
        """
        key = scrambled(self.seed ^ _START)
        for word in (scrambled(self.step), _of_name(self.name), scrambled(self.stage)):
            key = scrambled(key ^ word)
        if not shared:
            key = scrambled(key ^ scrambled(self.rank + 1))
        return key | 1

    def rng(self, shared: bool = False, stream: int = 0) -> np.random.Generator:
        """Return NumPy's generator, keyed by ``key``, which gives arrays of ``xp``.

        It knows nothing of ``offset``: where a piece must draw what the whole tensor draws there,
        use ``uniform``. Generators of one ``stream`` give the same numbers, so that ``decompress``
        draws again what ``compress`` drew. What is to be independent of them takes another stream:
        1, 2, ...
        """
        key = self.key(shared)
        if stream:
            # Once more than ``key`` does, or a stream would have a rank's key.
            key = scrambled(scrambled(key) ^ scrambled(stream)) | 1
        generator = np.random.Generator(np.random.Philox(key=key))
        return generator if self.xp is np else DeviceGenerator(generator, self.xp)  # type: ignore[return-value]

    def uniform(self, n: int, shared: bool = False) -> Array:
        """Return n float32 in [0, 1) of ``xp``, one for each element from ``offset`` on.

        A function of ``key`` and the element's index alone: pieces draw what the whole tensor
        draws there. The same with every call.
        """
        return uniform(self.xp, self.key(shared), self.offset, n)

    def child(self, name: str, numel: int) -> Context:
        """Return the context for a compressor applied to a part of this one's payload."""
        state = self.state.setdefault(name, {})
        return Context(
            name=f"{self.name}/{name}",
            shape=(numel,),
            numel=numel,
            state=state,
            step=self.step,
            rank=self.rank,
            size=self.size,
            seed=self.seed,
            stage=self.stage,
            xp=self.xp,
            workspace=self.workspace,
        )


class KeysByStep:
    """What ``Context.key`` gives to many contexts in any of their steps, in a few calls for all."""

    def __init__(self, contexts: Sequence[Context]) -> None:
        seeds = [(ctx.seed ^ _START) & _MASK for ctx in contexts]
        stages, ranks = [ctx.stage for ctx in contexts], [ctx.rank + 1 for ctx in contexts]
        names = [_of_name(ctx.name) for ctx in contexts]
        self._seeds = _scrambled(np.array(seeds, np.uint64))
        self._words = [
            np.array(names, np.uint64),
            *(_scrambled(np.array(words, np.uint64)) for words in (stages, ranks)),
        ]

    def at(self, steps: Sequence[int]) -> Array:
        """Return the keys (uint64) in these steps, one of each context."""
        keys = _scrambled(self._seeds ^ _scrambled(np.array(steps, np.uint64)))
        for word in self._words:
            keys = _scrambled(keys ^ word)
        return keys | np.uint64(1)


@lru_cache(maxsize=1 << 16)
def _of_name(name: str) -> int:
    return scrambled(zlib.crc32(name.encode()))


def _scrambled(words: Array) -> Array:
    """Return what ``scrambled`` makes of each of ``words`` (uint64)."""
    with np.errstate(over="ignore"):  # arithmetic is modulo 2**64
        words = words + np.uint64(_START)
        words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: Array = words ^ (words >> np.uint64(31))
    return found


def scrambled(word: int) -> int:
    """Scramble 64 bits (the finaliser of SplitMix64; Steele, Lea and Flood, 2014)."""
    word = (word + _START) & _MASK
    word = ((word ^ (word >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    word = ((word ^ (word >> 27)) * 0x94D049BB133111EB) & _MASK
    return word ^ (word >> 31)
