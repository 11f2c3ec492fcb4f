"""Asking the coordinator for what was submitted one by one, together with what still comes in."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Container
from itertools import groupby
from typing import Protocol

from ringlet.fusion.limits import Limits
from ringlet.fusion.negotiation import messages as m
from ringlet.fusion.queue.request_executor import RequestExecutor
from ringlet.fusion.queue.tensor_queue import TensorQueue
from ringlet.fusion.recording.recorder import Recorder
from ringlet.fusion.requests.handle import Signal, Work
from ringlet.fusion.requests.request import Request, dumps
from ringlet.ring.control.plane import ControlPlane

_DIGESTS = 16  # that wait at most until there is something else to say
_COMPANY = 8  # cycles that submissions wait at most while more of them come in


class Asking(Protocol):
    """The part of a rank that asks: what it has joined, and what it knows of requests."""

    recorder: Recorder
    requests: RequestExecutor
    joined: set[int]

    def join(self, process_set: int) -> None:
        """Tell the others that this rank has no more data."""


class Requester:
    """One rank's end. A step's tensors that go together are planned, and negotiated, once."""

    def __init__(self, control: ControlPlane, limits: Limits) -> None:
        self.limits = limits
        self.signal = Signal(self._hurry)
        self.tensor_queue = TensorQueue(self.signal)
        self._control = control
        self._joining: deque[int] = deque()
        self._held: list[Work] = []  # of process sets that this rank has joined, until all have
        self._hurried = False  # somebody waits
        self._seen = 0  # how long the queue was, when it was last looked at
        self._look_at = self._latest = 0.0  # when to look again, and when to wait no longer

    # -- called by any thread -------------------------------------------------------------------

    def wake(self, hurried: bool = False) -> None:
        """Let the engine see what was just submitted, by somebody who waits if ``hurried``.

        To be called for what was submitted to an empty queue, and for what is hurried.
        """
        self._hurried = hurried  # one waking instead of two: that takes longer than all Python
        self._control.wake()

    def join(self, process_set: int) -> None:
        """Tell the others, behind what was submitted, that this rank has no more data."""
        self._joining.append(process_set)
        self._control.wake()

    def _hurry(self) -> None:
        if not self._hurried:
            self._hurried = True
            if self.tensor_queue.queued:
                self._control.wake()

    # -- called by the engine's thread ------------------------------------------------------------

    def patience(self, otherwise: float | None) -> float | None:
        """Return how long (seconds) to wait for messages: ``otherwise`` where nothing is queued."""
        if self._joining:
            return 0.0
        if not self.tensor_queue.queued:
            return otherwise
        if self._hurried:
            return 0.0
        left = self._look_at - time.monotonic() if self._seen else self.limits.cycle_time
        return max(0.0, left)

    def ask(self, worker: Asking, closing: bool) -> None:
        """Ask for what was submitted since the last time, unless more of it is still to come."""
        # What was submitted before a join counts, so it must not come after it.
        complete = self._company_is_complete(closing) or self._joining
        works = self.tensor_queue.drain() if complete else []
        if self._held or (works and worker.joined):
            works = self._released([*self._held, *works], worker.joined)
        if works and worker.recorder.observers:
            worker.recorder.cycle(len(works))
        for work in works:
            work.asked = True
        self.tell_digests(worker, now=bool(works))
        requests = [work.request for work in works]
        self._ask_for_named(worker, [each for each in requests if each.prototype is None])
        self._ask_for_series(worker, [each for each in requests if each.prototype is not None])
        while self._joining:
            worker.join(self._joining.popleft())

    def tell_digests(self, worker: Asking, now: bool) -> None:
        """Let ranks compare what sums gave, ``now`` or when it is enough."""
        digests = worker.requests.digests
        for process_set in [n for n, found in digests.items() if now or len(found) >= _DIGESTS]:
            self._control.send(m.DIGESTS + dumps([process_set, digests.pop(process_set)]))

    def _ask_for_named(self, worker: Asking, requests: list[Request]) -> None:
        """Ask for what all ranks know by a bit of its own each, and for the rest in full."""
        version = worker.requests.version
        bits: dict[int, int] = {}  # by process set
        fresh = []
        for request in requests:
            number = worker.requests.known(request)
            if number is None:
                fresh.append(request.to_list())
            else:
                bits[request.process_set] = bits.get(request.process_set, 0) | 1 << number
        if fresh:
            self._control.send(m.REQUEST + dumps([version, fresh]))
        for process_set, known in bits.items():
            self._control.send(m.pack_hits(process_set, version, known))

    def _ask_for_series(self, worker: Asking, requests: list[Request]) -> None:
        """Ask for calls without names, one run for those that follow each other."""
        version = worker.requests.version
        for start in range(0, len(requests), m.CALLS):
            runs: dict[int, list[m.Run]] = {}  # by process set
            for _, numbered in groupby(enumerate(requests[start : start + m.CALLS]), _run_of):
                first, *others = [request for _, request in numbered]
                assert first.prototype is not None
                run = m.Run(first.number, first.number + len(others) + 1, first.prototype)
                runs.setdefault(first.process_set, []).append(run)
            for process_set, of_set in runs.items():
                self._control.send(m.pack_series(process_set, version, of_set))

    def _released(self, works: list[Work], joined: Container[int]) -> list[Work]:
        """Return what may be asked for: not what others take zeros for at the moment."""
        waiting = [work for work in works if not work.done()]
        self._held = [work for work in waiting if work.request.process_set in joined]
        return [work for work in waiting if work.request.process_set not in joined]

    def _company_is_complete(self, closing: bool) -> bool:
        queued = self.tensor_queue.queued
        if not queued:
            return False
        full = self.tensor_queue.queued_bytes >= self.limits.fusion_threshold
        if not (self._hurried or full or closing):
            # By the clock: the engine's thread goes round more often while exchanges are under way.
            now, cycle = time.monotonic(), self.limits.cycle_time
            if not self._seen:
                self._latest = now + _COMPANY * cycle
            elif now < self._look_at:
                return False
            grew, self._seen, self._look_at = queued > self._seen, queued, now + cycle
            if grew and now < self._latest:
                return False
        self._seen = 0
        self._hurried = False
        return True


def _run_of(numbered: tuple[int, Request]) -> tuple[int, int]:
    """Return what calls have in common that follow each other: series, and number less place."""
    place, request = numbered
    return id(request.prototype), request.number - place
