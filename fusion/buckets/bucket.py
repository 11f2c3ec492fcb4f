"""A fusion bucket: tensors of one stream that travel in one buffer.

``encode`` runs before the ranks agree to go ahead, so that a compressor that fails leaves nobody
waiting inside a collective; where they need not agree, ``encode_nothing`` takes its place then.
``exchange`` yields what moves bytes, and decodes.
"""

from __future__ import annotations

import hashlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from functools import partial
from itertools import accumulate

import numpy as np

from ringlet.compressors import Payload
from ringlet.compressors.core.shard_name import is_shard
from ringlet.fusion.buckets.unscaling import Unscaling
from ringlet.fusion.codecs.bucket_codec import BucketCodec
from ringlet.fusion.codecs.small_members import SmallMembers
from ringlet.fusion.devices.convert import from_float32, scale_into
from ringlet.fusion.devices.fusion_buffers import Lease
from ringlet.fusion.devices.host import Mark
from ringlet.fusion.peers import Peers, Track
from ringlet.fusion.planning.member import Member, named
from ringlet.fusion.recording.events import Trace
from ringlet.fusion.recording.recorder import Recorder
from ringlet.ring.collectives import compressed
from ringlet.ring.collectives.agreement import agree
from ringlet.ring.collectives.checksum import digest, mixed
from ringlet.ring.collectives.reduce import allreduce_steps
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array, storage
from ringlet.ring.errors import ExchangeFailed
from ringlet.ring.pipeline import ALONE, Steps, resume

log = logging.getLogger("ringlet")
SPREAD = 13  # between the turns of a step's buckets, so that all steps compare equally much

_MASK = (1 << 64) - 1  # a plan's hash has 64 bits


