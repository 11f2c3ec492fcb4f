"""What one rank does on the coordinator's word. Used by the engine's thread, but for ``expect``."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from ringlet.compressors import Compressor
from ringlet.compressors.core.context import State
from ringlet.fusion.buckets.bucket_owner import BucketOwner
from ringlet.fusion.buckets.group import Group, Ready
from ringlet.fusion.devices.host import Place
from ringlet.fusion.encoding_queue import EncodingQueue
from ringlet.fusion.errors import (
    CompressionFailed,
    DuplicateName,
    OutOfMemory,
    StepAbandoned,
    in_words,
)
from ringlet.fusion.exchanges import Exchanges
from ringlet.fusion.limits import Limits
from ringlet.fusion.negotiation import messages as m
from ringlet.fusion.negotiation.validation import listed
from ringlet.fusion.peers import Peers
from ringlet.fusion.planning.member import Member
from ringlet.fusion.queue.batch import Batch
from ringlet.fusion.queue.request_executor import RequestExecutor
from ringlet.fusion.queue.tensor_queue import TensorQueue
from ringlet.fusion.recording.events import Observer
from ringlet.fusion.recording.recorder import Recorder
from ringlet.fusion.recording.watched_communicator import unwatched
from ringlet.fusion.requests.callers_locks import Lock
from ringlet.fusion.requests.handle import Expected, Signal
from ringlet.fusion.requests.request import Request, dumps, loads
from ringlet.ring.communicator import Communicator
from ringlet.ring.control.plane import ControlPlane
from ringlet.ring.errors import ExchangeFailed, Mismatch, PeerLost, RingError

log = logging.getLogger("ringlet")

# These do not touch what is under way; other messages wait for its end.
_OVERLAPPING = frozenset([m.GO, m.EXECUTE, m.EXECUTE_HITS, m.EXECUTE_SERIES, m.WANTED, m.STALLED])


class Worker:
    """Runs collectives in the one order that the coordinator announces."""

    def __init__(
        self,
        comm: Communicator,
        control: ControlPlane,
        limits: Limits,
        tensor_queue: TensorQueue,
        signal: Signal,
        places: Sequence[Place] = (),
    ) -> None:
        self.rank = comm.rank
        self.recorder = Recorder()
        self.sets = {0: Peers(0, tuple(range(comm.size)), comm)}
        self.complete = EncodingQueue()
        self.joined: set[int] = set()
        self._control, self._limits = control, limits
        host = Place(reserved=limits.fusion_threshold)
        self.places = {place.name: place for place in (host, *places)}
        self._exchanges = Exchanges(self.recorder, control.wake, comm.rank, limits.streams)
        self.pipeline = self._exchanges.pipeline
        self.requests = RequestExecutor(
            self.sets,
            self.places,
            self._exchanges,
            self.recorder,
            tensor_queue,
            signal,
            self.member,
            self._undertake,
            self._exchanged,
            self.joined,
            limits.cache,
        )
        self._expected: dict[Hashable, Expected] = {}
        self._groups: dict[int, Group] = {}
        self._batches: dict[int, Batch] = {}  # with buckets to vote on; numbers are no group's
        self._released: set[int] = set()  # groups to forget when the step at hand has ended
        self._handlers = {
            m.GO: self._go,
            m.EXECUTE_HITS: lambda said: self.requests.execute_hits(said, self._limits),
            m.EXECUTE: lambda said: self.requests.execute(said, self._limits),
            m.EXECUTE_SERIES: lambda said: self.requests.execute_series(said, self._limits),
            m.DECLARED: self._declared,
            m.REFUSED: self._refused,
            m.STEP_FAILED: self._failed,
            m.WANTED: self._wanted,
            m.JOINED: self._all_joined,
            m.SET: self._set_changed,
            m.FORGET: self._forget_group,
            m.STALLED: self._stalled,
            m.ANNOUNCED: self._announced,
        }
        self.actions: dict[str, Callable[[Any, bool], None]] = {}

    def expect(self, key: Hashable, handle: Expected) -> Expected:
        """Finish ``handle`` when the answer to ``key`` comes; return what is awaited for it."""
        return self._expected.setdefault(key, handle)

    def severed(self) -> list[int]:
        """Return the ranks to which a connection has ended that exchanges under way need."""
        return self._exchanges.severed()

    def answer(self, key: Hashable, error: Exception | None = None) -> None:
        """Finish what waits for ``key``, if anything does. From any thread."""
        expected = self._expected.pop(key, None)
        if expected is not None:
            expected.finish(error)

    def rehearse(
        self,
        name: str,
        requests: Sequence[Request],
        compressors: Sequence[Compressor],
        states: Sequence[State],
        step: int,
        process_set: int,
        early: bool,
        ready: Ready,
    ) -> Callable[[Sequence[str]], Group]:
        """Plan a group, and compile its kernels, before the other ranks hear of it.

        Returns what gives the group with its members in another order, perhaps. From any thread.
        """
        counts = Counter(request.name for request in requests)
        repeated = sorted(n for n, count in counts.items() if count > 1)
        if repeated:
            raise DuplicateName(f"declared twice in {name!r}: {listed(repeated)}")
        members = {
            request.name: self.member(request, compressor, state)
            for request, compressor, state in zip(requests, compressors, states, strict=True)
        }
        limits, peers = self._limits, self.sets[process_set]

        def build(order: Iterable[str]) -> Group:
            chosen = [members[n] for n in order]
            return Group(name, 0, chosen, peers, self._limits, ready, self.abandon, step, early)

        planned = build(members)
        planned.plan.warm_up()

        def in_order(order: Sequence[str]) -> Group:
            return planned if list(members) == order and limits is self._limits else build(order)

        return in_order

    @property
    def specs(self) -> list[str]:
        """How tensors are compressed that are declared, or named: each spec once, in order."""
        groups = list(self._groups.values())
        members = [member for group in groups for member in group.members.values()]
        found = {str(member.compressor) for member in members}
        return sorted(found | self.requests.specs)

    @property
    def locks(self) -> list[Lock]:
        """Those of declared groups. From any thread."""
        return [group.lock for group in list(self._groups.values())]

    def member(self, request: Request, compressor: Compressor, state: State) -> Member:
        """Return ``request`` as a member of buckets."""
        peers = self.sets[request.process_set]
        seed, link = self._limits.seed, self._limits.link
        place = self.place_of(request)
        self.bring(state, place)
        return Member(request, compressor, peers.rank, peers.size, seed, place, state, link)

    def place_of(self, request: Request) -> Place:
        """Return where a tensor lies; ValueError where the transport moves nothing."""
        place = self.places.get(request.place)
        if place is None:
            raise ValueError(
                f"{request.name!r} is to lie at {request.place!r}, where this transport moves "
                f"nothing; it moves what lies at {', '.join(self.places)}"
            )
        return place

    def bring(self, state: State, place: Place) -> None:
        """Let what a compressor remembers lie at ``place``."""
        if len(self.places) > 1:  # or it lies there
            with self.at_work():
                place.bring(state)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """Put what the caller does in order with the engine's work, wherever that is."""
        with ExitStack() as stack:
            for place in self.places.values():
                stack.enter_context(place.at_work())
            yield

    def dispatch(self, message: bytes) -> None:
        """Do what ``message`` says. Raises LostElsewhere or BrokenElsewhere, if that is what."""
        handler = self._handlers.get(message[:1])
        if handler is not None:
            # The others may be in the next step already, where this rank has no data of its own.
            if self.joined or message[:1] not in _OVERLAPPING:
                self.pipeline.drain()
            handler(message)
        elif (end := m.unpack_end(message)) is not None:
            raise end

    def encode_next(self) -> None:
        """Compress one of the ``complete`` buckets, and vote for it."""
        chosen = self.complete.take()
        if not chosen.current:
            return  # of a step that failed meanwhile
        owner, _, index, epoch = chosen
        if owner.unplanned is not None:
            self._fail_elsewhere(owner, owner.unplanned)
            return
        bucket = owner.buckets[index]
        if not bucket.more:
            owner.begin_bucket(index)
        if self.recorder.observers:
            self.recorder.encoding(owner.title, owner.step, bucket)
        try:
            nbytes = bucket.encode(self.recorder)
        except MemoryError:
            what = f"a bucket of {bucket.uncompressed} bytes"
            biggest = max(each.uncompressed for each in owner.buckets)
            text = f"abandoned: no memory in step {owner.step}, for {what}"
            self._give_up(owner, "memory", text, biggest)
            return
        except BaseException as error:  # nobody is inside a collective yet: the step is given up
            self._fail_elsewhere(owner, error)
            return
        vote = m.Vote(
            owner.number,
            epoch,
            index,
            nbytes,
            owner.peers.number,
            owner.turn,
            bucket.plan_of(0),
            owner.digest_to_vote(index),
            len(owner.to_vote),
            bucket.final,
            bucket.phantom,
        )
        self._control.send(m.pack_vote(vote))

    def watch(self, observers: Sequence[Observer]) -> None:
        """Tell ``observers`` of everything from now on, and nobody else."""
        self.recorder.observers = tuple(observers)
        for peers in self.sets.values():
            peers.watch(self.recorder.note if observers else None)
        for group in self._groups.values():
            group.note_times(bool(observers))
        if not observers:
            self.recorder.submitted.clear()

    def release(self, group: Group) -> None:
        """Forget a group; in the middle of a step, once all ranks know that it cannot end."""
        if group.number not in self._groups:
            return
        if group.in_step and not group.ended:
            self._released.add(group.number)
            self.abandon(group, "the optimizer was dropped between backward and step")
        else:
            self._retire(group)

    def _retire(self, group: Group) -> None:
        """Tell that this rank's caller is gone. Others may train on, while this rank has joined."""
        group.retire()
        self._release(group)

    def _release(self, owner: BucketOwner) -> None:
        self._control.send(m.RELEASE + dumps([owner.peers.number, owner.number]))

    def _forget_group(self, message: bytes) -> None:
        self._groups.pop(loads(message[1:]), None)

    def join(self, process_set: int) -> None:
        """Contribute nothing of this rank's own from now on, until all ranks have joined."""
        self.joined.add(process_set)
        for group in self._groups.values():
            if group.peers.number == process_set:
                group.pass_over()
        self._control.send(m.JOIN + dumps(process_set))

    def own_sets(self) -> list[int]:
        """Return the numbers of the process sets that this rank is in; that of all ranks first."""
        return list(self.sets)

    def under_way(self, process_set: int) -> str | None:
        """Return the name of a group in the middle of a step, if there is one."""
        groups = list(self._groups.values())
        found = (g.name for g in groups if g.peers.number == process_set and g.in_step)
        return next(found, None)

    def retune(self, setting: dict[str, Any]) -> None:
        """Use other limits: declared groups in a step that no rank has begun, the rest at once."""
        self._limits = replace(self._limits, **setting)
        self.places["host"].pool.reserve(self._limits.fusion_threshold)
        self.requests.retune(self._limits)
        self.pipeline.depth = self._limits.streams
        for group in self._groups.values():
            group.retune(self._limits)

    def abandon(self, group: Group, why: str) -> None:
        """Tell the other ranks that this one gives up the step at hand. From any thread."""
        self._give_up(group, "abandoned", f"abandoned: {why}")

    def close(self, error: Exception) -> None:
        """Fail everything in flight, and whatever comes later, with ``error``."""
        try:
            self.pipeline.stop(self.interrupt)
            for place in self.places.values():
                place.close()
        finally:
            self._fail_all(error)

    def interrupt(self) -> None:
        """End collectives that wait, here and on other ranks."""
        for peers in list(self.sets.values()):
            peers.comm.interrupt()

    def _fail_all(self, error: Exception) -> None:
        self.requests.close(error)
        for handle in list(self._expected.values()):
            handle.finish(error)
        for owner in [*self._groups.values(), *self._batches.values()]:
            owner.fail(error)

    # -- buckets that are voted on: of declared groups, and of batches --------------------------

    def _owner(self, number: int) -> BucketOwner | None:
        return self._groups.get(number) or self._batches.get(number)

    def _go(self, message: bytes) -> None:
        verdict = m.unpack_go(message)
        owner = self._owner(verdict.group)
        if owner is None or verdict.epoch != owner.epoch:
            return  # of another process set's ranks
        bucket = owner.buckets[verdict.bucket]
        if self._limits.join_divisor == "contributors":
            owner.average_over(verdict.bucket, verdict.contributors)
        # What is raised here breaks the engine; failures that all ranks know of are left in it.
        track = bucket.among(owner.peers).next_track()
        steps = bucket.exchange(track, verdict.sizes, self.recorder, verdict.epoch)
        done = partial(self._exchanged, owner, verdict.bucket, verdict.epoch)
        nbytes = bucket.bytes_of(verdict.sizes)
        self._exchanges.launch(steps, bucket.trace, track, nbytes, done)

    def _exchanged(self, owner: BucketOwner, index: int, epoch: int) -> None:
        bucket = owner.buckets[index]
        failure = bucket.failure
        if failure is not None:
            if failure.witness == owner.peers.rank:
                if bucket.fatal:
                    raise failure.__cause__ or failure
                self._fail_elsewhere(owner, failure.__cause__ or failure, "exchange")
            return
        if self.recorder.observers:
            owner.observed(index, self.recorder)
        if bucket.more:
            self.complete.add(owner, index, epoch)
            return
        owner.bucket_done(index)
        self._forget(owner.number)

    def _forget(self, number: int) -> None:
        """Forget a batch that is decided, or a released group whose last step has ended."""
        batch = self._batches.get(number)
        if batch is not None and batch.decided:
            del self._batches[number]
        group = self._groups.get(number)
        if group is not None and number in self._released and group.ended:
            self._released.discard(number)
            self._retire(group)

    def _undertake(self, batch: Batch) -> None:
        """Keep a batch that may fail on all ranks, and encode what these vote on."""
        if not batch.decided:
            self._batches[batch.number] = batch
        for index in batch.to_vote:
            self.complete.add(batch, index, batch.epoch)

    def _declared(self, message: bytes) -> None:
        process_set, name, number, order = loads(message[1:])
        if process_set not in self.sets:
            return
        handle = self._expected[process_set, name]
        group: Group = handle.detail(order)
        group.number = number
        group.note_times(bool(self.recorder.observers))
        handle.output = self._groups[number] = group
        self.answer((process_set, name))

    def _failed(self, message: bytes) -> None:
        failed = m.FailedStep(*loads(message[1:]))
        owner = self._owner(failed.group)
        if owner is None or owner.epoch != failed.epoch:
            return
        group = self._groups.get(failed.group)
        text, gone, turn = failed.text, failed.gone, failed.turn
        if group is not None and failed.kind == "memory":
            text = f"{text}; {group.halve(turn + 1, failed.biggest)}"
        self.recorder.abandoned(owner.title, owner.step, text)
        error = (
            PeerLost(text, gone) if failed.kind == "gone" and gone else _KINDS[failed.kind](text)
        )
        owner.fail(error, None if failed.kind == "mismatch" else turn)
        if group is None:
            self._release(owner)  # a batch, of which nothing is left
        elif group.peers.number in self.joined and not gone:
            group.pass_over()
        self._forget(owner.number)

    def _give_up(self, owner: BucketOwner, kind: str, text: str, biggest: int = 0) -> None:
        at = owner.peers.number, owner.number, owner.epoch, owner.turn
        self._control.send(m.FAILED + dumps(m.Failure(*at, kind, text, biggest)))

    def _fail_elsewhere(
        self, owner: BucketOwner, error: BaseException, kind: str = "compression"
    ) -> None:
        log.debug("a bucket failed", exc_info=error)
        known = isinstance(error, CompressionFailed | ExchangeFailed)
        self._give_up(owner, kind, str(error) if known else in_words(error))

    def _wanted(self, message: bytes) -> None:
        vote = m.unpack_vote(message)
        group = self._groups.get(vote.group)
        if group is None or vote.process_set not in self.joined or group.epoch != vote.epoch:
            return
        if group.unplanned is not None:
            self._fail_elsewhere(group, group.unplanned)
        elif group.submit_zeros(vote.bucket):
            self.complete.add(group, vote.bucket, vote.epoch)

    # -- process sets, ranks that join, refusals ------------------------------------------------

    def _set_changed(self, message: bytes) -> None:
        change = m.SetChange(*loads(message[1:]))
        mine = self.rank in change.called
        if change.text:
            if mine:
                self.answer("process set", _refused_because(change.text, change.gone))
            return
        if not change.ranks:
            self._remove(change.number)
        else:
            comm = self.sets[0].comm.subset(change.ranks)
            if comm is not None:
                peers = Peers(change.number, tuple(change.ranks), unwatched(comm))
                self.sets[change.number] = peers
                if self.recorder.observers:
                    peers.watch(self.recorder.note)
        if mine:
            self._expected["process set"].output = change.number
            self.answer("process set")

    def _remove(self, number: int) -> None:
        """Forget a process set; what was asked for in it and not done fails."""
        removed = self.sets.pop(number, None)
        if removed is None:
            return
        error = Mismatch(f"process set {number} was removed")
        self.requests.remove(number, error)
        self.joined.discard(number)
        owners = [*self._groups.values(), *self._batches.values()]
        for owner in [each for each in owners if each.peers is removed]:
            owner.fail(error)
            self._groups.pop(owner.number, None)
            self._batches.pop(owner.number, None)
        removed.comm.close()

    def _all_joined(self, message: bytes) -> None:
        number, last, text, gone = loads(message[1:])
        expected = self._expected.pop(("join", number), None)
        self.joined.discard(number)
        if expected is not None:
            expected.output = last
            expected.finish(_refused_because(text, gone) if text else None)

    def _announced(self, message: bytes) -> None:
        action, argument, all_here = loads(message[1:])
        do = self.actions.get(action)
        if do is not None:  # what it concerns is perhaps not on this rank, or no longer
            do(argument, all_here)

    def _stalled(self, message: bytes) -> None:
        if self.rank == 0:
            text = loads(message[1:])
            log.warning("%s", text)
            self.recorder.waited(text)

    def _refused(self, message: bytes) -> None:
        refusal = m.Refusal(*loads(message[1:]))
        if self.rank not in refusal.ranks:
            return
        error = _refused_because(refusal.text, refusal.gone)
        if isinstance(refusal.names, str):
            self.answer((refusal.process_set, refusal.names), error)
        else:
            self.requests.refuse(refusal.process_set, refusal.names, error)


def _refused_because(text: str, gone: Sequence[int]) -> RingError:
    return PeerLost(text, gone) if gone else Mismatch(text)


# What a step's failure is raised as, by the coordinator's word for it.
_KINDS: dict[str, type[RingError]] = {
    "compression": CompressionFailed,
    "exchange": CompressionFailed,
    "abandoned": StepAbandoned,
    "memory": OutOfMemory,
    "mismatch": Mismatch,
    "gone": Mismatch,  # of a process set that was removed; PeerLost names ranks that left
}
