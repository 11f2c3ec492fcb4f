"""Sums of words times weights, which checksums are made of: by NumPy, or by compiled kernels.

Both give the same number, so ranks need not agree on who adds. NumPy takes eight times as long, 0.3
ms a MiB, but loading Numba takes half a second: a process that reduces little is done before. So
NumPy adds what is small, until that has taken about as long.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ringlet.ring.dtypes import Array

STEP = 0x3C6EF372  # weight i is i * STEP + 1 modulo 2**32: distinct for 2**31 words
MIX = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
MOST = 1 << 20  # bytes that NumPy adds at once
BUDGET = 1 << 30  # bytes that it adds in all
CALL = 1 << 15  # bytes that it would add in the time that a call takes by itself
_BLOCK = 4096  # words: they are still in the nearest cache when NaNs are looked for
_PART = 1 << 13  # words that NumPy adds at once
_WEIGHTS = np.arange(_PART, dtype=np.uint32) * np.uint32(STEP) + np.uint32(1)
_FIRST = _WEIGHTS.astype(np.uint64)


class Choice:
    """Whether to use kernels; ``spent`` are the bytes that NumPy has added."""

    def __init__(self) -> None:
        self.spent = 0

    def compiled(self, nbytes: int) -> bool:
        """Whether kernels add the next ``nbytes``: they are many, or not the first ones.

        Where Numba was imported already, they take no half second.
        """
        if nbytes > MOST or self.spent > BUDGET or "numba" in sys.modules:
            return True
        self.spent += nbytes + CALL
        return False


choice = Choice()


def weighted_sum(words: Array) -> int:
    """Return the sum of ``words`` (uint32) times their weights, modulo 2**64."""
    if choice.compiled(words.nbytes):
        return int(_kernel(_weighted_sum)(words))
    return _added(words)


def weighted_sum_and_nan(words: Array, magnitude: int, lacking: int) -> tuple[int, int]:
    """Return that sum, and the bits that are set in any word's ``magnitude`` plus ``lacking``."""
    bits, more = np.uint32(magnitude), np.uint32(lacking)
    if choice.compiled(words.nbytes):
        total, reached = _kernel(_weighted_sum_and_nan)(words, bits, more)
        return int(total), int(reached)
    return _added(words), int(np.bitwise_or.reduce((words & bits) + more, initial=0))


def canonical_sum(lanes: Array, magnitude: int, infinity: int) -> int:
    """Return a sum of ``lanes``, floats as unsigned integers, that takes NaNs for one, and zeros.

    ``magnitude`` are the bits that are not the sign, ``infinity`` those of an infinity.
    """
    kind = lanes.dtype.type
    if choice.compiled(lanes.nbytes):
        return int(_kernel(_canonical_sum)(lanes, kind(magnitude), kind(infinity)))
    absolute = lanes & kind(magnitude)
    words = np.where(absolute > kind(infinity), kind(magnitude), lanes)
    words[absolute == 0] = 0
    total = 0
    for part, weights in _parts(words):
        high = part >> np.uint64(32)
        total += int(np.dot(part, weights)) + int(np.dot(high, weights ^ np.uint64(MIX)))
    return total & MASK


def load() -> None:
    """Load the kernels for floats and payloads now, where nobody waits."""
    words = np.zeros(1, np.uint32)
    _kernel(_weighted_sum)(words)
    _kernel(_weighted_sum_and_nan)(words, np.uint32(0), np.uint32(0))


def _added(words: Array) -> int:
    if words.size <= _PART:
        return int(np.dot(words.astype(np.uint64), _FIRST[: words.size]))
    return sum(int(np.dot(part, weights)) for part, weights in _parts(words)) & MASK


def _parts(words: Array) -> Iterator[tuple[Array, Array]]:
    """Yield some ``words`` after the other with their weights, both as uint64."""
    for start in range(0, words.size, _PART):
        part = words[start : start + _PART].astype(np.uint64)
        weights = _WEIGHTS[: part.size] + np.uint32(start * STEP & 0xFFFFFFFF)
        yield part, weights.astype(np.uint64)


def _weighted_sum(words: Any) -> Any:
    total = np.uint64(0)
    for i in range(words.size):
        weight = np.uint32(np.uint32(i) * np.uint32(STEP) + np.uint32(1))
        total += np.uint64(words[i]) * np.uint64(weight)
    return total


def _weighted_sum_and_nan(words: Any, magnitude: Any, lacking: Any) -> Any:
    total, reached = np.uint64(0), np.uint32(0)
    for start in range(0, words.size, _BLOCK):
        block = words[start : start + _BLOCK]
        part = np.uint64(0)
        for i in range(block.size):
            weight = np.uint32(np.uint32(start + i) * np.uint32(STEP) + np.uint32(1))
            part += np.uint64(block[i]) * np.uint64(weight)
        total += part
        for i in range(block.size):
            absolute = np.uint32(block[i] & magnitude)
            reached = np.uint32(reached | np.uint32(absolute + lacking))
    return total, reached


def _canonical_sum(words: Any, magnitude: Any, infinity: Any) -> Any:
    total = np.uint64(0)
    for i in range(words.size):
        weight = np.uint64(np.uint32(np.uint32(i) * np.uint32(STEP) + np.uint32(1)))
        absolute = words[i] & magnitude
        word = np.uint64(magnitude) if absolute > infinity else np.uint64(words[i])
        word = np.uint64(0) if absolute == 0 else word
        total += word * weight + (word >> np.uint64(32)) * (weight ^ np.uint64(MIX))
    return total


@functools.cache
def _kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    from ringlet.ring.jit import jit

    kernel: Callable[..., Any] = jit(function)
    return kernel
