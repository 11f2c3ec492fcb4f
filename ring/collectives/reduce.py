"""An allreduce of plain values as steps of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ringlet.ring.communicator import Communicator, ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.ring.pipeline import Steps, Wire
from ringlet.ring.rank_order import combine, even_counts

LEAST = 1 << 17  # bytes over all ranks from which two collectives that overlap beat one that waits


def allreduce_steps(
    comm: Communicator,
    later: Communicator,
    buffer: Array,
    op: ReduceOp,
    dtype: str,
    allocate: Callable[[int], Array],
) -> Steps:
    """Combine ``buffer`` over all ranks in place, as ``Communicator.allreduce`` does.

    What the transport does not reduce itself is summed here, between two collectives, of which
    ``later``, a sibling of ``comm`` or itself, makes the second. ``allocate`` returns that many
    bytes (uint8).
    """
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
    yield Wire(partial(later.allgather, shards[0], buffer, counts), nbytes)
