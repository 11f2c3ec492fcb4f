"""Inputs: what gradients look like, and what they look like on a bad day."""

from __future__ import annotations

import functools

import numpy as np

from ringlet.compressors.core.context import Array

LENGTHS = (0, 1, 2, 7, 31, 64, 100, 513, 1000, 2049, 5000)
# Whole numbers of usual blocks and one more or fewer, and all that are smaller than a block.
FURTHER_LENGTHS = (
    *range(3, 34), 40, 48, 50, 60, 63, 65, 90, 96, 127, 128, 129, 200, 250, 255, 256, 257, 300, 500,
    511, 512, 720, 1023, 1024, 1025, 4096,
)  # fmt: skip
LARGE = (1 << 22) + (1 << 18) + 3  # beyond 65536 buckets of 64
_LONG, _LONGER = 8192, 1 << 20  # values, more of which are seldom kept to be copied again, or never
# Of short vectors with values of any kind.
_SMALL = (1, 1, 2, 2, 3, 5, 8, 13, 21, 34, 48, 55, 63, 65, 72, 80)


def gaussian(n: int, seed: int, scale: float = 1.0) -> Array:
    """Return n normal float32 values."""
    if n > _LONGER:
        return _normal(n, seed, scale)
    return (_long_again if n > _LONG else _normal_again)(n, seed, scale).copy()


def _normal(n: int, seed: int, scale: float) -> Array:
    drawn = np.random.default_rng(seed).standard_normal(n) * scale
    return drawn.astype(np.float32)


# Checks draw the same few for every compressor; to draw them takes longer than most calls do.
_normal_again = functools.lru_cache(1000)(_normal)
_long_again = functools.lru_cache(8)(_normal)


def heavy_tailed(n: int, seed: int) -> Array:
    """Return n values of Student's t with 3 degrees of freedom, a few entries far out."""
    return (_heavy_tailed if n > _LONG else _heavy_tailed_again)(n, seed).copy()


def _heavy_tailed(n: int, seed: int) -> Array:
    return np.random.default_rng(seed).standard_t(3, n).astype(np.float32)


_heavy_tailed_again = functools.lru_cache(1000)(_heavy_tailed)


def spiky(n: int, seed: int) -> Array:
    """Return zeros with one entry in a hundred: the gradient of an embedding."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(n) * (rng.random(n) < 0.01)).astype(np.float32)


def halves(seed: int) -> Array:
    """Return multiples of a half up to 127, which lie between the levels of most quantisers."""
    drawn = np.random.default_rng(seed).integers(-254, 255, 600).astype(np.float32)
    drawn[::25] = 254
    return drawn / np.float32(2)


def spiked(n: int, period: int, below: int) -> Array:
    """Return values of which every ``period``-th is 1, the others 2**-below of alternating sign.

    The worst for what rounds to levels of a scale: all but a few lie between zero and a level.
    """
    x = np.where(np.arange(n) % 2 == 0, 1, -1).astype(np.float32) * np.float32(2.0**-below)
    x[::period] = 1
    return x


@functools.cache
def far_apart() -> tuple[Array, dict[int, slice]]:
    """Return groups of 400 values, each about as far behind the last as 8 or 16 bits count.

    With the places of each group, by its distance to the one before. Not to be changed.
    """
    distances = (255, 256, 257, 65534, 65535, 65536, 65537, 131070, 131071, 131072)
    places, stop = {}, 100_000  # entries that are zero may be selected too, the first ones mostly
    for distance in (1, *distances):
        start = stop - 1 + distance
        stop = start + 400
        places[distance] = slice(start, stop)
    x = np.zeros(stop, np.float32)
    for distance, group in places.items():
        x[group] = gaussian(400, distance)
    return _kept([x])[0], places


@functools.cache
def large() -> Array:
    """Return more than 2^22 values, near ones of many sizes; not to be changed.

    A Gaussian of a prime number of values over and over, which no block, bucket or counter fits.
    Every so many of them are twice, four times and eight times as large as those before.
    """
    once = gaussian(65521, 1) * np.float32(2.0) ** (np.arange(65521) // 977 % 4).astype(np.float32)
    return _kept([np.resize(once, LARGE)])[0]


@functools.cache
def vectors() -> tuple[Array, ...]:
    """Return finite vectors of many kinds and lengths, small ones first; not to be changed."""
    kinds = (gaussian, heavy_tailed, spiky)
    found = [_any_values(n, seed) for seed, n in enumerate(_SMALL)]
    for place, n in enumerate(LENGTHS):
        found += [kind(n, place) for kind in (kinds[place % 3], kinds[(place + 1) % 3])]
    found += [np.zeros(n, np.float32) for n in (1, 64, 513)]
    return _kept(found)


@functools.cache
def special() -> tuple[Array, ...]:
    """Return short vectors of any float32 at all; not to be changed.

    Zeros, subnormal numbers, the largest ones, infinities and NaN, alone and mixed.
    """
    limits = np.finfo(np.float32)
    one = [0.0, -0.0, limits.smallest_subnormal, limits.tiny, limits.eps, 1.0, limits.max]
    found = [np.full(n, value, np.float32) for value in one for n in (1, 3, 70)]
    found += [_any_values(n, seed) for seed, n in enumerate(_SMALL)]
    for seed, n in enumerate(_SMALL):
        rng = np.random.default_rng(seed)
        bits = rng.integers(0, 1 << 32, max(n, 1), dtype=np.uint32).view(np.float32)
        odd = np.array([np.nan, np.inf, -np.inf, limits.max, limits.smallest_subnormal], "f4")
        bits[rng.integers(0, bits.size, 2)] = odd[rng.integers(0, odd.size, 2)]
        found.append(bits)
    return _kept(found)


def _any_values(n: int, seed: int) -> Array:
    """Return n finite values within 2**80, so that squares and sums are finite.

    By turns: of one size, whole numbers, of every size there is, and of every second size or 0.
    """
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(n) * 2.0 ** rng.integers(-60, 60)
    if seed % 4 == 1:
        values = rng.integers(-3, 4, n).astype(float)
    elif seed % 4 >= 2:
        values = rng.uniform(1, 2, n) * 2.0 ** rng.integers(-149, 79, n) * rng.choice([-1, 1], n)
        values[rng.random(n) < (0.5 if seed % 4 == 3 else 0)] = 0
    return values.astype(np.float32)


def _kept(found: list[Array]) -> tuple[Array, ...]:
    for x in found:
        x.flags.writeable = False
    return tuple(found)
