"""Where other parts of the system reach into a running engine, at points where that is safe."""

from __future__ import annotations

import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import Any

from ringlet.fusion.negotiation import messages as m
from ringlet.fusion.recording.events import Observer
from ringlet.fusion.requests.callers_locks import uninterrupted
from ringlet.fusion.requests.handle import Expected, Handle
from ringlet.fusion.requests.request import dumps
from ringlet.fusion.worker import Worker
from ringlet.ring.communicator import Communicator
from ringlet.ring.control.plane import ControlPlane

log = logging.getLogger("ringlet")

ENGINE_THREAD = "ringlet-engine-"


class Extensions:
    """One engine's. Methods may be called by any thread; what they are given runs on its own.

    ``expected`` returns what is done when an answer comes; ``note_each`` is told whether
    submissions are to be noted one by one.
    """

    def __init__(
        self,
        comm: Communicator,
        control: ControlPlane,
        worker: Worker,
        expected: Callable[[Hashable], Expected],
        note_each: Callable[[bool], None],
    ) -> None:
        self.comm = comm
        self._control, self._worker = control, worker
        self._expected, self._note_each = expected, note_each
        self.soon: deque[Callable[[], None]] = deque()  # what is to be called soon
        self._before: list[Callable[[], None]] = []
        self._after: list[Callable[[], None]] = []
        self._open, self._pid = True, os.getpid()

    def call_soon(self, function: Callable[[], None]) -> None:
        """Run ``function`` on the engine's thread, between two collectives."""
        self.soon.append(function)
        if self._open and os.getpid() == self._pid:
            self._control.wake()

    def settle(self, timeout: float = 60.0) -> None:
        """Wait until what was to be called soon has run, or the engine has stopped."""
        if threading.current_thread().name.startswith(ENGINE_THREAD):
            return  # the engine itself is leaving
        if os.getpid() != self._pid:
            return  # in a forked child, which has no engine's thread
        ran = threading.Event()
        self.call_soon(ran.set)
        while self._open and not ran.wait(min(timeout, 0.05)):
            timeout -= 0.05
            if timeout <= 0:
                return

    def observe(self, observer: Observer) -> None:
        """Tell ``observer`` of what happens from now on, on this rank."""
        self.call_soon(lambda: self._watch([*self._worker.recorder.observers, observer]))

    def unobserve(self, observer: Observer) -> None:
        """Tell ``observer`` no more, soon."""
        self.call_soon(lambda: self._watch(self._others(observer)))

    def skipped(self, step: int, why: str) -> None:
        """Count a step that was reduced and then not taken, such as for an overflow."""
        self.call_soon(lambda: self._worker.recorder.skipped(step, why))

    def announce(self, key: Hashable, action: str, argument: Any) -> Handle:
        """Let every rank do ``action``, at one point of the order of collectives.

        The handle is done when somebody calls ``answer(key)`` on this rank.
        """
        handle = self._expected(key)
        self.announce_only(action, argument)
        return handle

    def announce_only(self, action: str, argument: Any) -> None:
        """Let every rank do ``action``, and go on."""
        uninterrupted(self._control.send, m.ANNOUNCE + dumps([action, argument]))

    def on_announced(self, action: str, do: Callable[[Any, bool], None]) -> None:
        """Call ``do(argument, whether all ranks are there)`` when ``action`` is announced."""
        self._worker.actions[action] = do

    def forget_action(self, action: str) -> None:
        """Do nothing when ``action`` is announced from now on."""
        self._worker.actions.pop(action, None)

    def answer(self, key: Hashable, error: Exception | None = None) -> None:
        """Finish what ``announce`` returned on this rank, if it was called."""
        self._worker.answer(key, error)

    def before_shutdown(self, call: Callable[[], None]) -> None:
        """Call ``call`` before this rank leaves, while collectives are still possible."""
        self._before.append(call)

    def when_over(self, call: Callable[[], None]) -> None:
        """Call ``call`` once the engine has stopped, for whatever reason."""
        self._after.append(call)

    # -- called by the engine -------------------------------------------------------------------

    def run_soon(self) -> None:
        """Run what was asked for since the last time."""
        while self.soon:
            self.soon.popleft()()

    def last_calls(self) -> None:
        """Run what has to happen before this rank leaves; from the thread that shuts down."""
        while self._before:
            self._before.pop()()

    def over(self) -> None:
        """Run what is left to do when the engine has stopped."""
        self._open = False
        while self.soon or self._after:
            call = self.soon.popleft() if self.soon else self._after.pop()
            try:
                call()
            except BaseException:  # the others have to be called all the same
                log.exception("what was to be called after the engine's end failed")

    def _watch(self, observers: Sequence[Observer]) -> None:
        self._worker.watch(observers)
        self._note_each(bool(observers))

    def _others(self, observer: Observer) -> list[Observer]:
        return [known for known in self._worker.recorder.observers if known is not observer]
