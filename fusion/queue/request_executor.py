"""What one rank does about operations that were asked for one by one. On the engine's thread."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from ringlet.compressors import Compressor, NoCompression, resolve
from ringlet.compressors.core.context import State
from ringlet.fusion.devices.host import Place
from ringlet.fusion.errors import CompressionFailed
from ringlet.fusion.exchanges import Exchanges
from ringlet.fusion.limits import Limits
from ringlet.fusion.negotiation import messages as m
from ringlet.fusion.peers import Peers
from ringlet.fusion.planning.member import Member
from ringlet.fusion.queue.batch import Batch, Exchanged
from ringlet.fusion.queue.tensor_queue import TensorQueue
from ringlet.fusion.queue.unfused_ops import single_steps
from ringlet.fusion.recording.events import Trace
from ringlet.fusion.recording.recorder import Recorder
from ringlet.fusion.requests.handle import Signal, Work
from ringlet.fusion.requests.identity_values import neutral
from ringlet.fusion.requests.request import Request, loads
from ringlet.fusion.requests.series import MARK
from ringlet.ring.collectives.checksum import digest, turn_of
from ringlet.ring.errors import RingError

Digest = tuple[int, int, str, int]  # batch, place in it, a tensor's name, digest
_SAME = ("broadcast", "allgather")  # beside sums, what gives all ranks the same

Alike = tuple[tuple[Request, int], ...]  # prototypes of calls, and how many follow each other
_PLANS = 64  # batches that are kept to be run again
_MEMBERS = 1 << 13  # tensors of which it is kept how they travel


class _Ready(NamedTuple):
    """What every rank is ready for: rows or splits by rank, if they differ, and ``contributors``.

    Those are what means are divided by; 0 for all ranks.
    """

    work: Work
    sizes: Sequence[Any]
    contributors: int


class RequestExecutor:
    """Runs what every rank has asked for, and knows by which numbers ranks ask again.

    This rank has ``joined`` process sets, to which it contributes zeros for what it has not asked.
    ``undertake(batch)`` is called for batches that have begun, and is to vote on what needs it;
    ``exchanged(batch, index, epoch)`` for buckets that needed no vote. Without ``cache`` numbers
    are learnt, but this rank asks by name; others may still ask by number.
    """

    def __init__(
        self,
        sets: Mapping[int, Peers],
        places: Mapping[str, Place],
        exchanges: Exchanges,
        recorder: Recorder,
        tensor_queue: TensorQueue,
        signal: Signal,
        member: Callable[[Request, Compressor, State], Member],
        undertake: Callable[[Batch], None],
        exchanged: Exchanged,
        joined: Container[int],
        cache: bool = True,
    ) -> None:
        self._joined = joined
        self._sets, self._places = sets, places
        self._exchanges, self._recorder = exchanges, recorder
        self._tensor_queue, self._signal = tensor_queue, signal
        self._member, self._undertake, self._exchanged = member, undertake, exchanged
        self._cache = cache
        self.states: dict[Hashable, State] = {}
        self.version = 0  # EXECUTE messages heard: numbers may change their meaning with each
        self._cached: dict[int, dict[int, tuple[Request, Sequence[Any]]]] = {}
        self._ids: dict[Request, int] = {}
        self._members: OrderedDict[Hashable, Member] = OrderedDict()
        self._plans: OrderedDict[tuple[int, int], Batch] = OrderedDict()
        self._series_plans: OrderedDict[tuple[int, Alike], Batch] = OrderedDict()
        self.digests: dict[int, list[Digest]] = {}  # by process set, that ranks have yet to compare
        self._executing: list[Work] = []  # taken, but perhaps not finished

    @property
    def specs(self) -> set[str]:
        """How tensors are compressed whose names come again."""
        found = [member.declared for member in list(self._members.values())]
        return {str(each) for each in found if not isinstance(each, NoCompression)}

    def known(self, request: Request) -> int | None:
        """Return the number to ask for ``request`` by, if it has one and the cache is on."""
        return self._ids.get(request) if self._cache else None

    def retune(self, limits: Limits) -> None:
        """Plan anew, because limits have changed."""
        self._cache = limits.cache
        self._plans.clear()
        self._series_plans.clear()

    def close(self, error: Exception) -> None:
        """Fail everything in flight, and whatever comes later, with ``error``."""
        self._tensor_queue.close(error)
        self._tensor_queue.fail([work for work in self._executing if not work.done()], error)

    def refuse(self, process_set: int, names: Sequence[str], error: Exception) -> None:
        """Fail requests by name."""
        for name in names:
            self._tensor_queue.refuse(name if process_set == 0 else (process_set, name), error)

    def remove(self, process_set: int, error: Exception) -> None:
        """Forget a process set, what compressors remember of its tensors included.

        What was asked for in it fails with ``error``.
        """
        for request, _ in self._cached.pop(process_set, {}).values():
            self._ids.pop(request, None)
        for key in [key for key in self._plans if key[0] == process_set]:
            del self._plans[key]
        for plan in [plan for plan in self._series_plans if plan[0] == process_set]:
            del self._series_plans[plan]
        self.digests.pop(process_set, None)
        for kept in (self.states, self._members):
            for each in [each for each in list(kept) if _is_of(process_set, each)]:
                del kept[each]
        self._tensor_queue.refuse_set(process_set, error)

    def execute_hits(self, message: bytes, limits: Limits) -> None:
        """Run requests that have numbers."""
        number, batch, bits = m.unpack_execute_hits(message)
        if number not in self._sets:
            return
        known = self._plans.get((number, bits))
        works = [self._asked(member.request) for member in known.members] if known else []
        if known is not None and known.serves_again(works):
            self._plans.move_to_end((number, bits))
            self._take(works)
            self._run(known, batch, works, [0] * len(works))
            return
        cached = self._cached[number]
        found = [cached[i] for i in m.ids_of(bits)]
        ready = [_Ready(self._asked(request), sizes, 0) for request, sizes in found]
        plan = self._run_all(self._sets[number], batch, ready, limits)
        if plan is not None and plan.unplanned is None and len(plan.members) == len(ready):
            self._plans[number, bits] = plan
            if len(self._plans) > _PLANS:
                self._plans.popitem(last=False)

    def execute(self, message: bytes, limits: Limits) -> None:
        """Run requests by name, and learn numbers."""
        self.version += 1
        number, batch, told = loads(message[1:])
        if number not in self._sets:
            return
        ready: list[_Ready] = []
        for item in map(m.Item._make, told):
            key = item.name if number == 0 else (number, item.name)
            work = self._tensor_queue.find(key)
            if work is None or not work.asked:
                work = self._zeros(number, item.name, item.request)
            if item.cache_id >= 0:
                self._learn(number, item.cache_id, work.request, item.sizes)
            ready.append(_Ready(work, item.sizes, _counted(item.contributors, limits)))
        self._run_all(self._sets[number], batch, ready, limits)

    def execute_series(self, message: bytes, limits: Limits) -> None:
        """Run calls without names."""
        number, batch, told = loads(message[1:])
        if number not in self._sets:
            return
        works = [
            self._called(number, f"{prefix}{n}")
            for prefix, first, stop in told
            for n in range(first, stop)
        ]
        alike = _alike(works)
        known = self._series_plans.get((number, alike)) if alike else None
        if known is not None and known.serves_again(works):
            self._series_plans.move_to_end((number, alike))
            if not known.finished:
                self._exchanges.pipeline.drain()
            for member, work in zip(known.members, works, strict=True):
                member.request = work.request  # for its name
            self._take(works)
            self._run(known, batch, works, [0] * len(works))
            return
        ready = [_Ready(work, (), 0) for work in works]
        plan = self._run_all(self._sets[number], batch, ready, limits)
        if plan is not None and alike:
            self._series_plans[number, alike] = plan
            if len(self._series_plans) > _PLANS:
                self._series_plans.popitem(last=False)

    # -- inside -----------------------------------------------------------------------------------

    def _learn(self, number: int, i: int, request: Request, sizes: Sequence[Any]) -> None:
        """Note what a number stands for from now on."""
        cached = self._cached.setdefault(number, {})
        before = cached.get(i)
        if before is not None and before[0] != request:
            if self._ids.get(before[0]) == i:
                del self._ids[before[0]]
            for key in [key for key in self._plans if key[0] == number and key[1] >> i & 1]:
                del self._plans[key]
        cached[i] = request, sizes
        self._ids[request] = i

    def _take(self, works: Sequence[Work]) -> None:
        left = [w for w in self._executing if not w.done()] if self._exchanges.pipeline.busy else []
        self._executing = [*left, *works]

    def _run_all(
        self,
        peers: Peers,
        batch: int,
        ready: Sequence[_Ready],
        limits: Limits,
    ) -> Batch | None:
        """Run what all ranks are ready for: allreduces fused by look-ahead, the rest in order."""
        self._take([each.work for each in ready])
        reductions = [each for each in ready if each.work.request.kind == "allreduce"]
        plan: Batch | None = None
        if reductions:
            works, note = [each.work for each in reductions], partial(self._note, peers.number)
            members, errors = zip(*map(self._planned, works), strict=True)
            plan = Batch(peers, members, limits, self._tensor_queue, note)
            plan.follow([self._member_for(work) for work in works], filter(None, errors))
            self._run(plan, batch, works, [each.contributors for each in reductions])
        for i, (work, sizes, _) in enumerate(ready):
            if work.request.kind != "allreduce":
                track, trace = peers.tracks[0], Trace()
                nbytes = work.input.nbytes * peers.size
                place = self._places[work.request.place]
                steps = single_steps(track, work, sizes, place)
                compared = limits.share > 0 and peers.size > 1 and not place.ordered
                at = (batch, -1 - i) if compared and work.request.kind in _SAME else None
                done = partial(self._single_done, work, trace, at, limits.share)
                self._exchanges.launch(steps, trace, track, nbytes, done, counted=False)
        return plan

    def _run(
        self, plan: Batch, number: int, works: Sequence[Work], contributors: Sequence[int]
    ) -> None:
        if not plan.finished:  # here; the others, which it was all they waited for, have gone on
            self._exchanges.pipeline.drain()
        plan.begin(number, works, contributors)
        self._undertake(plan)
        plan.launch(self._exchanges, self._recorder, self._exchanged)

    def _single_done(
        self, work: Work, trace: Trace, at: tuple[int, int] | None, share: int
    ) -> None:
        request = work.request
        if self._recorder.observers:
            self._recorder.single_done(request.kind, request.key, work.name, trace)
        if at is not None and work.output.size:
            turn = turn_of(at[0], share)
            found = digest(work.output, request.dtype, share=share, turn=turn)
            self._note(request.process_set, *at, work.name, found)
        self._tensor_queue.complete([work])

    def _note(self, process_set: int, batch: int, place: int, name: str, value: int) -> None:
        self.digests.setdefault(process_set, []).append((batch, place, name, value))

    def _asked(self, request: Request) -> Work:
        """Return what this rank has asked for. Raises RingError if it has not."""
        return self._called(request.process_set, request.name)

    def _called(self, process_set: int, name: str) -> Work:
        work = self._tensor_queue.find(name if process_set == 0 else (process_set, name))
        if work is None or not work.asked:
            return self._zeros(process_set, name, None)
        return work

    def _zeros(self, process_set: int, name: str, told: list[Any] | None) -> Work:
        """Return what this rank contributes where it has joined. Raises RingError elsewhere."""
        if told is None or process_set not in self._joined:
            raise RingError(
                f"{name!r} was to be executed, which this rank has not asked for and has not "
                "joined either; this is a fault of Ringlet, please report it"
            )
        request = Request.from_list(told)
        place = self._places[request.place]
        with place.at_work():
            values = neutral(request, request.numel, place.xp)
        return Work(request, self._signal, values, values, resolve(request.spec))

    def _member_for(self, work: Work) -> Member:
        request, compressor = work.request, work.compressor
        member = self._members.get(request.key)
        if member is None or member.request != request or member.declared != compressor:
            returns = MARK not in request.name
            state: State = {}
            if returns and not isinstance(compressor, NoCompression):
                state = self.states.setdefault(request.key, {})
            member = self._member(request, compressor, state)
            if returns:
                self._members[request.key] = member
                if len(self._members) > _MEMBERS:
                    self._members.popitem(last=False)
        else:
            self._members.move_to_end(request.key)
        return member

    def _planned(self, work: Work) -> tuple[Member, CompressionFailed | None]:
        """Return what serves ``work`` this time, and what its schedule raised, if it did."""
        member = self._member_for(work)
        if MARK in work.request.name or not member.scheduled:
            return member, None
        try:
            return member.at(member.step, apart=True), None
        except CompressionFailed as error:
            return member.kept_apart(), error


def _is_of(process_set: int, key: Hashable) -> bool:
    """Whether a request's key is one of a process set, other than that of all ranks."""
    return isinstance(key, tuple) and key[0] == process_set


def _alike(works: Sequence[Work]) -> Alike:
    """Return by which prototypes ``works`` are planned; nothing where a plan serves only once.

    What compressors do may depend on the name.
    """
    runs: list[tuple[Request, int]] = []
    before, start = None, 0
    for i, work in enumerate(works):
        prototype = work.request.prototype
        if prototype is None or type(work.compressor) is not NoCompression:
            return ()
        if prototype is not before:
            if before is not None:
                runs.append((before, i - start))
            before, start = prototype, i
    if before is None or any(each.kind != "allreduce" for each, _ in (*runs, (before, 0))):
        return ()
    return (*runs, (before, len(works) - start))


def _counted(contributors: int, limits: Limits) -> int:
    """Return by how many ranks a mean is divided: 0 for all, whoever has joined."""
    return contributors if limits.join_divisor == "contributors" else 0
