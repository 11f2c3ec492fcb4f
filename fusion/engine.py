"""The fusion engine: one background thread that agrees with the other ranks and moves tensors.

Callers submit by name, in any order, while backward still runs. The thread compresses what is
complete, votes, and runs collectives in the one order that the coordinator announces.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

from ringlet.compressors import Compressor, NoCompression
from ringlet.compressors.context import State
from ringlet.fusion import messages as m
from ringlet.fusion.errors import DuplicateName, EngineClosed
from ringlet.fusion.group import Group
from ringlet.fusion.hearing import Hearing
from ringlet.fusion.hooks import ENGINE_THREAD, Hooks
from ringlet.fusion.limits import Limits
from ringlet.fusion.negotiation import Coordinator
from ringlet.fusion.observe.control import MetricsControl
from ringlet.fusion.observe.timelines import Timelines
from ringlet.fusion.participant import Participant
from ringlet.fusion.place import Place
from ringlet.fusion.request import Request, dumps, loads
from ringlet.fusion.stall import StallInspector
from ringlet.fusion.stats import Stats
from ringlet.fusion.submissions import Submissions
from ringlet.fusion.tune.choice import settled
from ringlet.fusion.tune.control import LimitsControl
from ringlet.fusion.work import Handle, Signal, Work
from ringlet.ring.communicator import Communicator
from ringlet.ring.control import ControlPlane, Handler
from ringlet.ring.dtypes import Array
from ringlet.ring.errors import PeerLost

log = logging.getLogger("ringlet")

_LAST_S = 2.0  # for exchanges under way when a rank has left
_LEAVING_S = 10.0  # how long to wait until the coordinator has heard the goodbye
_COMPANY = 8  # cycles that submissions wait at most while more of them come in

OpenControl = Callable[[Communicator, Handler | None], ControlPlane]


class Engine:
    """Owns the communicator from now on. Made, and shut down, by all ranks together.

    Tensors lie in host memory, or at one of ``places``, whose memory the communicator moves.
    """

    def __init__(
        self,
        comm: Communicator,
        open_control: OpenControl,
        limits: Limits | None = None,
        places: Sequence[Place] = (),
    ) -> None:
        self.comm = comm
        self.limits = limits = settled(limits or Limits(), comm)
        self.rank, self.size = comm.rank, comm.size
        leads = self.rank == 0
        stalls = StallInspector(limits.stall_warning, limits.stall_shutdown)
        coordinator = Coordinator(self.size, limits.cache_capacity, stalls) if leads else None
        shortest = min((s for s in (limits.stall_warning, limits.stall_shutdown) if s), default=0)
        self._check_every = shortest / 4 if leads and self.size > 1 and shortest else None
        self._checked = time.monotonic()
        self._control = open_control(comm, coordinator)
        self._hearing = Hearing(self._control)
        self._signal = Signal(self._hurry)
        self._submissions = Submissions(self._signal)
        self._participant = Participant(
            comm, self._control, self.limits, self._submissions, self._signal, places
        )
        self._places = self._participant.places
        self._released: deque[Group] = deque()
        self._joining: deque[int] = deque()
        self._lock = threading.Lock()
        self._error: Exception | None = None
        self._hurried = False
        self._seen = self._cycles = 0  # how the queue has grown since the last flush
        self._closing = False
        self._direct = True  # false once submissions may have to be refused, or noted
        self.hooks = Hooks(
            comm, self._control, self._participant, self._signal, self._check_open, self._note
        )
        self.timelines, self.metrics = Timelines(self.hooks), MetricsControl(self.hooks)
        self.tuning = LimitsControl(self.hooks, self._participant, self._use)
        if leads and limits.autotune:
            self.tuning.start(limits)
        self._pid = os.getpid()
        _engines.add(self)
        self._thread = threading.Thread(
            target=self._run, name=f"{ENGINE_THREAD}{self.rank}", daemon=True
        )
        self._thread.start()

    # -- called by any thread -------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """What was counted since the start, or ``reset_stats``."""
        return self._participant.meter.stats

    @property
    def states(self) -> dict[Hashable, State]:
        """What compressors remember of tensors that are submitted one by one, by request key."""
        return self._participant.requests.states

    def place(self, name: str) -> Place | None:
        """Return a place where tensors can lie; None if there is none of that name."""
        return self._places.get(name)

    def at_work(self) -> AbstractContextManager[None]:
        """Return a context in which the caller may use what compressors remember, on a GPU too.

        What is done to arrays in it is in order with the engine's work. Not while that goes on.
        """
        return self._participant.at_work()

    def bring(self, state: State, place: str) -> None:
        """Let what a compressor remembers, and somebody has replaced, lie at ``place``."""
        self._participant.bring(state, self._places[place])

    def reset_stats(self) -> None:
        """Start counting anew."""
        self._participant.meter.stats = Stats()

    def declare(
        self,
        name: str,
        requests: Sequence[Request],
        compressors: Sequence[Compressor],
        states: Sequence[State],
        step: int = 0,
        process_set: int = 0,
    ) -> Group:
        """Declare tensors that are reduced together in every step. Collective.

        ``step`` is where schedules begin. Raises Mismatch when ranks declare different tensors,
        the same on every rank.
        """
        names = [request.name for request in requests]
        repeated = sorted({n for n in names if names.count(n) > 1})
        if repeated:
            raise DuplicateName(f"declared twice in {name!r}: {', '.join(map(repr, repeated))}")
        members = [
            self._participant.member(request, compressor, state)
            for request, compressor, state in zip(requests, compressors, states, strict=True)
        ]
        detail = (members, step, self._bucket_ready, self._abandoned)
        body = [process_set, name, [member.request.to_list() for member in members]]
        group: Group = self._call((process_set, name), m.DECLARE + dumps(body), detail)
        return group

    def release(self, group: Group) -> None:
        """Forget a group; every rank does, sooner or later. Safe in a finaliser."""
        self._released.append(group)  # takes no lock: the thread that runs this may hold it
        if not self._closing and os.getpid() == self._pid:
            self._control.wake()

    def submit(
        self,
        request: Request,
        values: Array,
        output: Array | None = None,
        compressor: Compressor | None = None,
    ) -> Handle:
        """Submit one tensor (flat ``values``); every rank must submit the same name.

        The result goes to ``output``, or in place where it has the same size; the arrays belong
        to the engine until the handle is done. After an error the output may hold the result, or
        not, on each rank for itself. Raises DuplicateName while the name is in flight.
        """
        chosen = _PLAIN if compressor is None else compressor
        if not self._submissions.was_checked(request, chosen):
            self._submissions.check(request, chosen, self._size_of(request.process_set))
        work = Work(request, self._signal, values, values if output is None else output, chosen)
        if request.place != "host":
            work.ready = self._participant.place_of(request).ready()
        if not self._direct:
            self._attend([work])
        if self._submissions.add_one(work):
            self._hurried = False
            self._control.wake()
        return work

    def submit_all(
        self, items: Sequence[tuple[Request, Array, Array | None, Compressor | None]]
    ) -> list[Handle]:
        """Submit several tensors, all of them or none. See ``submit``."""
        works: list[Work] = []
        for request, values, output, given in items:
            compressor = _PLAIN if given is None else given
            self._submissions.check(request, compressor, self._size_of(request.process_set))
            target = values if output is None else output
            works.append(Work(request, self._signal, values, target, compressor))
            if request.place != "host":
                works[-1].ready = self._participant.place_of(request).ready()
        if not self._direct:
            self._attend(works)
        if self._submissions.add(works):
            self._hurried = False
            self._control.wake()
        return list(works)

    def join(self, process_set: int = 0) -> int:
        """Let the others go on without this rank's data; return the rank that joined last.

        Until all ranks of the process set have called this, the rank contributes zeros.
        """
        handle = Handle("join", self._signal)
        with self._lock:
            self._check_open()
            self._expect(("join", process_set), handle)
        self._joining.append(process_set)
        self._control.wake()
        return int(handle.wait())

    def add_process_set(self, ranks: Sequence[int]) -> int:
        """Make a process set of ``ranks``, ascending; return its number. All ranks call it.

        Raises Mismatch when ranks call for different sets.
        """
        return int(self._call("process set", m.ADD_SET + dumps(list(ranks))))

    def remove_process_set(self, number: int) -> None:
        """Remove a process set that nobody uses any more. All ranks call it."""
        self._call("process set", m.REMOVE_SET + dumps(number))

    def shutdown(self) -> None:
        """End the thread and close the control plane; idempotent. What is in flight fails."""
        if not self._closing and os.getpid() == self._pid:
            self.hooks.last_calls()
        with self._lock:
            if self._closing:
                return
            self._closing, self._direct = True, False
        if os.getpid() != self._pid:
            return
        self._control.wake()
        self._thread.join()
        self._control.close()

    def _call(self, key: Hashable, message: bytes, detail: object = None) -> Any:
        """Send ``message`` and return what its answer brings."""
        handle = Handle(str(key), self._signal)
        with self._lock:
            self._check_open()
            self._expect(key, handle, detail)
        self._control.send(message)
        return handle.wait()

    def _expect(self, key: Hashable, handle: Handle, detail: object = None) -> None:
        if not self._participant.expect(key, handle, detail):
            raise DuplicateName(f"another thread waits for the same already: {key}")

    def _attend(self, works: Sequence[Work]) -> None:
        """Check whether ``works`` can be submitted, and note when they were."""
        self._check_open()
        meter = self._participant.meter
        if meter.observers:
            now = time.perf_counter()
            meter.submitted.update({work.request.key: now for work in works})

    def _use(self, setting: dict[str, Any]) -> None:
        self.limits = replace(self.limits, **setting)

    def _note(self, submissions: bool) -> None:
        with self._lock:
            self._direct = not (submissions or self._closing or self._error is not None)

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise EngineClosed(
                "this process was forked after init; the engine lives in the parent. "
                "Start workers with 'spawn', or call init in the child only"
            )
        if self._closing:
            raise EngineClosed("submitted after shutdown; call init again")
        if self._error is not None:
            raise self._error

    def _size_of(self, process_set: int) -> int:
        peers = self._participant.sets.get(process_set)
        if peers is None:
            raise ValueError(f"rank {self.rank} does not belong to process set {process_set}")
        return peers.size

    def _hurry(self) -> None:
        if not self._hurried:
            self._hurried = True
            if self._submissions.queued:
                self._control.wake()

    def _bucket_ready(self, group: Group, index: int, epoch: int) -> None:
        self._participant.complete.append((group, index, epoch))
        self._control.wake()

    def _abandoned(self, group: Group, epoch: int, why: str) -> None:
        self._participant.abandon(group, epoch, why)

    # -- the engine's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        participant = self._participant
        try:
            while not self._closing:
                self._hearing.listen(self._patience())
                while (message := self._hearing.next()) is not None:
                    participant.dispatch(message)
                participant.pipeline.advance()
                while self._released:
                    participant.release(self._released.popleft())
                if self.hooks.has_errands:
                    participant.pipeline.drain()
                    self.hooks.run_errands()
                participant.encode_next()
                self._flush()
                self._look_for_stalls()
            self._control.send(m.GOODBYE)
            self._keep_promises()
            self._break(EngineClosed("the engine was shut down"))
        except PeerLost as error:
            # Whoever left in good order has done its part of what is under way.
            participant.pipeline.settle(_LAST_S)
            if len(self._places) > 1:
                self._participant.interrupt()  # a GPU would wait for that rank, and block its users
            self._break(self._hearing.cause_of(error))
        except Exception as error:
            log.debug("the engine failed", exc_info=True)
            self._announce(error)
            self._participant.interrupt()  # others wait for this rank in a collective
            self._break(error)

    def _keep_promises(self) -> None:
        """Run what this rank had voted for: others may be inside those collectives already."""
        deadline = time.monotonic() + _LEAVING_S
        while (left := deadline - time.monotonic()) > 0:
            self._hearing.listen(left)
            while (message := self._hearing.next()) is not None:
                if message[:1] == m.GONE and loads(message[1:]) == self.rank:
                    self._participant.pipeline.drain()
                    return
                self._participant.dispatch(message)
            self._participant.pipeline.advance()

    def _patience(self) -> float | None:
        """Return how long to wait for messages: not at all if there is something to send."""
        participant = self._participant
        if participant.complete or participant.pipeline.ready or self._closing or self._joining:
            return 0.0
        if not self._submissions.queued:
            return self._check_every
        return 0.0 if self._hurried else self.limits.cycle_time

    def _flush(self) -> None:
        """Ask for what was submitted since the last time, together with what still comes in."""
        works = self._submissions.drain() if self._company_is_complete() else []
        if works and self._participant.meter.observers:
            self._participant.meter.cycle(len(works))
        by_set: dict[int, int] = {}
        fresh: list[Request] = []
        for work in works:
            number = self._participant.requests.known(work.request)
            if number is None:
                fresh.append(work.request)
            else:
                process_set = work.request.process_set
                by_set[process_set] = by_set.get(process_set, 0) | 1 << number
        if fresh:
            self._control.send(m.REQUEST + dumps([request.to_list() for request in fresh]))
        for process_set, bits in by_set.items():
            self._control.send(m.pack_hits(process_set, bits))
        while self._joining:
            number = self._joining.popleft()
            self._participant.joined.add(number)
            self._control.send(m.JOIN + dumps(number))

    def _look_for_stalls(self) -> None:
        if self._check_every is not None:
            now = time.monotonic()
            if now - self._checked >= self._check_every:
                self._checked = now
                self._control.send(m.CHECK)

    def _company_is_complete(self) -> bool:
        """Whether to send what is queued: a step's tensors that go together are planned once."""
        queued = self._submissions.queued
        if not queued:
            return False
        grew, self._seen = queued > self._seen, queued
        self._cycles += 1
        full = self._submissions.queued_bytes >= self.limits.fusion_threshold
        if grew and not (self._hurried or full or self._closing or self._cycles > _COMPANY):
            return False
        self._seen = self._cycles = 0
        self._hurried = False
        return True

    def _announce(self, error: Exception) -> None:
        """Tell the other ranks, as far as that is still possible, why this one stops."""
        try:
            self._control.send(m.BROKEN + dumps(f"{type(error).__name__}: {error}"))
        except Exception:
            log.debug("could not announce the failure", exc_info=True)

    def _break(self, error: Exception) -> None:
        with self._lock:
            self._error, self._direct = error, False
        self._participant.close(error)
        self.hooks.over()


def _close_in_child() -> None:
    for engine in _engines:
        engine._direct = False


_PLAIN = NoCompression()
_engines: weakref.WeakSet[Engine] = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_in_child)
