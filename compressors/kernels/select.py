"""Exact selection of the k entries of largest magnitude, lowest index first among equals.

One pass over memory in the usual case: a sample gives a threshold that a little more than k
entries pass, they are collected, and the exact threshold is found among them. When the sample
misleads, a histogram of all entries gives the threshold. The result is the same either way.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit, types

from ringlet.compressors.kernels.intrinsics import f32_bits

_SAMPLE = 8192
_BLOCK = 1024
ROOM = _SAMPLE // 2 + 2048


@njit(nogil=True, cache=True)
def topk(x: Any, k: int, candidates: Any, room: Any, indices: Any, values: Any) -> None:
    """Write the ``k`` largest |x| to ``indices`` (uint32, ascending) and ``values`` (float32).

    ``candidates`` (uint32) is scratch for at least x.size entries, ``room`` (int64) for ROOM. NaN
    counts as largest.
    """
    count = 0
    sample, histogram = room[: _SAMPLE // 2].view(np.uint32), room[_SAMPLE // 2 :]
    if x.size > 4 * _SAMPLE:
        floor = _sampled_threshold(x, k, sample)
        count = _collect(x, floor, candidates, min(x.size, 4 * k + 2 * _BLOCK))
    if count < k:
        whole = k >= x.size
        floor = types.uint32(0) if whole else _threshold(x, candidates, 0, k, True, histogram)
        count = _collect(x, floor, candidates, x.size)
    threshold = _threshold(x, candidates, count, k, False, histogram)
    above = 0
    for j in range(count):
        above += _magnitude(x[candidates[j]]) > threshold
    equal = k - above
    taken = 0
    for j in range(count):
        i = candidates[j]
        bits = _magnitude(x[i])
        if bits > threshold or (bits == threshold and equal > 0):
            equal -= bits == threshold
            indices[taken] = i
            values[taken] = x[i]
            taken += 1


@njit(nogil=True, cache=True)
def scatter(indices: Any, values: Any, out: Any) -> bool:
    """Overwrite ``out`` with zeros and the given entries; False if an index lies outside."""
    out[:] = 0
    for j in range(indices.size):
        if indices[j] >= out.size:
            return False
        out[indices[j]] = values[j]
    return True


@njit(nogil=True, cache=True)
def scatter_add(indices: Any, values: Any, out: Any) -> bool:
    """Add the given entries to ``out``; False if an index lies outside."""
    for j in range(indices.size):
        if indices[j] >= out.size:
            return False
        out[indices[j]] += values[j]
    return True


@njit(inline="always")
def _magnitude(value: Any) -> Any:
    return f32_bits(value) & types.uint32(0x7FFFFFFF)


@njit(nogil=True, cache=True)
def _collect(x: Any, threshold: Any, candidates: Any, capacity: int) -> int:
    """List the indices of entries of at least ``threshold``; 0 if they exceed ``capacity``."""
    count = 0
    for start in range(0, x.size, _BLOCK):
        block = x[start : start + _BLOCK]
        if count + block.size > capacity:  # near the end of a full list, count before writing
            more = 0
            for i in range(block.size):
                more += _magnitude(block[i]) >= threshold
            if count + more > capacity:
                return 0
            for i in range(block.size):
                if _magnitude(block[i]) >= threshold:
                    candidates[count] = start + i
                    count += 1
            continue
        for i in range(block.size):  # without a branch: most entries fail, in no pattern
            candidates[count] = start + i
            count += _magnitude(block[i]) >= threshold
    return count


@njit(nogil=True, cache=True)
def _sampled_threshold(x: Any, k: int, sample: Any) -> Any:
    """Estimate a magnitude that a little more than ``k`` entries reach, from strided entries."""
    stride = x.size // _SAMPLE
    for j in range(_SAMPLE):
        sample[j] = _magnitude(x[j * stride])
    expected = k / x.size * _SAMPLE
    rank = int(expected + 4.0 * np.sqrt(expected) + 2.0)
    if rank >= _SAMPLE:
        return types.uint32(0)
    sample.sort()
    return sample[_SAMPLE - rank]


@njit(nogil=True, cache=True)
def _threshold(
    x: Any, candidates: Any, count: int, k: int, everything: bool, histogram: Any
) -> Any:
    """Return the k-th largest magnitude among the candidates, or among ``everything``.

    Three passes over the 31 bits of a magnitude: 11, 10 and 10 bits, most significant first.
    """
    prefix = types.uint32(0)
    left = k
    n = x.size if everything else count
    for level in range(3):
        shift = types.uint32(20 - 10 * level)
        histogram[:] = 0
        for j in range(n):
            bits = _magnitude(x[j] if everything else x[candidates[j]])
            if level == 0 or (bits >> (shift + types.uint32(10))) == prefix:
                histogram[(bits >> shift) & types.uint32(2047 if level == 0 else 1023)] += 1
        bin_ = 2047 if level == 0 else 1023
        while histogram[bin_] < left:
            left -= histogram[bin_]
            bin_ -= 1
        prefix = (
            types.uint32(bin_) if level == 0 else (prefix << types.uint32(10)) | types.uint32(bin_)
        )
    return prefix