class Bucket(ABC):
    """Members that share a stream. One object serves every step of a plan."""

    even = True  # whether payloads are of one size on all ranks

    def __init__(self, members: Sequence[Member], size: int) -> None:
        self.members = list(members)
        self.place = self.members[0].place
        self.size = size
        self.missing = len(self.members)  # members not yet submitted in this step
        self.done = False  # whether the last step that began was also exchanged
        self.more = False  # whether another round has to be voted on
        self.phantom = False  # whether this step's values are the zeros of a rank that joined
        self.unscaling: Unscaling | None = None
        self.finite = True  # whether the last step's results were, where that is looked at
        self.mark: Mark | None = None  # the end of the last step's work, where that has an order
        self.verify = 0  # of how many spans of large sums ranks compare one; 0: of none
        self.turn = 0  # which of this step's sums are compared, the same on all ranks
        self.digest = 0  # of this step's sums, the same on all ranks; 0 where there is none
        self.last_digest = 0  # that of the step before, which ranks compare in their votes
        self._plan: int | None = None
        self._lease = Lease(self.place.pool)
        self.uncompressed = sum(member.nbytes for member in self.members)  # bytes
        self.raw_bytes = 2 * (size - 1) / size * self.uncompressed
        # Bytes that an exchange takes, at most, where that is known. Shards of a sum may differ by
        # a value, and what arrives is made as long for each.
        self.arrives = self.uncompressed + 8 * size
        self.trace = Trace()  # of this step
        self._finishing = [member for member in self.members if member.finishes]
        self.failure: ExchangeFailed | None = None
        self.fatal = False  # whether ranks may remember different things after the failure
        self.lanes = 0  # collectives of the exchange under way so far, where that is counted

    def begin(self, turn: int) -> Trace:
        """Forget what the last step cost; return where the costs of this one will be.

        ``turn`` says which of its sums are compared; the same on all ranks.
        """
        if not self.place.ordered:  # one tensor may be more than a bucket's limit
            self.place.pool.reserve(self.arrives)
        self.trace = Trace()
        self.last_digest, self.digest, self.turn = self.digest, 0, turn
        return self.trace

    def settle(self) -> None:
        """Take up what members' states hold of shards over two levels, which have none here."""
        with self.place.at_work():
            for member in self.members:
                member.reclaim(is_shard)

    def encode(self, recorder: Recorder) -> int:
        """Compress this step's values; return the bytes of the payload."""
        start = time.perf_counter()
        self.done = False
        with self.place.at_work():
            if self.place.ordered and not self.more:
                self.place.after(member.ready for member in self.members)
            for member in self._finishing:
                member.widen()
            nbytes = self._encode()
        recorder.compressed(self.trace, start, time.perf_counter())
        return nbytes

    def encode_nothing(self, error: Exception) -> int:
        """Take part in the exchange, which ranks have not voted on, though ``encode`` has failed.

        All ranks give it up then. Raises ``error`` where nothing on the wire could tell them.
        """
        raise error

    def exchange(
        self, track: Track, sizes: Sequence[int], recorder: Recorder, epoch: int = 0
    ) -> Steps:
        """Combine with the other ranks, whose payloads take ``sizes`` bytes, and decode.

        ``epoch`` tells attempts of one plan apart; payloads carry it. What all ranks gave up
        together is not raised, but left in ``failure``.
        """
        return self.place.steps(self._run(track, sizes, recorder, epoch))

    def _run(self, track: Track, sizes: Sequence[int], recorder: Recorder, epoch: int) -> Steps:
        self.failure, self.fatal = None, False
        try:
            self._compare(track, sizes)
            start = partial(self._exchange, track, list(sizes), recorder, epoch)
            yield from self.with_memory(start)
            if self._finishing and not self.more:
                yield from self._finish(track)
        except ExchangeFailed as error:
            self.failure = error
            return
        except MemoryError as error:
            text = f"no memory to receive a bucket of {self.uncompressed} bytes"
            raise MemoryError(text) from error
        if self.more:
            return
        stats = recorder.stats
        stats.raw_bytes += self.raw_bytes
        stats.buckets += 1
        stats.tensors += len(self.members)
        self._count()
        if self.members[0].contributors:  # else no other's are counted either
            self._make_up()
        for member in self._finishing:
            member.narrow()
        if self.unscaling is not None and not self.place.ordered:
            self.finite = self.unscaling.apply(self.members)
        self.abandon()
        self.let_go()
        self.done = True

    def note_sum(self, values: Array, dtype: str, op: ReduceOp = ReduceOp.SUM) -> None:
        """Count what ``op`` gave on the wire, which is to be the same on all ranks."""
        if self.verify and not self.place.ordered:
            one_zero = op in (ReduceOp.MIN, ReduceOp.MAX)
            found = digest(values, dtype, one_zero, self.verify, self.turn)
            self.digest = mixed(self.digest, found)

    def let_go(self) -> None:
        """Note the end of the work so far, at an ordered place, and refer to no tensor any more."""
        if self.place.ordered:
            with self.place.at_work():
                arrays = [array for m in self.members for array in (m.input, m.output)]
                self.mark = self.place.done(arrays)
        for member in self.members:
            member.forget()

    def with_memory(self, start: Callable[[], Steps]) -> Steps:
        """Take the steps of ``start``; without memory for them, alone and with the pool's reserve.

        The others count on this rank: it is too late to give up the step. All that is allocated is
        allocated before the first collective, except over two levels, which are always alone.
        """
        mark = self._lease.mark()
        try:
            steps = start()
            wire = resume(steps)
        except MemoryError:
            self._lease.back_to(mark)
            self._lease.use_reserve()
            yield ALONE
            steps = start()
            wire = resume(steps)
        while wire is not None:
            try:
                yield wire
            except Exception as error:
                wire = resume(steps, error)
            else:
                yield from steps
                return

    def _count(self) -> None:
        for member in self.members:
            member.count()

    def bytes_of(self, sizes: Sequence[int]) -> int:
        """Return how many bytes ranks bring that have voted with ``sizes``."""
        return sum(sizes)

    def _compare(self, track: Track, sizes: Sequence[int]) -> None:
        """Raise ExchangeFailed, on all ranks, where payloads of one fixed size differ in it."""
        if not self.even or sizes.count(sizes[0]) == len(sizes):
            return
        witness = next(rank for rank, size in enumerate(sizes) if size != sizes[0])
        raise ExchangeFailed(
            f"compressor {str(self.members[0].compressor)!r} has {sizes[witness]} bytes for "
            f"{named(self.members)}, and {sizes[0]} bytes on rank {track.ranks[0]}; they have to "
            "be as many on all ranks",
            witness,
        )

    def _finish(self, track: Track) -> Steps:
        """Let compressors see the combined results, once every rank has them."""
        failure: Exception | None = None
        self.fatal = True
        try:
            seen = self._finish_together()
            for member in self._finishing:
                if member not in seen:
                    member.see()
        except Exception as error:
            failure = error
        if self.place.ordered:
            if failure is not None:
                raise failure
            return
        yield from agree(track.lane(self.lanes), failure, "could not finish a result")

    def _finish_together(self) -> Collection[Member]:
        """Let kernels for many tensors see combined results; return the members whose they saw."""
        return ()

    def _make_up(self) -> None:
        """Let means be of the contributors alone, behind what compressors remember of them."""
        for member in self.members:
            factor, out = member.makeup, member.output
            if factor != 1.0:
                scale_into(out, factor, out, member.output_dtype, member.workspace)

    def shares(self) -> list[float]:
        """Return what each member has of the bytes on the wire, in any unit."""
        return [float(member.nbytes) for member in self.members]

    def abandon(self) -> None:
        """Give buffers back and wait for the next step's tensors."""
        self._lease.release()
        self.missing = len(self.members)
        self.more = False

    @property
    def final(self) -> bool:
        """Whether the exchange that is voted on is the bucket's last one in this step."""
        return True

    def plan_of(self, epoch: int) -> int:
        """Return 64 bits that tell this plan and attempt from others, the same on every rank."""
        if self._plan is None:
            described = "\n".join(member.describe() for member in self.members)
            digest = hashlib.blake2b(described.encode(), digest_size=8).digest()
            self._plan = int.from_bytes(digest, "little")
        return (self._plan + epoch) & _MASK

    def fail(self) -> None:
        """Abandon a step of which other buckets may be done."""
        self.abandon()
        self.last_digest = self.digest = 0
        try:
            self.let_go()  # encoding may read what was handed in
        except Exception:  # of a device that is lost; the step's own error is told
            log.debug("cannot tell when a failed step's work is over", exc_info=True)
        for member in self.members:
            member.restart()

    def among(self, peers: Peers) -> Peers:
        """Return ``peers`` on the levels that this bucket's exchange goes through."""
        return peers

    @abstractmethod
    def _encode(self) -> int:
        """Fill the send buffer; return its bytes."""

    @abstractmethod
    def _exchange(self, track: Track, sizes: list[int], recorder: Recorder, epoch: int) -> Steps:
        """Yield collectives; decode into the members' outputs."""


