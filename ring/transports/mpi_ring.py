"""A ring allreduce over MPI's sends and receives, for buffers that are large.

MPI's own allreduce works on fresh memory, piece by piece as large as a shard. Here received blocks
lie in memory that is kept, small enough for the cache, and the next one travels while one is added:
twice as fast from 16 MB on. Every element is computed on one rank, which settles its bits for all.
The ring has rank r send to rank r + 1, so that ranks of one host should be numbered in a row.
"""

from __future__ import annotations

from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ringlet.ring.dtypes import Array
from ringlet.ring.rank_order import Scratch, even_counts
from ringlet.ring.transports.mpi_waits import wait_at_rest

LEAST = 1 << 19  # bytes of a shard from which the ring beats MPI's own algorithms
BLOCK = 1 << 20  # bytes received at a time


def ring_allreduce(mpi: Any, comm: Any, buffer: Array, ufunc: np.ufunc, scratch: Scratch) -> None:
    """Combine ``buffer`` in place by ``ufunc``: W-1 steps that reduce, W-1 that gather."""
    rank, size = comm.Get_rank(), comm.Get_size()
    right, left = (rank + 1) % size, (rank - 1) % size
    ends = [0, *accumulate(even_counts(buffer.size, size))]
    shards = [buffer[a:b] for a, b in pairwise(ends)]
    most = BLOCK // buffer.itemsize
    slots = scratch.take(2 * most, buffer.dtype).reshape(2, most)

    def send(array: Array) -> Any:
        return comm.Isend([array, array.nbytes, mpi.BYTE], right)

    def receive(array: Array) -> Any:
        return comm.Irecv([array, array.nbytes, mpi.BYTE], left)

    with np.errstate(all="ignore"):
        for step in range(size - 1):
            sends = [send(block) for block in _blocks(shards[(rank - step) % size], most)]
            blocks = _blocks(shards[(rank - step - 1) % size], most)
            coming = receive(slots[0, : blocks[0].size])
            for i, block in enumerate(blocks):
                arriving, here = coming, slots[i % 2, : block.size]
                if i + 1 < len(blocks):
                    coming = receive(slots[(i + 1) % 2, : blocks[i + 1].size])
                wait_at_rest(arriving)
                ufunc(block, here, out=block)
            for gone in sends:
                wait_at_rest(gone)
    for step in range(size - 1):
        gone = send(shards[(rank + 1 - step) % size])
        wait_at_rest(receive(shards[(rank - step) % size]))
        wait_at_rest(gone)


def _blocks(shard: Array, most: int) -> list[Array]:
    return [shard[start : start + most] for start in range(0, shard.size, most)]
