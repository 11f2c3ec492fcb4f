"""What one rank does on the coordinator's word. Used by the engine's thread, but for ``expect``."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from ringlet.compressors import Compressor
from ringlet.compressors.context import State
from ringlet.fusion import messages as m
from ringlet.fusion.errors import CompressionFailed, EngineClosed, OutOfMemory, StepAbandoned
from ringlet.fusion.executor import Batch
from ringlet.fusion.flights import Flights
from ringlet.fusion.group import Group
from ringlet.fusion.limits import Limits
from ringlet.fusion.member import Member
from ringlet.fusion.meter import Meter
from ringlet.fusion.observe.events import Observer
from ringlet.fusion.observe.hops import unwatched
from ringlet.fusion.peers import Peers
from ringlet.fusion.place import Place
from ringlet.fusion.request import Request, dumps, loads
from ringlet.fusion.requests import Requests
from ringlet.fusion.submissions import Submissions
from ringlet.fusion.work import Handle, Signal
from ringlet.ring.communicator import Communicator
from ringlet.ring.control import ControlPlane
from ringlet.ring.errors import Mismatch, PeerLost, RingError

log = logging.getLogger("ringlet")

_NO_MEMORY = "no memory in step "
# These do not touch what is under way; other messages wait for its end.
_OVERLAPPING = frozenset([m.GO, m.EXECUTE, m.EXECUTE_HITS, m.WANTED, m.STALLED])


class Participant:
    """Runs collectives in the one order that the coordinator announces."""

    def __init__(
        self,
        comm: Communicator,
        control: ControlPlane,
        limits: Limits,
        submissions: Submissions,
        signal: Signal,
        places: Sequence[Place] = (),
    ) -> None:
        self.rank = comm.rank
        self.meter = Meter()
        self.sets = {0: Peers(0, tuple(range(comm.size)), comm)}
        self.complete: deque[tuple[Group | Batch, int, int]] = deque()
        self.joined: set[int] = set()
        self._control, self._limits = control, limits
        host = Place(reserved=limits.fusion_threshold)
        self.places = {place.name: place for place in (host, *places)}
        self._flights = Flights(self.meter, control.wake, comm.rank, limits.streams)
        self.pipeline = self._flights.pipeline
        self.requests = Requests(
            self.sets,
            self.places,
            self._flights,
            self.meter,
            submissions,
            signal,
            self.member,
            self._vote_on,
            limits.cache,
        )
        self._expected: dict[Hashable, tuple[Handle, Any]] = {}
        self._groups: dict[int, Group | Batch] = {}
        self._released: set[int] = set()
        self._handlers = {
            m.GO: self._go,
            m.EXECUTE_HITS: lambda said: self.requests.execute_hits(said, self._limits),
            m.EXECUTE: lambda said: self.requests.execute(said, self._limits),
            m.DECLARED: self._declared,
            m.REFUSED: self._refused,
            m.FAILED: self._failed,
            m.WANTED: self._wanted,
            m.JOINED: self._all_joined,
            m.SET: self._set_changed,
            m.STALLED: self._stalled,
            m.ANNOUNCED: self._announced,
        }
        self.actions: dict[str, Callable[[Any, bool], None]] = {}

    def expect(self, key: Hashable, handle: Handle, detail: Any = None) -> bool:
        """Finish ``handle`` when the answer to ``key`` comes; False if one is awaited already."""
        return self._expected.setdefault(key, (handle, detail))[0] is handle

    def answer(self, key: Hashable, error: Exception | None = None) -> None:
        """Finish what waits for ``key``, if anything does. From any thread."""
        expected = self._expected.pop(key, None)
        if expected is not None:
            expected[0].finish(error)

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
        """Do what ``message`` says. Raises PeerLost, or what broke another rank's engine."""
        handler = self._handlers.get(message[:1])
        if handler is not None:
            # The others may be in the next step already, where this rank has no data of its own.
            if self.joined or message[:1] not in _OVERLAPPING:
                self.pipeline.drain()
            handler(message)
        elif message[:1] == m.LOST:
            rank, text = loads(message[1:])
            raise PeerLost(text, [rank])
        elif message[:1] == m.BROKEN:
            raise EngineClosed(f"the engine broke on {loads(message[1:])}")

    def encode_next(self) -> None:
        """Compress a bucket whose tensors are all there, and vote for it.

        The one that the next forward pass needs first: of the layers declared first.
        """
        if not self.complete:
            return
        complete = self.complete
        chosen = max(complete.copy(), key=_urgency) if len(complete) > 1 else complete[0]
        complete.remove(chosen)
        group, index, epoch = chosen
        if epoch != group.epoch:
            return  # of a step that failed meanwhile
        bucket = group.buckets[index]
        if not bucket.more:
            bucket.begin()
        if self.meter.observers:
            self.meter.encoding(group.name, group.step, bucket)
        try:
            nbytes = bucket.encode(self.meter)
        except MemoryError:
            raw = sum(member.nbytes for member in bucket.members)
            self.abandon(group, epoch, f"{_NO_MEMORY}{group.step}, for a bucket of {raw} bytes")
            return
        except Exception as error:
            self._fail_elsewhere(group, epoch, error)
            return
        vote = m.Vote(group.number, epoch, index, nbytes, group.peers.number)
        self._control.send(m.pack_vote(vote))

    def watch(self, observers: Sequence[Observer]) -> None:
        """Tell ``observers`` of everything from now on, and nobody else."""
        self.meter.observers = tuple(observers)
        for peers in self.sets.values():
            peers.watch(self.meter.note if observers else None)
        for group in self._groups.values():
            if isinstance(group, Group):
                group.note_times(bool(observers))
        if not observers:
            self.meter.submitted.clear()

    def release(self, group: Group) -> None:
        """Forget a group; in the middle of a step, once all ranks know that it cannot end."""
        if group.number not in self._groups:
            return
        if group.in_step:
            self._released.add(group.number)
            why = "the optimizer was dropped between backward and step"
            self.abandon(group, group.epoch, why)
        else:
            del self._groups[group.number]

    def steps(self) -> dict[int, int]:
        """Return the step that each declared group is in, by number."""
        groups = self._groups.values()
        return {group.number: group.step for group in groups if isinstance(group, Group)}

    def retune(self, setting: dict[str, Any], steps: dict[int, int]) -> None:
        """Use other limits: declared groups from the given steps on, the rest at once."""
        self._limits = replace(self._limits, **setting)
        self.places["host"].pool.reserve(self._limits.fusion_threshold)
        self.requests.retune(self._limits)
        self.pipeline.depth = self._limits.streams
        for number, step in steps.items():
            group = self._groups.get(number)
            if isinstance(group, Group):
                group.retune(self._limits, step)

    def abandon(self, group: Group | Batch, epoch: int, why: str) -> None:
        """Tell the other ranks that this one gives up a step."""
        body = [group.peers.number, group.number, epoch, f"abandoned: {why}"]
        self._control.send(m.FAILED + dumps(body))

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
        for handle, _ in list(self._expected.values()):
            handle.finish(error)
        for group in list(self._groups.values()):
            group.fail(error, for_good=True)

    # -- declared groups ------------------------------------------------------------------------

    def _go(self, message: bytes) -> None:
        verdict = m.unpack_go(message)
        group = self._groups.get(verdict.group)
        if group is None or verdict.epoch != group.epoch:
            return  # of another process set's ranks
        bucket = group.buckets[verdict.bucket]
        # What fails here breaks the engine: other ranks may hold this step's result already.
        peers = bucket.among(group.peers)
        steps = bucket.exchange(peers, verdict.sizes, self.meter, verdict.epoch)
        done = partial(self._exchanged, group, verdict)
        self._flights.launch(steps, bucket.trace, peers, sum(verdict.sizes), done)

    def _exchanged(self, group: Group | Batch, verdict: m.Verdict) -> None:
        failure = group.buckets[verdict.bucket].failure
        if failure is not None:
            if failure.witness == group.peers.rank:
                self._fail_elsewhere(group, verdict.epoch, failure.__cause__ or failure)
            return
        if self.meter.observers:
            group.observed(verdict.bucket, self.meter)
        if group.buckets[verdict.bucket].more:
            self.complete.append((group, verdict.bucket, verdict.epoch))
            return
        group.bucket_done(verdict.bucket)
        self._forget_batch(group)

    def _forget_batch(self, group: Group | Batch) -> None:
        if isinstance(group, Batch) and group.decided:
            self._groups.pop(group.number, None)

    def _vote_on(self, batch: Batch, index: int) -> None:
        self._groups[batch.number] = batch
        self.complete.append((batch, index, batch.epoch))

    def _declared(self, message: bytes) -> None:
        process_set, name, number, order = loads(message[1:])
        if process_set not in self.sets:
            return
        handle, (members, step, ready, abandoned) = self._expected.pop((process_set, name))
        by_name = {member.request.name: member for member in members}
        group = Group(
            name,
            number,
            [by_name[n] for n in order],
            self.sets[process_set],
            self._limits,
            ready,
            abandoned,
            step,
        )
        group.warm_up()
        group.note_times(bool(self.meter.observers))
        handle.output = self._groups[number] = group
        handle.finish()

    def _failed(self, message: bytes) -> None:
        number, epoch, text, gone = loads(message[1:])
        group = self._groups.get(number)
        if group is None or group.epoch != epoch:
            return
        kind = StepAbandoned if ": abandoned: " in text else CompressionFailed
        if kind is StepAbandoned and f": {_NO_MEMORY}" in text:
            kind = OutOfMemory
            if isinstance(group, Group):
                # The failing rank's number: another rank may still have to collect the step before.
                failed = int(text.partition(f": {_NO_MEMORY}")[2].partition(",")[0])
                text = f"{text}; {group.halve(failed + 1)}"
        self.meter.abandoned(group.name, group.step, text)
        if isinstance(group, Group) and group.peers.number in self.joined and not gone:
            group.pass_over()
        else:
            group.fail(PeerLost(text, gone) if gone else kind(text))
        self._forget_batch(group)
        if number in self._released:
            self._released.discard(number)
            del self._groups[number]

    def _fail_elsewhere(self, group: Group | Batch, epoch: int, error: BaseException) -> None:
        log.debug("a bucket failed", exc_info=error)
        known = isinstance(error, CompressionFailed)
        text = str(error) if known else f"{type(error).__name__}: {error}"
        body = [group.peers.number, group.number, epoch, text]
        self._control.send(m.FAILED + dumps(body))

    def _wanted(self, message: bytes) -> None:
        vote = m.unpack_vote(message)
        group = self._groups.get(vote.group)
        if vote.process_set not in self.joined or not isinstance(group, Group):
            return
        if group.epoch == vote.epoch and group.submit_zeros(vote.bucket):
            self.complete.append((group, vote.bucket, vote.epoch))

    # -- process sets, ranks that join, refusals ------------------------------------------------

    def _set_changed(self, message: bytes) -> None:
        number, ranks, text = loads(message[1:])
        handle, _ = self._expected.pop("process set")
        if text:
            handle.finish(Mismatch(text))
            return
        if not ranks:
            removed = self.sets.pop(number, None)
            if removed is not None:
                removed.comm.close()
        else:
            comm = self.sets[0].comm.subset(ranks)
            if comm is not None:
                self.sets[number] = Peers(number, tuple(ranks), unwatched(comm))
                if self.meter.observers:
                    self.sets[number].watch(self.meter.note)
        handle.output = number
        handle.finish()

    def _all_joined(self, message: bytes) -> None:
        number, last, text, gone = loads(message[1:])
        expected = self._expected.pop(("join", number), None)
        self.joined.discard(number)
        if expected is not None:
            expected[0].output = last
            expected[0].finish(PeerLost(text, gone) if text else None)

    def _announced(self, message: bytes) -> None:
        action, argument, all_here = loads(message[1:])
        self.actions[action](argument, all_here)

    def _stalled(self, message: bytes) -> None:
        if self.rank == 0:
            log.warning("%s", loads(message[1:]))

    def _refused(self, message: bytes) -> None:
        process_set, names, text, gone = loads(message[1:])
        error: RingError = PeerLost(text, gone) if gone else Mismatch(text)
        if isinstance(names, str):
            expected = self._expected.pop((process_set, names), None)
            if expected is not None:
                expected[0].finish(error)
            return
        self.requests.refuse(process_set, names, error)


def _urgency(item: tuple[Group | Batch, int, int]) -> float:
    """Return how soon a bucket is needed: somebody waits for a batch, then the last one planned."""
    group, index, _ = item
    return index if isinstance(group, Group) else float("inf")
