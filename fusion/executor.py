"""Runs operations that were asked for one by one, once every rank has asked for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from ringlet.compressors import NoCompression, Workspace
from ringlet.fusion.bucket import Bucket, make_bucket
from ringlet.fusion.buffers import BufferPool
from ringlet.fusion.convert import scale_into
from ringlet.fusion.limits import Limits
from ringlet.fusion.lookahead import pack
from ringlet.fusion.member import Member
from ringlet.fusion.meter import Meter
from ringlet.fusion.peers import Peers
from ringlet.fusion.submissions import Submissions
from ringlet.fusion.work import Work
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.halves import even_counts


class Batch:
    """Allreduces that become ready together: packed by look-ahead, reduced bucket by bucket.

    Uncompressed buckets run at once. Compressed ones are encoded and voted on first, like those
    of a declared group, so that a compressor that fails on one rank leaves nobody waiting. A batch
    serves again whenever the same requests become ready together.
    """

    def __init__(
        self,
        peers: Peers,
        members: Sequence[Member],
        limits: Limits,
        pool: BufferPool,
        submissions: Submissions,
    ) -> None:
        self.peers, self.members = peers, list(members)
        self.number, self.epoch = 0, 0
        self.buckets: list[Bucket] = [
            make_bucket(b, peers.size, pool)
            for b in pack(members, limits.fusion_threshold, limits.lookahead)
        ]
        self._submissions = submissions
        self._works: dict[Member, Work] = {}
        self._left = 0

    def begin(self, number: int, works: Iterable[Work]) -> None:
        """Take the members' arrays of this time."""
        self.number, self.epoch = number, 0
        for member, work in zip(self.members, works, strict=True):
            member.input, member.output = work.input, work.output
            self._works[member] = work

    @property
    def name(self) -> str:
        """Nothing: a batch belongs to no group."""
        return ""

    @property
    def step(self) -> int:
        """A number that no other batch has."""
        return self.number

    def run_plain(self, meter: Meter) -> list[int]:
        """Reduce the uncompressed buckets; return the indices of those that need a vote."""
        compressed: list[int] = []
        for index, bucket in enumerate(self.buckets):
            if isinstance(bucket.members[0].compressor, NoCompression):
                if meter.observers:
                    meter.encoding("", self.number, bucket)
                    meter.exchanging(bucket)
                nbytes = bucket.encode(meter)
                bucket.exchange(self.peers.comm, [nbytes] * self.peers.size, meter)
                if meter.observers:
                    self.observed(index, meter)
                self._finish(bucket)
            else:
                compressed.append(index)
        self._left = len(compressed)
        return compressed

    def observed(self, index: int, meter: Meter) -> None:
        """Tell of a bucket that was exchanged, while somebody observes."""
        bucket, pop = self.buckets[index], meter.submitted.pop
        if bucket.done:
            times = [(m.request.name, pop(m.request.key, None)) for m in bucket.members]
            submitted = {name: at for name, at in times if at is not None}
            meter.exchanged("", self.number, index, bucket, submitted)
        else:
            meter.exchanged("", self.number, index, bucket, {})

    @property
    def finished(self) -> bool:
        """Whether every bucket was reduced, or the batch failed."""
        return self._left == 0

    def bucket_done(self, index: int) -> None:
        """Count a voted bucket, and let its callers go on."""
        self._left -= 1
        self._finish(self.buckets[index])

    def fail(self, error: Exception, for_good: bool = False) -> None:
        """End what is left of the batch with ``error``."""
        self.epoch += 1
        self._left = 0
        for bucket in self.buckets:
            bucket.abandon()
        works = list(self._works.values())
        self._works.clear()
        self._submissions.fail(works, error)

    def _finish(self, bucket: Bucket) -> None:
        pop = self._works.pop
        self._submissions.complete([pop(member) for member in bucket.members])


def execute_single(peers: Peers, work: Work, sizes: Sequence[Any], scratch: Workspace) -> None:
    """Run an operation that is not fused and leave its result in ``work``.

    ``sizes`` are the first dimensions of an all-gather's inputs, or an all-to-all's splits, by
    rank; empty means that all are like this rank's own.
    """
    _OPERATIONS[work.request.kind](peers, work, sizes, scratch)


def _broadcast(peers: Peers, work: Work, _: Sequence[Any], __: Workspace) -> None:
    peers.comm.broadcast(work.output, work.request.root)


def _barrier(peers: Peers, work: Work, _: Sequence[Any], __: Workspace) -> None:
    peers.comm.barrier()


def _allgather(peers: Peers, work: Work, sizes: Sequence[Any], _: Workspace) -> None:
    shape = work.request.shape
    rows = list(sizes) or [shape[0]] * peers.size
    width = math.prod(shape[1:])
    work.sizes = tuple(rows)
    work.output = np.empty(sum(rows) * width, work.input.dtype)
    peers.comm.allgather(work.input, work.output, [n * width for n in rows])


def _alltoall(peers: Peers, work: Work, sizes: Sequence[Any], _: Workspace) -> None:
    request = work.request
    width = math.prod(request.shape[1:])
    received = [splits[peers.rank] for splits in list(sizes) or [request.splits] * peers.size]
    work.sizes = tuple(received)
    work.output = np.empty(sum(received) * width, work.input.dtype)
    peers.comm.alltoall(
        work.input,
        work.output,
        [n * width for n in request.splits],
        [n * width for n in received],
    )


def _reducescatter(peers: Peers, work: Work, _: Sequence[Any], scratch: Workspace) -> None:
    request = work.request
    width = math.prod(request.shape[1:])
    rows = even_counts(request.shape[0], peers.size)
    work.sizes = tuple(rows)
    values = work.input
    if request.prescale != 1.0:
        values = np.empty_like(work.input)
        scale_into(work.input, request.prescale, values, request.dtype, scratch)
    out = work.output = np.empty(rows[peers.rank] * width, values.dtype)
    op = ReduceOp.SUM if request.op is ReduceOp.AVERAGE else request.op
    peers.comm.reduce_scatter(values, out, [n * width for n in rows], op, request.dtype)
    divisor = peers.size if request.op is ReduceOp.AVERAGE else 1
    scale_into(out, request.postscale, out, request.dtype, scratch, divisor)


_OPERATIONS: dict[str, Callable[[Peers, Work, Sequence[Any], Workspace], None]] = {
    "broadcast": _broadcast,
    "barrier": _barrier,
    "allgather": _allgather,
    "alltoall": _alltoall,
    "reducescatter": _reducescatter,
}
