"""Runs operations that were asked for one by one, once every rank has asked for them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ringlet.compressors import NoCompression
from ringlet.fusion.bucket import Bucket, make_bucket
from ringlet.fusion.buffers import BufferPool
from ringlet.fusion.lookahead import pack
from ringlet.fusion.member import Member
from ringlet.fusion.stats import Stats
from ringlet.fusion.work import Work
from ringlet.ring.communicator import Communicator


class Batch:
    """Allreduces that became ready together: packed by look-ahead, reduced bucket by bucket.

    Uncompressed buckets run at once. Compressed ones are encoded and voted on first, like those
    of a declared group, so that a compressor that fails on one rank leaves nobody waiting.
    """

    def __init__(
        self,
        number: int,
        works: Sequence[Work],
        members: Sequence[Member],
        threshold: int,
        pool: BufferPool,
    ) -> None:
        self.number, self.epoch = number, 0
        self._works = {work.request.name: work for work in works}
        size = members[0].size
        self.buckets: list[Bucket] = [make_bucket(b, size, pool) for b in pack(members, threshold)]
        self._left = 0

    def run_plain(self, comm: Communicator, stats: Stats) -> list[int]:
        """Reduce the uncompressed buckets; return the indices of those that need a vote."""
        compressed: list[int] = []
        for index, bucket in enumerate(self.buckets):
            if isinstance(bucket.members[0].compressor, NoCompression):
                nbytes = bucket.encode(stats)
                bucket.exchange(comm, [nbytes] * comm.size, stats)
                self._finish(bucket)
            else:
                compressed.append(index)
        self._left = len(compressed)
        return compressed

    @property
    def finished(self) -> bool:
        """Whether every bucket was reduced, or the batch failed."""
        return self._left == 0

    def bucket_done(self) -> None:
        """Count a voted bucket, and let its callers go on."""
        self._left -= 1
        for bucket in self.buckets:
            if bucket.done:
                self._finish(bucket)

    def fail(self, error: Exception, for_good: bool = False) -> None:
        """End what is left of the batch with ``error``."""
        self.epoch += 1
        self._left = 0
        for bucket in self.buckets:
            bucket.abandon()
        for work in self._works.values():
            work.handle.finish(error)
        self._works.clear()

    def _finish(self, bucket: Bucket) -> None:
        for member in bucket.members:
            work = self._works.pop(member.request.name, None)
            if work is not None:
                work.handle.output = work.output
                work.handle.finish()


def execute_single(comm: Communicator, work: Work, rows: Sequence[int]) -> None:
    """Run an operation that is not fused, and let its caller go on.

    ``rows`` are the first dimensions of an all-gather's inputs by rank; empty means all alike.
    """
    request, handle = work.request, work.handle
    if request.kind == "broadcast":
        comm.broadcast(work.output, request.root)
        handle.output = work.output
    elif request.kind == "allgather":
        counts = list(rows) or [request.shape[0]] * comm.size
        width = int(np.prod(request.shape[1:], dtype=np.int64))
        handle.sizes = tuple(counts)
        handle.output = np.empty(sum(counts) * width, work.input.dtype)
        comm.allgather(work.input, handle.output, [n * width for n in counts])
    elif request.kind == "barrier":
        comm.barrier()
    else:
        raise ValueError(f"unknown operation {request.kind!r}")
    handle.finish()
