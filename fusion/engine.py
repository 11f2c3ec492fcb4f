"""The fusion engine: one background thread that agrees with the other ranks and moves tensors.

Callers submit by name, in any order, while backward still runs. The thread compresses what is
complete, votes, and runs collectives in the one order that the coordinator announces.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

from ringlet.compressors import Compressor, NoCompression
from ringlet.compressors.core.context import State
from ringlet.fusion.autotune.limits_control import LimitsControl
from ringlet.fusion.autotune.tuned_limits import settled
from ringlet.fusion.background_loop import Loop
from ringlet.fusion.buckets.group import Group
from ringlet.fusion.devices.host import Place
from ringlet.fusion.errors import DuplicateName, in_words, raised_by_a_signal
from ringlet.fusion.extensions import ENGINE_THREAD, Extensions
from ringlet.fusion.lifetime import Lifetime
from ringlet.fusion.limits import Limits
from ringlet.fusion.negotiation import messages as m
from ringlet.fusion.negotiation.coordinator import Coordinator
from ringlet.fusion.negotiation.stall_inspector import StallInspector
from ringlet.fusion.observe.metrics_control import MetricsControl
from ringlet.fusion.observe.probe import Network
from ringlet.fusion.observe.timeline_control import Timelines
from ringlet.fusion.peers import levels_of
from ringlet.fusion.queue.requester import Requester
from ringlet.fusion.recording.stats import Stats
from ringlet.fusion.requests.callers_locks import Lock, lent, uninterrupted
from ringlet.fusion.requests.handle import Expected, Handle, Output, Work
from ringlet.fusion.requests.legality import check_request, check_values, usable
from ringlet.fusion.requests.request import Request, dumps
from ringlet.fusion.worker import Worker
from ringlet.ring.communicator import Communicator
from ringlet.ring.control.plane import ControlPlane, Handler
from ringlet.ring.dtypes import Array
from ringlet.ring.errors import RingError

log = logging.getLogger("ringlet")

OpenControl = Callable[[Communicator, Handler | None], ControlPlane]


class Engine:
    """Owns the communicator from now on. Made, and shut down, by all ranks together.

    Tensors lie in host memory, or at one of ``places``, whose memory the communicator moves.
    ``network`` is what is known of it, for metrics: the same on every rank.
    """

    def __init__(
        self,
        comm: Communicator,
        open_control: OpenControl,
        limits: Limits | None = None,
        places: Sequence[Place] = (),
        network: Network | None = None,
    ) -> None:
        self.comm = comm
        self.limits = limits = settled(limits or Limits(), comm)
        self.rank, self.size = comm.rank, comm.size
        leads = self.rank == 0
        shortest = min((s for s in (limits.stall_warning, limits.stall_shutdown) if s), default=0)
        check_every = shortest / 4 if leads and self.size > 1 and shortest else None
        stalls = StallInspector(
            limits.stall_warning, limits.stall_shutdown, every=check_every or 0.0
        )
        coordinator = Coordinator(self.size, limits.cache_capacity, stalls) if leads else None
        self._coordinator = coordinator
        self._control = open_control(comm, coordinator)
        try:
            self._begin(limits, places, network, check_every)
        except BaseException as error:
            # The others are on their way, and would wait for as long as this process lives.
            with suppress(RingError):
                self._control.send(m.BROKEN + dumps(in_words(error)))
            self._control.close()
            raise

    def _begin(
        self,
        limits: Limits,
        places: Sequence[Place],
        network: Network | None,
        check_every: float | None,
    ) -> None:
        """Start the thread, and all that it works with."""
        self._life = Lifetime()
        self._requester = Requester(self._control, limits)
        self._tensor_queue, self._signal = self._requester.tensor_queue, self._requester.signal
        self._worker = Worker(
            self.comm, self._control, limits, self._tensor_queue, self._signal, places
        )
        life = self._life
        self.extensions = Extensions(
            self.comm, self._control, self._worker, self._expected, life.note_each
        )
        self.timelines = Timelines(self.extensions)
        self.metrics = MetricsControl(self.extensions, network)
        self.tuning = LimitsControl(self.extensions, self._worker, self._use)
        if self.rank == 0 and limits.autotune:
            self.tuning.start(limits)
        self._loop = Loop(
            self._control, self._worker, self._requester, self.extensions, life, check_every
        )
        self._thread = threading.Thread(
            target=self._loop.run, name=f"{ENGINE_THREAD}{self.rank}", daemon=True
        )
        self._thread.start()

    # -- called by any thread -------------------------------------------------------------------

    @property
    def stats(self) -> Stats:
        """What was counted since the start, or ``reset_stats``."""
        return self._worker.recorder.stats

    @property
    def states(self) -> dict[Hashable, State]:
        """What compressors remember of tensors that are submitted one by one, by request key."""
        return self._worker.requests.states

    @property
    def specs(self) -> list[str]:
        """How tensors are compressed, declared or by name: each spec once, in order."""
        return self._worker.specs

    def place(self, name: str) -> Place | None:
        """Return a place where tensors can lie; None if there is none of that name."""
        return self._worker.places.get(name)

    def at_work(self) -> AbstractContextManager[None]:
        """Return a context in which the caller may use what compressors remember, on a GPU too.

        What is done to arrays in it is in order with the engine's work. Not while that goes on.
        """
        return self._worker.at_work()

    def bring(self, state: State, place: str) -> None:
        """Let what a compressor remembers, and somebody has replaced, lie at ``place``."""
        self._worker.bring(state, self._worker.places[place])

    def sums_in_float32(self, dtype: str, process_set: int = 0) -> bool:
        """Whether sums of ``dtype``, a 16-bit float, are rounded once where it travels as it is."""
        comm = self._worker.sets[process_set].comm
        return levels_of(comm) is None and comm.sums_in_float32(dtype)

    def reset_stats(self) -> None:
        """Start counting anew."""
        self._worker.recorder.stats = Stats()

    def declare(
        self,
        name: str,
        requests: Sequence[Request],
        compressors: Sequence[Compressor],
        states: Sequence[State],
        step: int = 0,
        process_set: int = 0,
        early: bool = False,
    ) -> Group:
        """Declare tensors that are reduced together in every step. Collective.

        ``step`` is where schedules begin. ``early``, the same on all ranks, says that tensors come
        while others are still computed, last declared first. Raises Mismatch when ranks declare
        different tensors, or one of them cannot declare its own, the same on every rank; on that
        rank, what went wrong:
        DuplicateName for a name that stands there twice, what a compressor raised, TypeError or
        ValueError for what is not defined (``ringlet.fusion.requests.legality``), ValueError for
        more than a control message holds. What a signal raises meanwhile, such as Ctrl-C, is raised
        at once, and told to the other ranks; then all of them can declare the name again.
        """
        size = self._size_of(process_set)
        key = process_set, name
        handle = self._expected(key)
        message = b""
        try:
            for request in requests:
                if request.kind != "allreduce":
                    raise ValueError(f"{request.name!r} in {name!r}: only allreduces are declared")
                check_request(request, size)
            handle.detail = self._worker.rehearse(
                name, requests, compressors, states, step, process_set, early, self._bucket_ready
            )
            told = ",".join(request.text for request in requests)
            body = f'[{process_set},{dumps(name).decode()},[{told}],""]'.encode()
            message = m.DECLARE + body
            self._send(message)
        except BaseException as error:
            handle.abandoned = raised_by_a_signal(error)
            if not (handle.abandoned and message):  # else it is on its way all the same
                # The others have declared it, or will: let them hear why they cannot have the group
                self._ask(key, m.DECLARE + dumps([*key, [], in_words(error)]))
            if not handle.abandoned:
                with suppress(RingError):
                    handle.wait()
            raise
        try:
            group: Group = handle.wait()
        except BaseException as error:
            handle.abandoned = raised_by_a_signal(error)
            raise
        return group

    def entitle(self, group: Group, title: str) -> None:
        """Let what people read call ``group`` so: timelines, reports, errors, what has stalled.

        Each rank for itself; of what concerns several ranks rank 0 tells, and logs at the level
        "info" by which compressors the group's tensors travel.
        """
        group.title = title
        if self._coordinator is not None:
            self._coordinator.entitle(group.number, title)
            log.info("gradients of %s: %s", title, group.plan.compression)

    def release(self, group: Group) -> None:
        """Forget a group; every rank does, sooner or later. Safe in a finaliser."""
        # Nothing here takes a lock: the thread that runs a finaliser may hold it.
        self._loop.released.append(group)
        if self._life.running:
            with suppress(RingError):  # shut down meanwhile
                self._control.wake()

    def submit(
        self,
        request: Request,
        values: Array,
        output: Output = None,
        compressor: Compressor | None = None,
        at_once: bool = False,
    ) -> Handle:
        """Submit one tensor (flat ``values``); every rank must submit the same name.

        The result goes to ``output``, or in place where it has the same size; the arrays belong
        to the engine until the handle is done. Where it has another size (all-gather, all-to-all,
        reduce-scatter) ``output`` may be a function that returns a flat array of as many elements
        as it is given; it is called on the engine's thread, with the tensors' place at work. After
        an error the output may hold the result, or not, on each rank for itself. The engine does
        not look for company where the caller waits ``at_once``. Raises
        DuplicateName while the name is in flight, and TypeError or ValueError, on this rank alone,
        for what is not defined (``ringlet.fusion.requests.legality``).
        """
        chosen = _PLAIN if compressor is None else compressor
        like = request.prototype or request
        if not self._tensor_queue.was_checked(like, chosen):
            self._tensor_queue.check(like, chosen, self._size_of(request.process_set))
        if not usable(request, values, output is None):
            check_values(request, values, output is None)
        work = Work(request, self._signal, values, values if output is None else output, chosen)
        if request.place != "host":
            work.ready = self._worker.place_of(request).ready()
        if not self._life.direct:
            self._admit([work])
        if self._tensor_queue.add_one(work) or at_once:
            self._requester.wake(at_once)
        return work

    def submit_all(
        self,
        items: Sequence[tuple[Request, Array, Output, Compressor | None]],
        at_once: bool = False,
    ) -> list[Handle]:
        """Submit several tensors, all of them or none. See ``submit``."""
        works: list[Work] = []
        for request, values, output, given in items:
            compressor = _PLAIN if given is None else given
            like = request.prototype or request
            self._tensor_queue.check(like, compressor, self._size_of(request.process_set))
            if not usable(request, values, output is None):
                check_values(request, values, output is None)
            target = values if output is None else output
            works.append(Work(request, self._signal, values, target, compressor))
            if request.place != "host":
                works[-1].ready = self._worker.place_of(request).ready()
        if not self._life.direct:
            self._admit(works)
        if self._tensor_queue.add(works) or at_once:
            self._requester.wake(at_once)
        return list(works)

    def join(self, process_set: int | None = None) -> int:
        """Let the others go on without this rank's data; return the rank that joined last.

        Until all ranks of the process set have called this, the rank contributes zeros. By default
        it does in every set that it is in, and comes back once all ranks of the job have joined.
        """
        sets = self._worker.own_sets() if process_set is None else [process_set]
        for number in sets:
            self._size_of(number)
            under_way = self._worker.under_way(number)
            if under_way:
                raise RuntimeError(f"a step of {under_way!r} is under way; finish it before join()")
        handles = [self._expected(("join", number)) for number in sets]
        for number in sets:
            self._requester.join(number)
        last, *_ = [int(handle.wait()) for handle in handles]
        return last

    def add_process_set(self, ranks: Sequence[int]) -> int:
        """Make a process set of ``ranks``, ascending; return its number. All ranks call it.

        Raises Mismatch when ranks call for different sets.
        """
        return int(self._call("process set", m.ADD_SET + dumps(list(ranks))))

    def remove_process_set(self, number: int) -> None:
        """Remove a process set that nobody uses any more. All ranks call it."""
        self._call("process set", m.REMOVE_SET + dumps(number))

    def shutdown(self) -> None:
        """End the thread and close the control plane; idempotent. What is in flight fails.

        A signal's handler may call this, whatever it interrupts: another call of this, too.
        """
        with lent(self._locks()):  # the thread needs them, to end
            if self._life.running:
                self.extensions.last_calls()
            self._life.close()
            if self._life.forked:
                return
            if self._thread.is_alive():
                self._control.wake()
                self._thread.join()
            self._control.close()

    def _locks(self) -> list[Lock]:
        """Return what callers hold for moments, and the engine's thread takes as well."""
        return [self._life.lock, self._tensor_queue.lock, self._signal.lock, *self._worker.locks]

    def _call(self, key: Hashable, message: bytes) -> Any:
        """Send ``message`` and return what its answer brings."""
        handle = self._expected(key)
        self._ask(key, message)
        return handle.wait()

    def _ask(self, key: Hashable, message: bytes) -> None:
        """Send what ``key`` is the answer to; expect none if it cannot be sent."""
        try:
            self._send(message)
        except BaseException:  # such as ValueError, for a message that is too long
            self._worker.answer(key)
            raise

    def _send(self, message: bytes) -> None:
        uninterrupted(self._control.send, message)

    def _expected(self, key: Hashable) -> Expected:
        """Return what is done when the answer to ``key`` comes.

        That to a call that was interrupted is waited for first: it would look like this one's.
        """
        handle = Expected(str(key), self._signal)
        while True:
            with self._life.lock:
                self._life.check_open()
                awaited = self._worker.expect(key, handle)
            if awaited is handle:
                return handle
            if not awaited.abandoned:
                raise DuplicateName(f"another thread waits for the same already: {key}")
            with suppress(RingError):
                awaited.wait()

    def _admit(self, works: Sequence[Work]) -> None:
        """Raise where the engine has ended; note when ``works`` came, while somebody observes."""
        self._life.check_open()
        recorder = self._worker.recorder
        if recorder.observers:
            now = time.perf_counter()
            recorder.submitted.update({work.request.key: now for work in works})

    def _use(self, setting: dict[str, Any]) -> None:
        self.limits = self._requester.limits = replace(self.limits, **setting)

    def _size_of(self, process_set: int) -> int:
        peers = self._worker.sets.get(process_set)
        if peers is None:
            raise ValueError(f"rank {self.rank} does not belong to process set {process_set}")
        return peers.size

    def _bucket_ready(self, group: Group, index: int, epoch: int) -> None:
        self._worker.complete.add(group, index, epoch)
        self._control.wake()


_PLAIN = NoCompression()
