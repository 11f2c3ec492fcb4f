"""Inputs: what gradients look like, and what they look like on a bad day."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringlet.compressors.context import Array

LENGTHS = (0, 1, 2, 7, 31, 64, 100, 513, 1000, 2049, 5000)


def gaussian(n: int, seed: int, scale: float = 1.0) -> Array:
    """Return n normal float32 values."""
    drawn = np.random.default_rng(seed).standard_normal(n) * scale
    return drawn.astype(np.float32)


def heavy_tailed(n: int, seed: int) -> Array:
    """Return n values of Student's t with 3 degrees of freedom, a few entries far out."""
    return np.random.default_rng(seed).standard_t(3, n).astype(np.float32)


def spiky(n: int, seed: int) -> Array:
    """Return zeros with one entry in a hundred: the gradient of an embedding."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(n) * (rng.random(n) < 0.01)).astype(np.float32)


def vectors(longest: int = 5000) -> Any:
    """Return a Hypothesis strategy of finite float32 vectors of many kinds and lengths."""
    from hypothesis import strategies as st

    lengths = st.sampled_from([n for n in LENGTHS if n <= longest])
    seeds = st.integers(0, 1000)
    kinds = st.sampled_from([gaussian, heavy_tailed, spiky])
    drawn = st.builds(lambda kind, n, seed: kind(n, seed), kinds, lengths, seeds)
    return st.one_of(drawn, small(), st.builds(np.zeros, lengths, st.just(np.float32)))


def small(allow_special: bool = False) -> Any:
    """Return a strategy of short vectors of arbitrary values, which shrink well.

    Values stay within 2**80, so that squares and sums are finite, unless ``allow_special``, which
    adds infinities, NaN and the largest numbers.
    """
    from hypothesis import strategies as st
    from hypothesis.extra import numpy as hnp

    values = st.floats(-(2.0**80), 2.0**80, width=32)
    if allow_special:
        values = st.floats(width=32, allow_nan=True, allow_infinity=True)
    return hnp.arrays(np.float32, st.integers(0, 80), elements=values)
