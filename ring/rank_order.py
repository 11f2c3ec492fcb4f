"""Sums in rank order: what transports that lack an operation build it from, and shards.

Such a transport builds an operation from ``combine`` and its own all-to-all: every shard is
computed on one rank, so all ranks hold the same bits, whatever NaNs and signed zeros went in.
16-bit floats are widened to float32, combined there, and rounded once (to nearest, ties to even).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringlet.ring.communicator import Communicator, ReduceOp, reducing
from ringlet.ring.dtypes import Array, storage
from ringlet.ring.float16 import HALVES, kernels

BLOCK = 32768  # elements; two float32 blocks stay in a level-2 cache

UFUNCS: dict[ReduceOp, np.ufunc] = {
    ReduceOp.SUM: np.add,
    ReduceOp.MIN: np.minimum,
    ReduceOp.MAX: np.maximum,
    ReduceOp.PRODUCT: np.multiply,
}


def combine(pieces: Sequence[Array], outs: Sequence[Array], op: ReduceOp, name: str) -> None:
    """Combine equally long ``pieces`` in order and write the result to every array of ``outs``.

    An array may be both a piece and an out. 16-bit floats are accumulated in float32. All NaNs of
    the result have the same bits.
    """
    reducing(op)
    ufunc = UFUNCS[op]
    if len(pieces) == 1:
        for out in outs:
            if out is not pieces[0]:
                out[:] = pieces[0]
        return
    half = kernels(name) if name in HALVES else None
    dtype = np.dtype(np.float32) if half else storage(name)
    total = pieces[0].size
    if half:
        pieces = [piece.view(np.uint16) for piece in pieces]
        outs = [out.view(np.uint16) for out in outs]
    accumulator = np.empty(min(total, BLOCK), dtype)
    widened = np.empty_like(accumulator) if half and op != ReduceOp.SUM else accumulator
    rounded = np.empty(accumulator.size, np.uint16) if half else accumulator
    with np.errstate(all="ignore"):
        for start in range(0, total, BLOCK):
            block = slice(start, min(start + BLOCK, total))
            n = block.stop - start
            sums = accumulator[:n]
            if half is None:
                ufunc(pieces[0][block], pieces[1][block], out=sums)
                for piece in pieces[2:]:
                    ufunc(sums, piece[block], out=sums)
                settle_nans(sums)
            else:
                half.widen(pieces[0][block], sums)
                for piece in pieces[1:]:
                    if op == ReduceOp.SUM:
                        half.add(piece[block], sums)
                    else:
                        half.widen(piece[block], widened[:n])
                        ufunc(sums, widened[:n], out=sums)
                half.narrow(sums, rounded[:n])
            for out in outs:
                out[block] = rounded[:n]


def settle_nans(buffer: Array) -> None:
    """Give every NaN the same bits: whose NaN a sum of two returns depends on their order."""
    if buffer.size and buffer.dtype.kind == "f" and np.isnan(buffer.min()):
        buffer[np.isnan(buffer)] = np.nan


def even_counts(total: int, size: int) -> list[int]:
    """Divide ``total`` elements into ``size`` shards that differ by one element at most."""
    small, larger = divmod(total, size)
    return [small + (r < larger) for r in range(size)]


class Scratch:
    """Working memory that a communicator keeps between calls: fresh pages cost more than sums."""

    def __init__(self) -> None:
        self._bytes = np.empty(0, np.uint8)

    def take(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Return ``count`` uninitialised elements, valid until the next call."""
        nbytes = count * dtype.itemsize
        if self._bytes.size < nbytes:
            self._bytes = np.empty(nbytes, np.uint8)
        return self._bytes[:nbytes].view(dtype)


def exchange_shards(
    comm: Communicator, send: Array, counts: Sequence[int], scratch: Scratch
) -> list[Array]:
    """Return every rank's piece for this rank, in rank order."""
    mine = counts[comm.rank]
    shards = scratch.take(mine * comm.size, send.dtype)
    comm.alltoall(send, shards, counts, [mine] * comm.size)
    return [shards[r * mine : (r + 1) * mine] for r in range(comm.size)]


def combine_everywhere(
    comm: Communicator, buffer: Array, op: ReduceOp, name: str, scratch: Scratch
) -> None:
    """Allreduce as an all-to-all, a reduction, and an all-gather: the wire bytes of a ring."""
    counts = even_counts(buffer.size, comm.size)
    shards = exchange_shards(comm, buffer, counts, scratch)
    combine(shards, shards[:1], op, name)
    comm.allgather(shards[0], buffer, counts)
