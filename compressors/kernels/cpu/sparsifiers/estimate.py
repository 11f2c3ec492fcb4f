"""What thresholds are estimated from: a random sample, and sums of what exceeds another one."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import njit, types

from ringlet.compressors.kernels.cpu.common.intrinsics import bits_f32, magnitude_bits
from ringlet.compressors.kernels.cpu.common.ordered_sums import LANES, fold
from ringlet.compressors.kernels.cpu.common.rng import squares
from ringlet.compressors.kernels.cpu.sparsifiers.selection import (
    all_listed,
    largest_listed,
    reaching,
)
from ringlet.compressors.kernels.cpu.sparsifiers.topk import kth
from ringlet.ring.jit import jit

ATTEMPTS = 10  # of which each but the first lowers the threshold
CHUNK = 1 << 16  # elements summed in one piece, however many threads there are


@jit
def sample(x: Any, key: Any, magnitudes: Any) -> None:
    """Fill ``magnitudes`` (int32) with those of entries drawn at random, with replacement."""
    n = types.uint64(x.size)
    for j in range(magnitudes.size):
        drawn = types.uint64(squares(key, types.uint64(j)))
        magnitudes[j] = magnitude_bits(x[(drawn * n) >> types.uint64(32)])


@jit
def exceeding(x: Any, threshold: Any, chunk: int, sums: Any, counts: Any) -> None:
    """Add up |x| and the number of entries of at least ``threshold``, chunk by chunk."""
    floor = types.int32(threshold)
    for c in range(sums.size):
        lanes = np.zeros(LANES, np.float64)
        count = 0
        piece = x[c * chunk : (c + 1) * chunk]
        for start in range(0, piece.size, LANES):
            block = piece[start : start + LANES]
            found = types.uint32(0)
            for i in range(block.size):
                bits = magnitude_bits(block[i])
                passes = bits >= floor
                lanes[i] += types.float64(bits_f32(types.uint32(bits)) if passes else 0.0)
                found += types.uint32(passes)
            count += found
        sums[c] = fold(lanes)
        counts[c] = count


@njit(nogil=True)
def about(
    x: Any, k: int, threshold: float, listed: Any, found: Any, indices: Any, values: Any
) -> Any:
    """Select about ``k`` entries by an estimated threshold, which may not be finite."""
    attempts = ATTEMPTS if math.isfinite(threshold) else 0
    for _ in range(attempts):
        count = reaching(x, magnitude_bits(types.float32(threshold)), listed, found)
        if count > 1.3 * k:
            return largest_listed(x, count, k, listed, found, indices, values)
        if count >= 0.8 * k:
            return all_listed(x, count, listed, indices, values)
        threshold *= 0.8
    count = reaching(x, 0, listed, found)
    return largest_listed(x, count, k, listed, found, indices, values)


@njit(nogil=True)
def by_sample(
    x: Any, plan: Any, key: Any, listed: Any, found: Any, indices: Any, values: Any
) -> Any:
    """Select by a random sample, for ``selection.selector``.

    The plan is how many entries are to travel, how many are sampled, and the rank that the
    threshold has among these; 0 where all are sampled.
    """
    k, drawn, rank = int(plan[0]), int(plan[1]), int(plan[2])
    threshold = np.nan
    if rank > 0:
        magnitudes = found[:drawn]
        sample(x, key, magnitudes)
        reached, _ = kth(magnitudes, rank, 0)
        least = types.int32(0x7FFFFFFF)
        for j in range(drawn):
            if magnitudes[j] >= reached:
                least = min(least, magnitudes[j])
        threshold = types.float64(bits_f32(types.uint32(least)))
    return about(x, k, threshold, listed, found, indices, values)


@njit(nogil=True)
def by_fit(x: Any, plan: Any, key: Any, listed: Any, found: Any, indices: Any, values: Any) -> Any:
    """Select by fitted tails, for ``selection.selector``.

    The plan is how many entries are to travel, and each stage's weight; 0 behind the last.
    """
    k, threshold = int(plan[0]), 0.0 if plan[1] > 0 else np.nan
    chunks = (x.size + CHUNK - 1) // CHUNK
    sums, counts = np.empty(chunks, np.float64), np.empty(chunks, np.int64)
    for stage in range(1, plan.size):
        if plan[stage] == 0 or not math.isfinite(threshold):
            break
        exceeding(x, magnitude_bits(types.float32(threshold)), CHUNK, sums, counts)
        total, count = 0.0, 0
        for c in range(chunks):
            total += sums[c]
            count += counts[c]
        if count == 0:
            break
        threshold += (total / count - threshold) * plan[stage]
    return about(x, k, threshold, listed, found, indices, values)
