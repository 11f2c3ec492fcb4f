"""Codes on shared scales of many small tensors a call: the kernels for one, in a loop.

A row of ``table`` (uint64) tells of a tensor of N elements; its columns are named below. Nothing is
checked.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, types

from ringlet.compressors.kernels.cpu.common.feedback import add, keep_combined
from ringlet.compressors.kernels.cpu.common.intrinsics import pointer
from ringlet.compressors.kernels.cpu.common.norms import clip_at
from ringlet.compressors.kernels.cpu.quantizers.shared_int import TINY, decode, encoder, extents
from ringlet.ring.jit import jit

# Where the values lie, the residual (0: there is none), what is to be sent (the values, or room for
# their sum with the residual), what is quantised (that, or room for it clipped), the result, room
# for scales (one a bucket) and, with a residual, for this rank's own codes; the key and the counter
# of the first random number.
N, VALUES, RESIDUAL, TARGET, QUANTISED, OUT, SCALES, CODES, KEY, FIRST = range(10)
COLUMNS_OF_TABLE = 10


@jit
def measure(table: Any, bucket: int, decay: Any, clip: Any, places: Any) -> None:
    """Write the largest magnitude of each bucket to each tensor's place (float32).

    Where there is room for it, what is measured is clipped at so many root mean squares.
    """
    for t in range(table.shape[0]):
        n = types.intp(table[t, N])
        target = carray(pointer(table[t, TARGET]), n, np.float32)
        if table[t, RESIDUAL]:
            x = carray(pointer(table[t, VALUES]), n, np.float32)
            add(x, carray(pointer(table[t, RESIDUAL]), n, np.float32), decay, target)
        quantised = carray(pointer(table[t, QUANTISED]), n, np.float32)
        if table[t, QUANTISED] != table[t, TARGET]:
            clip_at(target, clip, quantised)
        largest = carray(pointer(places[t]), (n + bucket - 1) // bucket, np.float32)
        extents(quantised, bucket, largest)


@cache
def encoder_of_many(stochastic: bool, wire: str) -> Any:
    """Return the kernel ``encode(table, bucket, levels, largest, places)``.

    It keeps the largest magnitudes of all ranks, which lie at ``largest`` (uint64), as scales, and
    writes each tensor's codes, integers of dtype ``wire``, to its place.
    """
    encode_one, dtype = encoder(stochastic), np.dtype(wire)

    @jit
    def encode(table: Any, bucket: int, levels: Any, largest: Any, places: Any) -> None:
        for t in range(table.shape[0]):
            n = types.intp(table[t, N])
            count = (n + bucket - 1) // bucket
            scales = carray(pointer(table[t, SCALES]), count, np.float32)
            scales[:] = carray(pointer(largest[t]), count, np.float32)
            quantised = carray(pointer(table[t, QUANTISED]), n, np.float32)
            codes = carray(pointer(places[t]), n, dtype)
            encode_one(quantised, scales, levels, bucket, table[t, KEY], table[t, FIRST], codes)
            if table[t, RESIDUAL]:
                own = carray(pointer(table[t, CODES]), n, dtype)
                own[:] = codes

    return encode


@cache
def decoder_of_many(wire: str) -> Any:
    """Return the kernel ``decode(table, bucket, levels, ranks, sums)``.

    It writes the mean over ``ranks`` from sums of codes, which lie at ``sums`` (uint64), and
    residuals where there are some. Scales become the units of a mean's code.
    """
    dtype = np.dtype(wire)

    @jit
    def decode_many(table: Any, bucket: int, levels: Any, ranks: Any, sums: Any) -> None:
        longest = 0
        for t in range(table.shape[0]):
            longest = max(longest, types.intp(table[t, N]))
        room = np.empty(longest, np.float32)
        for t in range(table.shape[0]):
            n = types.intp(table[t, N])
            units = carray(pointer(table[t, SCALES]), (n + bucket - 1) // bucket, np.float32)
            for b in range(units.size):
                unit = units[b] / levels
                units[b] = types.float32(0) if unit < types.float32(TINY) else unit
            own = room[:n]
            if table[t, RESIDUAL]:
                decode(carray(pointer(table[t, CODES]), n, dtype), units, bucket, own)
            for b in range(units.size):
                units[b] /= ranks
            out = carray(pointer(table[t, OUT]), n, np.float32)
            decode(carray(pointer(sums[t]), n, dtype), units, bucket, out)
            if table[t, RESIDUAL]:
                target = carray(pointer(table[t, TARGET]), n, np.float32)
                held = carray(pointer(table[t, RESIDUAL]), n, np.float32)
                keep_combined(target, own, out, held)

    return decode_many