class SumBucket(Bucket):
    """Payloads that add up on the wire: one allreduce in the wire's dtype.

    Ranks agree that all could decode only where a plugin does, which another collective costs.
    """

    def __init__(self, members: Sequence[Member], size: int) -> None:
        super().__init__(members, size)
        parts = [m.layout(m.numel)[0] for m in self.members]
        self._dtype = parts[0].dtype
        self._foreign = any(member.foreign for member in self.members)
        ends = [0, *accumulate(part.elements for part in parts)]
        self._nbytes = ends[-1] * storage(self._dtype).itemsize
        self._slots = [  # each member's payload array, by name, and where it lies in the buffer
            (member, part.name, slice(*bounds))
            for member, part, *bounds in zip(self.members, parts, ends, ends[1:], strict=False)
        ]
        self._buffer: Array = np.empty(0, storage(self._dtype))
        whole = [(0, member.numel) for member in self.members]
        starts = [storage(self._dtype).itemsize * end for end in ends]
        self._small = SmallMembers.of(self.members, [whole], [starts])
        small = set() if self._small is None else {*self._small.indices[0]}
        self._single = [slot for i, slot in enumerate(self._slots) if i not in small]

    def shares(self) -> list[float]:
        """Return the elements of each member's payload."""
        return [float(span.stop - span.start) for _, _, span in self._slots]

    def _finish_together(self) -> Collection[Member]:
        return () if self._small is None else {*self._small.finish()}

    def _allocate(self) -> None:
        self._buffer = self._lease.allocate(self._nbytes).view(storage(self._dtype))

    def _encode(self) -> int:
        self._allocate()
        for member, name, span in self._single:
            payload = {name: self._buffer[span]}
            encode = member.compressor.encode_into
            member.call(encode, member.values(), payload, member.context(0, 1))
        if self._small is not None:
            self._small.begin()
            self._small.encode(0, self._buffer.view(np.uint8))
        return self._nbytes

    def _exchange(self, track: Track, sizes: list[int], recorder: Recorder, epoch: int) -> Steps:
        allocate, self.lanes = self._lease.allocate, 0
        op, dtype = ReduceOp.SUM, self._dtype
        for wire in allreduce_steps(track.lane, self._buffer, op, dtype, allocate):
            yield wire
            self.lanes += 1
        self.note_sum(self._buffer, dtype)
        failure: Exception | None = None
        start = time.perf_counter()
        try:
            self._decode_all()
        except Exception as error:
            if not self._foreign:
                raise
            failure = error
        recorder.decompressed(self.trace, start)
        if self._foreign:
            yield from agree(track.lane(self.lanes), failure, "could not decode a sum")
            self.lanes += 1

    def _decode_all(self) -> None:
        for member, name, span in self._single:
            self._decode(member, {name: self._buffer[span]})
        if self._small is not None:
            self._small.decode_sum(0, [self._buffer.view(np.uint8)])

    def _decode(self, member: Member, payload: Payload) -> None:
        dtype = member.output_dtype
        wide = member.output
        if dtype != "float32":
            wide = member.workspace.array("decoded32", member.numel)
        member.decode(member.compressor.decompress, payload, wide, member.context(0, 1))
        from_float32(wide, member.output, dtype, member.workspace, member.postscale)


