"""Exact selection of the k largest entries of a block that lies in the first-level cache.

Magnitudes are the bits of a float32 without its sign, as int32: they order like the magnitudes,
NaN on top, and compilers compare them with vectors. Maxima of interleaved groups give a floor
that at least k entries reach; few more do, and bisection among those finds the exact threshold.
"""

from __future__ import annotations

from typing import Any

from numba import njit, types

from ringlet.compressors.kernels.cpu.common.vectors import WIDTH, lowest, reaching

_FEW = 128  # blocks no longer than this are bisected at once


@njit(nogil=True, cache=True)
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


@njit(nogil=True, cache=True)
def pack_indices(picks: Any, k: int, width: int, out: Any) -> None:
    """Pack ``k`` indices of 8, 12 or 16 bits into bytes, least significant first."""
    if width == 8:
        for j in range(k):
            out[j] = types.uint8(picks[j])
    elif width == 16:
        for j in range(k):
            out[2 * j] = types.uint8(picks[j] & 255)
            out[2 * j + 1] = types.uint8(picks[j] >> 8)
    else:
        for j in range(k // 2):
            both = picks[2 * j] | (picks[2 * j + 1] << 12)
            out[3 * j] = types.uint8(both & 255)
            out[3 * j + 1] = types.uint8((both >> 8) & 255)
            out[3 * j + 2] = types.uint8((both >> 16) & 255)
        if k % 2:
            out[3 * (k // 2)] = types.uint8(picks[k - 1] & 255)
            out[3 * (k // 2) + 1] = types.uint8(picks[k - 1] >> 8)


@njit(nogil=True, cache=True)
def unpack_indices(packed: Any, k: int, width: int, limit: int, picks: Any) -> Any:
    """Undo ``pack_indices``; False if an index is not below ``limit``."""
    if width == 8:
        for j in range(k):
            picks[j] = packed[j]
    elif width == 16:
        for j in range(k):
            picks[j] = types.int32(packed[2 * j]) | (types.int32(packed[2 * j + 1]) << 8)
    else:
        for j in range(k):
            low, high = types.int32(packed[j * 3 // 2]), types.int32(packed[j * 3 // 2 + 1])
            both = low | (high << 8)
            picks[j] = both >> 4 if j % 2 else both & 4095
    top = types.int32(0)
    for j in range(k):
        top = max(top, picks[j])
    return top < limit


@njit(nogil=True, cache=True)
def transform(x: Any, basis: Any, out: Any) -> None:
    """Set ``out`` to the sum of x[j] * basis[j]: every element adds in the same order."""
    out[:] = 0
    full = x.size // 4 * 4
    for j in range(0, full, 4):  # four rows at a time load and store ``out`` once
        a, b, c, d = x[j], x[j + 1], x[j + 2], x[j + 3]
        for i in range(out.size):
            total = (out[i] + a * basis[j, i]) + b * basis[j + 1, i]
            out[i] = (total + c * basis[j + 2, i]) + d * basis[j + 3, i]
    for j in range(full, x.size):
        for i in range(out.size):
            out[i] += x[j] * basis[j, i]


@njit(nogil=True, cache=True)
def transform_sparse(picks: Any, values: Any, basis: Any, out: Any) -> None:
    """Do the same for the given entries alone."""
    out[:] = 0
    full = values.size // 4 * 4
    for j in range(0, full, 4):
        a, b, c, d = values[j], values[j + 1], values[j + 2], values[j + 3]
        e, f, g, h = picks[j], picks[j + 1], picks[j + 2], picks[j + 3]
        for i in range(out.size):
            total = (out[i] + a * basis[e, i]) + b * basis[f, i]
            out[i] = (total + c * basis[g, i]) + d * basis[h, i]
    for j in range(full, values.size):
        for i in range(out.size):
            out[i] += values[j] * basis[picks[j], i]
