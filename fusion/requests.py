"""What one rank does about operations that were asked for one by one. On the engine's thread."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any

from ringlet.compressors import Compressor, NoCompression, resolve
from ringlet.compressors.context import State
from ringlet.fusion import messages as m
from ringlet.fusion.executor import Batch
from ringlet.fusion.flights import Flights
from ringlet.fusion.limits import Limits
from ringlet.fusion.member import Member
from ringlet.fusion.meter import Meter, Trace
from ringlet.fusion.neutral import neutral
from ringlet.fusion.peers import Peers
from ringlet.fusion.place import Place
from ringlet.fusion.request import Request, loads
from ringlet.fusion.singles import single_steps
from ringlet.fusion.submissions import Submissions
from ringlet.fusion.work import Signal, Work

_PLANS = 64  # batches that are kept to be run again


class Requests:
    """Runs what every rank has asked for, and knows by which numbers ranks ask again.

    ``vote_on(batch, index)`` is called for buckets that have to be voted on. Without ``cache``
    numbers are learnt, but this rank asks by name; others may still ask by number.
    """

    def __init__(
        self,
        sets: Mapping[int, Peers],
        places: Mapping[str, Place],
        flights: Flights,
        meter: Meter,
        submissions: Submissions,
        signal: Signal,
        member: Callable[[Request, Compressor, State], Member],
        vote_on: Callable[[Batch, int], None],
        cache: bool = True,
    ) -> None:
        self._sets, self._places = sets, places
        self._flights, self._meter = flights, meter
        self._submissions, self._signal = submissions, signal
        self._member, self._vote_on = member, vote_on
        self._cache = cache
        self.states: dict[Hashable, State] = {}
        self._cached: dict[int, dict[int, Request]] = {}
        self._ids: dict[Request, int] = {}
        self._members: dict[Hashable, Member] = {}
        self._plans: OrderedDict[tuple[int, int], Batch] = OrderedDict()
        self._executing: list[Work] = []  # taken, but perhaps not finished

    def known(self, request: Request) -> int | None:
        """Return the number to ask for ``request`` by, if it has one and the cache is on."""
        return self._ids.get(request) if self._cache else None

    def retune(self, limits: Limits) -> None:
        """Plan anew, because limits have changed."""
        self._cache = limits.cache
        self._plans.clear()

    def close(self, error: Exception) -> None:
        """Fail everything in flight, and whatever comes later, with ``error``."""
        self._submissions.close(error)
        self._submissions.fail([work for work in self._executing if not work.done()], error)

    def refuse(self, process_set: int, names: Sequence[str], error: Exception) -> None:
        """Fail requests by name."""
        for name in names:
            self._submissions.refuse(name if process_set == 0 else (process_set, name), error)

    def execute_hits(self, message: bytes, limits: Limits) -> None:
        """Run requests that have numbers."""
        number, batch, bits = m.unpack_execute_hits(message)
        if number not in self._sets:
            return
        known = self._plans.get((number, bits))
        if known is not None:
            self._plans.move_to_end((number, bits))
            works = [self._found(member.request) for member in known.members]
            self._take(works)
            self._run(known, batch, works)
            return
        cached = self._cached[number]
        ready = [(self._found(cached[i]), ()) for i in m.ids_of(bits)]
        plan = self._run_all(self._sets[number], batch, ready, limits)
        if plan is not None and len(plan.members) == len(ready):
            self._plans[number, bits] = plan
            if len(self._plans) > _PLANS:
                self._plans.popitem(last=False)

    def execute(self, message: bytes, limits: Limits) -> None:
        """Run requests by name, and learn numbers."""
        number, batch, items = loads(message[1:])
        if number not in self._sets:
            return
        ready: list[tuple[Work, Sequence[Any]]] = []
        for name, cache_id, sizes, told in items:
            key = name if number == 0 else (number, name)
            work = self._submissions.find(key) or self._zeros(Request.from_list(told))
            if cache_id >= 0:
                self._cached.setdefault(number, {})[cache_id] = work.request
                self._ids[work.request] = cache_id
            ready.append((work, sizes))
        self._run_all(self._sets[number], batch, ready, limits)

    # -- inside -----------------------------------------------------------------------------------

    def _take(self, works: Sequence[Work]) -> None:
        left = [w for w in self._executing if not w.done()] if self._flights.pipeline.busy else []
        self._executing = [*left, *works]

    def _run_all(
        self,
        peers: Peers,
        batch: int,
        ready: Sequence[tuple[Work, Sequence[Any]]],
        limits: Limits,
    ) -> Batch | None:
        """Run what all ranks are ready for: allreduces fused by look-ahead, the rest in order."""
        self._take([work for work, _ in ready])
        reductions = [work for work, _ in ready if work.request.kind == "allreduce"]
        plan: Batch | None = None
        if reductions:
            members = [self._member_for(work) for work in reductions]
            plan = Batch(peers, members, limits, self._submissions)
            self._run(plan, batch, reductions)
        for work, sizes in ready:
            if work.request.kind != "allreduce":
                trace, nbytes = Trace(), work.input.nbytes * peers.size
                place = self._places[work.request.place]
                steps = single_steps(peers, work, sizes, place)
                done = partial(self._single_done, work, trace)
                self._flights.launch(steps, trace, peers, nbytes, done, counted=False)
        return plan

    def _run(self, plan: Batch, number: int, works: Sequence[Work]) -> None:
        if not plan.finished:  # here; the others, which it was all they waited for, have gone on
            self._flights.pipeline.drain()
        plan.begin(number, works)
        for index in plan.run_plain(self._flights, self._meter):
            self._vote_on(plan, index)

    def _single_done(self, work: Work, trace: Trace) -> None:
        if self._meter.observers:
            self._meter.single_done(work.request.kind, work.request.key, work.name, trace)
        self._submissions.complete([work])

    def _found(self, request: Request) -> Work:
        return self._submissions.find(request.key) or self._zeros(request)

    def _zeros(self, request: Request) -> Work:
        """Return what this rank, which has joined, contributes."""
        place = self._places[request.place]
        with place.at_work():
            values = neutral(request, place.xp)
        return Work(request, self._signal, values, values, resolve(request.spec))

    def _member_for(self, work: Work) -> Member:
        request, compressor = work.request, work.compressor
        member = self._members.get(request.key)
        if member is None or member.request != request or member.declared != compressor:
            returns = ".noname." not in request.name
            state: State = {}
            if returns and not isinstance(compressor, NoCompression):
                state = self.states.setdefault(request.key, {})
            member = self._member(request, compressor, state)
            if returns:
                self._members[request.key] = member
        return member