class CompressedBucket(Bucket):
    """Payloads that must be decoded to be added: gathered whole, or reduced shard by shard."""

    def __init__(self, members: Sequence[Member], size: int) -> None:
        super().__init__(members, size)
        self._scattered = self.even = self.members[0].strategy == "scatter_reduce"
        self.codec = BucketCodec(self.members, size if self._scattered else 1)
        self._encoded = compressed.Encoded(np.empty(0, np.uint8), [])
        self._unencoded: Exception | None = None  # why there is no payload, in the exchange at hand

    def shares(self) -> list[float]:
        """Return the bytes of each member's payload, in this step."""
        return self.codec.member_bytes()

    def _finish_together(self) -> Collection[Member]:
        return self.codec.finish()

    def encode_nothing(self, error: Exception) -> int:
        """Send a message of the payload's size that no rank takes for one."""
        self._encoded = compressed.blank(self.codec, self._lease.allocate)
        self._unencoded = error
        return self._encoded.nbytes

    def _encode(self) -> int:
        self._unencoded = None
        self._encoded = compressed.encode(self.codec, self._lease.allocate)
        return self._encoded.nbytes

    def _exchange(self, track: Track, sizes: list[int], recorder: Recorder, epoch: int) -> Steps:
        comm, siblings, allocate = track.comm, track.siblings, self._lease.allocate
        plan, self.lanes = self.plan_of(epoch), 3 if self._scattered else 2
        exchange: compressed.Exchange
        if self._scattered:
            exchange = compressed.ScatterReduce(
                comm, self.codec, self._encoded, allocate, plan, siblings, self._unencoded
            )
        else:
            exchange = compressed.AllgatherReduce(
                comm, self.codec, self._encoded, sizes, allocate, plan, siblings, self._unencoded
            )
        return compressed.steps(exchange, partial(self._working, recorder))

    def _working(self, recorder: Recorder, step: str, work: Callable[[], None]) -> None:
        start = time.perf_counter()
        work()
        recorder.decompressed(self.trace, start, step)
