"""Asking the coordinator for what was submitted one by one, together with what still comes in."""

from __future__ import annotations

from collections import deque
from collections.abc import Container
from typing import TYPE_CHECKING

from ringlet.fusion import messages as m
from ringlet.fusion.limits import Limits
from ringlet.fusion.request import Request, dumps
from ringlet.fusion.submissions import Submissions
from ringlet.fusion.work import Signal, Work
from ringlet.ring.control import ControlPlane

if TYPE_CHECKING:
    from ringlet.fusion.participant import Participant

_DIGESTS = 16  # that wait at most until there is something else to say
_COMPANY = 8  # cycles that submissions wait at most while more of them come in


class Inquiries:
    """One rank's end. A step's tensors that go together are planned, and negotiated, once."""

    def __init__(self, control: ControlPlane, limits: Limits) -> None:
        self.limits = limits
        self.signal = Signal(self._hurry)
        self.submissions = Submissions(self.signal)
        self._control = control
        self._joining: deque[int] = deque()
        self._held: list[Work] = []  # of process sets that this rank has joined, until all have
        self._hurried = False  # somebody waits
        self._seen = self._cycles = 0  # how the queue has grown since the last time

    # -- called by any thread -------------------------------------------------------------------

    def wake(self) -> None:
        """Let the engine see what was just submitted to an empty queue."""
        self._hurried = False
        self._control.wake()

    def join(self, process_set: int) -> None:
        """Tell the others, behind what was submitted, that this rank has no more data."""
        self._joining.append(process_set)
        self._control.wake()

    def _hurry(self) -> None:
        if not self._hurried:
            self._hurried = True
            if self.submissions.queued:
                self._control.wake()

    # -- called by the engine's thread ------------------------------------------------------------

    def patience(self, otherwise: float | None) -> float | None:
        """Return how long (seconds) to wait for messages: ``otherwise`` where nothing is queued."""
        if self._joining:
            return 0.0
        if not self.submissions.queued:
            return otherwise
        return 0.0 if self._hurried else self.limits.cycle_time

    def ask(self, participant: Participant, closing: bool) -> None:
        """Ask for what was submitted since the last time, unless more of it is still to come."""
        # What was submitted before a join counts, so it must not come after it.
        complete = self._company_is_complete(closing) or self._joining
        works = self.submissions.drain() if complete else []
        if self._held or (works and participant.joined):
            works = self._released([*self._held, *works], participant.joined)
        if works and participant.meter.observers:
            participant.meter.cycle(len(works))
        by_set: dict[int, int] = {}
        fresh: list[Request] = []
        for work in works:
            work.asked = True
            number = participant.requests.known(work.request)
            if number is None:
                fresh.append(work.request)
            else:
                process_set = work.request.process_set
                by_set[process_set] = by_set.get(process_set, 0) | 1 << number
        self.tell_digests(participant, now=bool(works))
        version = participant.requests.version
        if fresh:
            asked = [request.to_list() for request in fresh]
            self._control.send(m.REQUEST + dumps([version, asked]))
        for process_set, bits in by_set.items():
            self._control.send(m.pack_hits(process_set, version, bits))
        while self._joining:
            participant.join(self._joining.popleft())

    def tell_digests(self, participant: Participant, now: bool) -> None:
        """Let ranks compare what sums gave, ``now`` or when it is enough."""
        digests = participant.requests.digests
        for process_set in [n for n, found in digests.items() if now or len(found) >= _DIGESTS]:
            self._control.send(m.DIGESTS + dumps([process_set, digests.pop(process_set)]))

    def _released(self, works: list[Work], joined: Container[int]) -> list[Work]:
        """Return what may be asked for: not what others take zeros for at the moment."""
        waiting = [work for work in works if not work.done()]
        self._held = [work for work in waiting if work.request.process_set in joined]
        return [work for work in waiting if work.request.process_set not in joined]

    def _company_is_complete(self, closing: bool) -> bool:
        queued = self.submissions.queued
        if not queued:
            return False
        grew, self._seen = queued > self._seen, queued
        self._cycles += 1
        full = self.submissions.queued_bytes >= self.limits.fusion_threshold
        if grew and not (self._hurried or full or closing or self._cycles > _COMPANY):
            return False
        self._seen = self._cycles = 0
        self._hurried = False
        return True
