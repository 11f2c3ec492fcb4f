"""Allreduces that were asked for one by one, fused once every rank has asked for them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial

from ringlet.compressors import NoCompression
from ringlet.fusion.bucket import Bucket, make_bucket
from ringlet.fusion.buffers import BufferPool
from ringlet.fusion.flights import Flights
from ringlet.fusion.limits import Limits
from ringlet.fusion.lookahead import pack
from ringlet.fusion.member import Member
from ringlet.fusion.meter import Meter
from ringlet.fusion.peers import Peers
from ringlet.fusion.submissions import Submissions
from ringlet.fusion.work import Work
from ringlet.ring.pipeline import Steps


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
            make_bucket(b, self.peers.size, pool)
            for b in pack(members, limits.fusion_threshold, limits.lookahead)
        ]
        self._submissions = submissions
        self._works: dict[Member, Work] = {}
        self._left = 0
        self._voted: set[int] = set()  # buckets that were voted on, and are not done

    def begin(self, number: int, works: Iterable[Work]) -> None:
        """Take the members' arrays of this time."""
        self.number, self.epoch = number, 0
        self._left = len(self.buckets)
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

    def run_plain(self, flights: Flights, meter: Meter) -> list[int]:
        """Launch the uncompressed buckets; return the indices of those that need a vote."""
        compressed: list[int] = []
        for index, bucket in enumerate(self.buckets):
            if isinstance(bucket.members[0].compressor, NoCompression):
                nbytes = sum(member.nbytes for member in bucket.members)
                done = partial(self._plain_done, index, meter)
                steps = self._plain(bucket, meter)
                flights.launch(steps, bucket.begin(), self.peers, nbytes, done)
            else:
                compressed.append(index)
        self._voted = set(compressed)
        return compressed

    def observed(self, index: int, meter: Meter) -> None:
        """Tell of a bucket that was exchanged, while somebody observes."""
        bucket, pop = self.buckets[index], meter.submitted.pop
        times = [(m.request.name, pop(m.request.key, None)) for m in bucket.members if bucket.done]
        submitted = {name: at for name, at in times if at is not None}
        meter.exchanged("", self.number, index, bucket, submitted)

    @property
    def decided(self) -> bool:
        """Whether no bucket waits for votes, or for what was voted for."""
        return not self._voted

    @property
    def finished(self) -> bool:
        """Whether every bucket was reduced, or the batch failed."""
        return self._left == 0

    def bucket_done(self, index: int) -> None:
        """Count a bucket, and let its callers go on."""
        self._left -= 1
        self._voted.discard(index)
        pop = self._works.pop
        self._submissions.complete([pop(member) for member in self.buckets[index].members])

    def fail(self, error: Exception, for_good: bool = False) -> None:
        """End what is left of the batch with ``error``."""
        self.epoch += 1
        self._left = 0
        self._voted.clear()
        for bucket in self.buckets:
            bucket.abandon()
        works = list(self._works.values())
        self._works.clear()
        self._submissions.fail(works, error)

    def _plain(self, bucket: Bucket, meter: Meter) -> Steps:
        # Encoded when its turn comes: as many fusion buffers are in use as exchanges under way.
        if meter.observers:
            meter.encoding("", self.number, bucket)
        nbytes = bucket.encode(meter)
        yield from bucket.exchange(self.peers, [nbytes] * self.peers.size, meter)

    def _plain_done(self, index: int, meter: Meter) -> None:
        if meter.observers:
            self.observed(index, meter)
        self.bucket_done(index)
