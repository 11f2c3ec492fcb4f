"""Allreduces that were asked for one by one, fused once every rank has asked for them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import inf

from ringlet.compressors import NoCompression
from ringlet.fusion.buckets.bucket import SPREAD, Bucket
from ringlet.fusion.buckets.bucket_owner import BucketOwner
from ringlet.fusion.buckets.factory import make_bucket
from ringlet.fusion.errors import CompressionFailed
from ringlet.fusion.exchanges import Exchanges
from ringlet.fusion.limits import Limits
from ringlet.fusion.peers import Peers, Track
from ringlet.fusion.planning.lookahead import pack
from ringlet.fusion.planning.member import Member
from ringlet.fusion.planning.pieces import divide
from ringlet.fusion.queue.tensor_queue import TensorQueue
from ringlet.fusion.recording.events import Trace
from ringlet.fusion.recording.recorder import Recorder
from ringlet.fusion.requests.handle import Work
from ringlet.ring.collectives.checksum import turn_of
from ringlet.ring.pipeline import Steps

Note = Callable[[int, int, str, int], None]  # batch, place in it, a tensor's name, digest
Exchanged = Callable[["Batch", int, int], None]  # batch, bucket, epoch


class Batch(BucketOwner):
    """Allreduces that become ready together: packed by look-ahead, reduced bucket by bucket.

    Buckets of which ranks know what will travel run at once. Those of plugins, and those whose
    payloads' sizes vary, are encoded and voted on first, like those of a declared group, so that a
    compressor that fails on one rank leaves nobody waiting. So are those of schedules, of which a
    rank may be at another step. A batch serves again whenever the same requests become ready
    together, and its schedules are where they were. ``note`` is told the digests of sums, which
    ranks compare afterwards.
    """

    def __init__(
        self,
        peers: Peers,
        members: Sequence[Member],
        limits: Limits,
        tensor_queue: TensorQueue,
        note: Note,
    ) -> None:
        self._note = note
        self.peers, self.members = peers, list(members)
        self._scheduled: list[tuple[Member, Member]] = []  # as declared, and as in this batch
        self.number = self.step = self.epoch = 0
        divided = [divide(member) for member in members]
        pieces = [piece for of_one in divided for piece in of_one]
        self._divided = [of_one for of_one in divided if len(of_one) > 1]
        queues = [pieces]
        if any(member.apart or member.foreign for member in members):
            # One rank may plan these otherwise, or not at all: the rest must be planned without.
            queues = [[p for p in pieces if _at_once(p)], [p for p in pieces if not _at_once(p)]]
        self.buckets: list[Bucket] = []
        try:
            for queue in queues:
                self.buckets += [
                    make_bucket(b, peers, limits.hierarchical, limits.share)
                    for b in pack(queue, limits.fusion_threshold, limits.lookahead)
                ]
        except CompressionFailed as error:  # of a plugin's layout, once the first queue is planned
            self.unplanned = error
        self._tensor_queue = tensor_queue
        self._works: dict[Member, Work] = {}
        self._missing: dict[Member, int] = {}  # pieces of a tensor that are not done
        self._undone: set[int] = set()  # buckets that are not done
        self._to_vote: list[int] = []  # buckets that ranks vote on
        self._fallible: set[int] = set()  # undone ones that may fail on all ranks

    def begin(self, number: int, works: Iterable[Work], contributors: Sequence[int]) -> None:
        """Take the members' arrays of this time, and by how many ranks means are to be divided."""
        self.number, self.step, self.epoch = number, number, 0
        self._undone = set(range(len(self.buckets)))
        firsts = [bucket.members[0] for bucket in self.buckets]
        self._to_vote = [index for index, member in enumerate(firsts) if not _at_once(member)]
        if self.unplanned is not None and not self._to_vote:
            self._to_vote = [len(self.buckets)]  # a bucket that there is not, which is to fail
        self._fallible = {index for index, member in enumerate(firsts) if not _is_plain(member)}
        self._fallible.update(self._to_vote)
        for member, work, ranks in zip(self.members, works, contributors, strict=True):
            member.contributors = ranks
            member.take(work.input, work.output, work.ready)
            self._works[member] = work
        for pieces in self._divided:
            whole = pieces[0].whole
            assert whole is not None
            self._missing[whole] = len(pieces)
            for piece in pieces:
                piece.take(whole.input, whole.output, whole.ready)
                piece.contributors = whole.contributors

    def urgency(self, index: int) -> float:
        """Return infinity: somebody waits for it."""
        return inf

    def digest_to_vote(self, index: int) -> int:
        """Return 0: ``note`` was told of what earlier batches gave."""
        return 0

    def average_over(self, index: int, contributors: int) -> None:
        """Do nothing: ``begin`` was told, tensor by tensor, for not all may have as many."""

    def begin_bucket(self, index: int) -> Trace:
        """Begin a bucket's work; return where its costs will be."""
        bucket = self.buckets[index]
        return bucket.begin(turn_of(self.number, bucket.verify) + SPREAD * index)

    @property
    def to_vote(self) -> Sequence[int]:
        """The indices of buckets that need a vote."""
        return self._to_vote

    def launch(self, exchanges: Exchanges, recorder: Recorder, exchanged: Exchanged) -> None:
        """Launch the buckets that need no vote; ``exchanged`` is told of the end of each."""
        for index, bucket in enumerate(self.buckets):
            if _at_once(bucket.members[0]):
                nbytes = sum(member.nbytes for member in bucket.members)
                track = bucket.among(self.peers).next_track()
                steps = self._steps(bucket, track, recorder)
                done = partial(exchanged, self, index, self.epoch)
                exchanges.launch(steps, self.begin_bucket(index), track, nbytes, done)

    def observed(self, index: int, recorder: Recorder) -> None:
        """Tell of a bucket that was exchanged, while somebody observes."""
        bucket = self.buckets[index]
        submitted: dict[str, float] = {}
        for member in bucket.members if bucket.done else ():
            at = recorder.submitted.pop(member.request.key, None)
            if at is not None:
                submitted[member.request.name] = at
        recorder.exchanged("", self.number, index, bucket, submitted)

    @property
    def decided(self) -> bool:
        """Whether no bucket is left that may still fail on all ranks."""
        return not self._fallible

    @property
    def finished(self) -> bool:
        """Whether every bucket was reduced, or the batch failed."""
        return not self._undone

    def bucket_done(self, index: int) -> None:
        """Count a bucket, and let its callers go on."""
        self._undone.discard(index)
        self._fallible.discard(index)
        bucket = self.buckets[index]
        if bucket.digest:
            self._note(self.number, index, bucket.members[0].name, bucket.digest)
        for member in bucket.members:
            if member.apart and not member.encoded:
                member.count()  # as compressed ones do: the schedule goes by it
        done = [member.whole or member for member in bucket.members if self._is_last(member)]
        if done:
            works = [self._works.pop(member) for member in done]
            if bucket.mark is not None:
                for work in works:
                    work.let_go(bucket.mark)
                bucket.mark = None  # which keeps tensors
            self._tensor_queue.complete(works)

    def fail(self, error: Exception, turn: int | None = None) -> None:
        """End what is left of the batch, which is one step, with ``error``."""
        self.epoch += 1
        for index in self._undone:  # members of the others may be in another batch already
            self.buckets[index].fail()
        self._undone.clear()
        self._fallible.clear()
        ended = {bucket.place: bucket.mark for bucket in self.buckets if bucket.mark is not None}
        for member, work in self._works.items():
            if member.place in ended:
                work.let_go(ended[member.place])
        for bucket in self.buckets:
            bucket.mark = None
        works = list(self._works.values())
        self._works.clear()
        self._tensor_queue.fail(works, error)

    def follow(self, declared: Sequence[Member], problems: Iterable[CompressionFailed]) -> None:
        """Note of what the members are stages, and the ``problems`` of schedules: the first counts.

        Where there is one the batch will fail.
        """
        pairs = zip(declared, self.members, strict=True)
        self._scheduled = [(whole, member) for whole, member in pairs if whole is not member]
        self.unplanned = next(iter(problems), self.unplanned)

    def serves_again(self, works: Sequence[Work]) -> bool:
        """Whether the batch serves for ``works`` as it is, and schedules are where they were."""
        declared = {member: whole.declared for whole, member in self._scheduled}
        for member, work in zip(self.members, works, strict=True):
            known = declared.get(member, member.declared) if declared else member.declared
            if known is not work.compressor and known != work.compressor:
                return False  # a plugin was defined anew
        try:
            return all(
                whole.call(whole.declared.at, whole.step) == member.declared
                for whole, member in self._scheduled
            )
        except CompressionFailed:
            return False  # who plans anew tells the others

    def _is_last(self, member: Member) -> bool:
        """Whether the tensor is done with this member of a bucket that is."""
        if member.whole is None:
            return True
        self._missing[member.whole] -= 1
        return self._missing[member.whole] == 0

    def _steps(self, bucket: Bucket, track: Track, recorder: Recorder) -> Steps:
        # Encoded when its turn comes: as many fusion buffers are in use as exchanges under way.
        if recorder.observers:
            recorder.encoding("", self.number, bucket)

        def steps() -> Steps:
            try:
                nbytes = bucket.encode(recorder)
            except MemoryError:
                raise  # to be tried again, with the reserve
            except Exception as error:  # the others are in the exchange already
                nbytes = bucket.encode_nothing(error)
            yield from bucket.exchange(track, [nbytes] * track.comm.size, recorder)

        yield from bucket.with_memory(steps)


def _is_plain(member: Member) -> bool:
    return isinstance(member.compressor, NoCompression)


def _at_once(member: Member) -> bool:
    """Whether ranks need no vote on what a member travels in.

    They know how many bytes it takes on all of them, and what fails on one of them can be told on
    the way, or cannot fail: sums have nothing to tell it by. A plugin may break such a promise, and
    on a GPU failures are found out late.
    """
    if member.apart or _is_plain(member):
        return not member.apart
    traits, strategy = member.compressor.traits(), member.strategy
    known = traits.fixed_size and strategy != "rounds"
    sure = known and not (strategy == "sum" and traits.stateful)
    return sure and not member.foreign and not member.place.ordered
