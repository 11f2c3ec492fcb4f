"""An allreduce of plain values as steps of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import cast

from ringlet.ring.communicator import Communicator, ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.ring.pipeline import Steps, Wire
from ringlet.ring.rank_order import combine, even_counts
from ringlet.ring.transports.hierarchical import BETWEEN, HierarchicalCommunicator

LEAST = 1 << 17  # bytes over all ranks from which two collectives that overlap beat one that waits


def allreduce_steps(
    lane: Callable[[int], Communicator],
    buffer: Array,
    op: ReduceOp,
    dtype: str,
    allocate: Callable[[int], Array],
) -> Steps:
    """Combine ``buffer`` over all ranks in place, as ``Communicator.allreduce`` does.

    Over two levels each level's collective is a step of its own. What the transport does not reduce
    itself is summed here, between two collectives. ``lane(i)`` makes collective i, counted from 0:
    one communicator, or siblings of it. ``allocate`` returns that many bytes (uint8).
    """
    comm = lane(0)
    if comm.splits(buffer):
        yield from _through_levels(lane, buffer, op, dtype, allocate)
        return
    rank, size = comm.rank, comm.size
    nbytes = (size - 1) / size * buffer.nbytes
    if comm.reduces(op, dtype) or buffer.nbytes * size < max(LEAST, comm.gathered):
        yield Wire(partial(comm.allreduce, buffer, op, dtype), 2 * nbytes)
        return
    counts = even_counts(buffer.size, size)
    mine = counts[rank]
    arrived = allocate(mine * size * buffer.itemsize).view(buffer.dtype)
    yield Wire(partial(comm.alltoall, buffer, arrived, counts, [mine] * size), nbytes)
    shards = [arrived[r * mine : (r + 1) * mine] for r in range(size)]
    combine(shards, shards[:1], op, dtype)
    yield Wire(partial(lane(1).allgather, shards[0], buffer, counts), nbytes)


def _through_levels(
    lane: Callable[[int], Communicator],
    buffer: Array,
    op: ReduceOp,
    dtype: str,
    allocate: Callable[[int], Array],
) -> Steps:
    levels = [cast(HierarchicalCommunicator, lane(i)) for i in range(3)]
    counts = even_counts(buffer.size, levels[0].local.size)
    mine = counts[levels[0].local.rank]
    shard = allocate(mine * buffer.itemsize).view(buffer.dtype)
    nbytes = 2 * (levels[0].size - 1) / levels[0].size * buffer.nbytes
    yield Wire(partial(levels[0].local.reduce_scatter, buffer, shard, counts, op, dtype))
    yield Wire(partial(levels[BETWEEN].cross.allreduce, shard, op, dtype), nbytes)
    yield Wire(partial(levels[2].local.allgather, shard, buffer, counts))
