"""Exact selection of the k entries of largest magnitude, lowest index first among equals.

One pass over memory in the usual case: a sample gives a floor that a little more than k entries
reach, they are listed with their magnitudes, and bisection among those finds the exact threshold.
When the sample misleads, all entries are listed. The result is the same either way.

With ``feedback`` the entries are those of x + decay * held, which replaces ``held`` in the same
pass where it is finite. Without it ``held`` is not looked at.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types

from ringlet.compressors.kernels.cpu.common.intrinsics import magnitude_bits, pointer
from ringlet.compressors.kernels.cpu.common.scatter import scatter, scatter_add
from ringlet.compressors.kernels.cpu.common.target import target_at
from ringlet.compressors.kernels.cpu.common.vectors import (
    WIDTH,
    advance,
    lowest,
    reaching,
    reaching_sum,
)
from ringlet.ring.jit import jit

_FEW = 128  # blocks no longer than this are bisected at once
SAMPLE = 8192
INFINITE = 0x7F800000


@jit
def sampled_floor(x: Any, held: Any, decay: Any, feedback: bool, k: int, sample: Any) -> Any:
    """Return a magnitude that a little more than ``k`` entries reach, by strided entries.

    At most that of infinity. ``sample`` (int32) is scratch for SAMPLE entries.
    """
    if x.size <= 4 * SAMPLE:
        return types.int32(0)
    stride = x.size // SAMPLE
    for j in range(SAMPLE):
        sample[j] = magnitude_bits(target_at(x, held, decay, j * stride, feedback))
    expected = k / x.size * SAMPLE
    rank = int(expected + 4.0 * np.sqrt(expected) + 2.0)
    if rank >= SAMPLE:
        return types.int32(0)
    return min(kth(sample[:SAMPLE], rank, rank // 8)[0], types.int32(INFINITE))


@jit
def collect(
    x: Any, held: Any, decay: Any, feedback: bool, first: int, floor: Any, listed: Any, found: Any
) -> int:
    """List ``first + i`` and the magnitude of every entry that reaches ``floor``; return how many.

    ``listed`` (uint32) and ``found`` (int32) have room for all of x.
    """
    count = 0
    full = x.size // WIDTH * WIDTH
    for at in range(0, full, WIDTH):
        if feedback:
            mask = reaching_sum(x, held, decay, at, floor)
        else:
            mask = reaching(x, at, floor)
        top = types.int32(0)
        while mask:
            i = at + lowest(mask)
            magnitude = magnitude_bits(target_at(x, held, decay, i, feedback))
            listed[count], found[count] = first + i, magnitude
            top = max(top, magnitude)
            count += 1
            mask &= mask - types.uint32(1)
        if feedback:
            if top < INFINITE:
                advance(x, held, decay, at)
            else:
                for i in range(at, at + WIDTH):
                    _advance_one(x, held, decay, i)
    for i in range(full, x.size):
        magnitude = magnitude_bits(target_at(x, held, decay, i, feedback))
        if magnitude >= floor:
            listed[count], found[count] = first + i, magnitude
            count += 1
        if feedback:
            _advance_one(x, held, decay, i)
    return count


@jit
def take(
    x: Any,
    held: Any,
    decay: Any,
    feedback: bool,
    listed: Any,
    found: Any,
    indices: Any,
    values: Any,
) -> None:
    """Fill ``indices`` (uint32) and ``values`` with the largest of what ``collect`` listed.

    With feedback those that are finite are zeroed in ``held``. Overwrites what was listed.
    """
    k = values.size
    threshold, reach = kth(found, k, 0)
    keep_largest(found, threshold, reach, k, listed, listed)
    keep_largest(found, threshold, reach, k, found, found)
    for j in range(k):
        i = listed[j]
        indices[j] = i
        if not feedback:
            values[j] = x[i]
        elif found[j] < INFINITE:
            values[j] = held[i]
            held[i] = types.float32(0)
        else:
            values[j] = x[i] + decay * held[i]


@jit
def encode_many(tensors: Any, payloads: Any, decay: Any, ratio: Any, feedback: bool) -> None:
    """Select a share of the entries of each tensor, in one call for all.

    Rows of ``tensors`` (uint64) tell where values and the residual lie; those of ``payloads`` how
    many values there are, and where indices and values of what is sent lie. Nothing is checked.
    """
    longest = 0
    for t in range(payloads.shape[0]):
        longest = max(longest, types.intp(payloads[t, 0]))
    listed, found = np.empty(longest, np.uint32), np.empty(longest, np.int32)
    sample = np.empty(SAMPLE, np.int32)
    for t in range(payloads.shape[0]):
        n = types.intp(payloads[t, 0])
        if n == 0:
            continue
        x = carray(pointer(tensors[t, 0]), n, np.float32)
        held = carray(pointer(tensors[t, 1]), n if feedback else 0, np.float32)
        k = _count(n, ratio)
        indices = carray(pointer(payloads[t, 1]), k, np.uint32)
        values = carray(pointer(payloads[t, 2]), k, np.float32)
        floor = sampled_floor(x, held, decay, feedback, k, sample)
        count = collect(x, held, decay, feedback, 0, floor, listed, found)
        if count < k:  # the sample was misleading
            _list_all(x, held, feedback, count, listed, found)
            count = n
        take(x, held, decay, feedback, listed[:count], found[:count], indices, values)


@njit(inline="always")
def decode_placed(places: Any, add: bool, out: Any, options: Any) -> Any:
    """Decode one of many tensors, for ``common.batched.batch_decoder``; the option is the ratio.

    False for an index outside.
    """
    k = _count(out.size, options[0])
    indices = carray(pointer(places[1]), k, np.uint32)
    values = carray(pointer(places[2]), k, np.float32)
    return scatter_add(indices, values, out) if add else scatter(indices, values, out)


@njit(inline="always")
def _count(n: Any, ratio: Any) -> Any:
    return min(n, max(1, int(n * ratio * (1 + 1e-12))))  # as TopK.count


@njit(nogil=True)
def _list_all(x: Any, held: Any, feedback: bool, count: int, listed: Any, found: Any) -> None:
    """List every entry, after ``count`` have been listed by ``collect``."""
    unread = count - 1  # from the last one on, so that nothing is overwritten that is still needed
    for back in range(1, x.size + 1):
        i = x.size - back
        if unread >= 0 and listed[unread] == i:
            magnitude = found[unread]
            unread -= 1
        else:  # finite: the residual has it
            magnitude = magnitude_bits(held[i] if feedback else x[i])
        listed[i], found[i] = i, magnitude


@njit(inline="always")
def _advance_one(x: Any, held: Any, decay: Any, i: Any) -> None:
    target = x[i] + decay * held[i]
    if magnitude_bits(target) < INFINITE:
        held[i] = target


@jit
def select(magnitudes: Any, k: int, picks: Any, found: Any, maxima: Any) -> None:
    """Write the indices of the ``k`` largest to ``picks``, ascending, lowest first among equals.

    ``picks`` and ``maxima`` (int32) and ``found`` (int32) are as long as a block, ``picks`` one
    longer: entries behind the k-th are scratch.
    """
    n = magnitudes.size
    if k == n:
        for i in range(n):
            picks[i] = i
        return
    count = 0
    if n > _FEW and 8 * k <= n:
        floor = _floor(magnitudes, k, maxima)
        count = _collect(magnitudes, floor, picks, found)
        threshold, reach = kth(found[:count], k, 0)
        keep_largest(found[:count], threshold, reach, k, picks, picks)
    else:
        for i in range(n):
            picks[i] = i
        threshold, reach = kth(magnitudes, k, 0)
        keep_largest(magnitudes, threshold, reach, k, picks, picks)


@njit(nogil=True)
def _floor(magnitudes: Any, k: int, maxima: Any) -> Any:
    """Return a magnitude that at least ``k`` entries reach: the k-th largest of some maxima."""
    groups = 64
    while groups < 4 * k and 2 * groups <= magnitudes.size:
        groups *= 2
    maxima[:groups] = 0
    for start in range(0, magnitudes.size, groups):
        piece = magnitudes[start : start + groups]
        for i in range(piece.size):
            maxima[i] = max(maxima[i], piece[i])
    return kth(maxima[:groups], k, k // 4)[0]


@njit(nogil=True)
def _collect(magnitudes: Any, floor: Any, picks: Any, found: Any) -> int:
    count = 0
    full = magnitudes.size // WIDTH * WIDTH
    for at in range(0, full, WIDTH):
        mask = reaching(magnitudes, at, floor)
        while mask:
            i = at + lowest(mask)
            picks[count], found[count] = i, magnitudes[i]
            count += 1
            mask &= mask - types.uint32(1)
    for i in range(full, magnitudes.size):
        if magnitudes[i] >= floor:
            picks[count], found[count] = i, magnitudes[i]
            count += 1
    return count


@njit(nogil=True)
def kth(values: Any, k: int, slack: int) -> Any:
    """Return a threshold reached by k values, or by k to k + ``slack``, or the k-th largest.

    And by how many it is reached.
    """
    low, high = types.int32(2147483647), types.int32(0)
    for i in range(values.size):
        low, high = min(low, values[i]), max(high, values[i])
    reach, least, most = types.int32(values.size), types.int32(k), types.int32(k + slack)
    while low < high:  # without branches, which would be mispredicted half of the time
        middle = types.int32(low + ((high - low + 1) >> 1))
        count = types.uint32(0)
        for i in range(values.size):
            count = types.uint32(count + types.uint32(values[i] >= middle))
        found = types.int32(count)
        enough = found >= least
        low = middle if enough else low
        reach = found if enough else reach
        high = high if enough else types.int32(middle - 1)
        high = low if enough & (found <= most) else high
    return low, reach


@njit(nogil=True)
def keep_largest(values: Any, threshold: Any, reach: int, k: int, indices: Any, picks: Any) -> None:
    """Keep the ``k`` indices whose values are largest; both arrays may be one.

    ``reach`` values reach the threshold: more than k where some equal it.
    """
    taken = types.uint64(0)
    if reach == k:
        for i in range(types.uint64(values.size)):
            picks[taken] = indices[i]
            taken += types.uint64(values[i] >= threshold)
        return
    equal = k
    for i in range(values.size):
        equal -= values[i] > threshold
    for i in range(types.uint64(values.size)):
        tied = values[i] == threshold
        kept = (values[i] > threshold) | (tied & (equal > 0))
        equal -= tied & kept
        picks[taken] = indices[i]
        taken += types.uint64(kept)
