"""The control plane inside one process, and what every control plane's rank 0 is made of."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar

from ringlet.ring.control.plane import ControlPlane, Handler
from ringlet.ring.errors import PeerLost, RingError, again

Said = TypeVar("Said", bytes, str)  # what a handler is told: a message, or why a rank is lost


class Inbox:
    """Broadcasts that wait for one rank. Any thread puts, one thread takes.

    It has no lock of its own: a finaliser, which Python may run in the middle of any of this, can
    wake the reader too.
    """

    def __init__(self) -> None:
        self._queue: SimpleQueue[list[bytes] | None] = SimpleQueue()  # None wakes
        self._woken = False
        self._error: BaseException | None = None

    def put(self, messages: Iterable[bytes]) -> None:
        """Add messages and wake the reader."""
        self._queue.put(list(messages))

    def wake(self) -> None:
        """Make a waiting or the next ``take`` return at once."""
        if not self._woken:
            self._woken = True
            self._queue.put(None)

    def fail(self, error: BaseException) -> None:
        """Let ``take`` raise ``error`` once the messages that came before it are taken."""
        self._error = self._error or error
        self._queue.put(None)

    def take(self, timeout: float | None = None) -> list[bytes]:
        """Return what has arrived; wait for it, a wake-up, an error, or ``timeout`` seconds."""
        error = self._error  # before the queue is looked at, in which all is that came before it
        messages = self._queued(timeout if error is None else 0.0)
        if error is None and not messages and self._error is not None:  # it came meanwhile
            error, messages = self._error, self._queued(0.0)
        if error is not None and not messages:
            raise again(error)
        return messages

    def _queued(self, timeout: float | None) -> list[bytes]:
        """Return what is in the queue, once something is, or ``timeout`` is over."""
        messages: list[bytes] = []
        with suppress(Empty):
            entry = self._queue.get(timeout=None if timeout is None else max(0, timeout))
            while True:
                if entry is None:  # what asks to be woken from here on, this call's return answers
                    self._woken = False
                else:
                    messages += entry
                entry = self._queue.get_nowait()
        return messages


class SerialHandler:
    """The handler on rank 0, called by one thread at a time.

    ``deliver`` hands what the handler returns to every rank, under the same lock, so that the
    order is the same for all; ``fail`` ends the service when the handler raises.
    """

    def __init__(
        self,
        handler: Handler,
        deliver: Callable[[list[bytes]], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self.lock = threading.Lock()
        self._handler = handler
        self._deliver = deliver
        self._fail = fail
        self._gone: set[int] = set()
        self._crashed = False

    def message(self, rank: int, message: bytes) -> None:
        """Give the handler a message; messages of ranks that have gone are dropped."""
        self._call(rank, self._handler.on_message, message, leaves=False)

    def lost(self, rank: int, why: str | None = None) -> None:
        """Tell the handler that ``rank`` went away, unless it had said goodbye."""
        self._call(rank, self._handler.on_lost, why or "", leaves=True)

    def goodbye(self, rank: int) -> None:
        """Expect nothing more of ``rank``."""
        with self.lock:
            self._gone.add(rank)

    def _call(
        self, rank: int, function: Callable[[int, Said], list[bytes]], said: Said, leaves: bool
    ) -> None:
        with self.lock:
            if rank in self._gone or self._crashed:
                return
            if leaves:
                self._gone.add(rank)
            try:
                messages = function(rank, said)
                if messages:
                    self._deliver(messages)
            except Exception as error:
                self._crashed = True
                self._fail(error)


class LocalHub:
    """What the ``LocalControl`` of all ranks of one process have in common."""

    def __init__(self, handler: Handler, size: int) -> None:
        self.size = size
        self.inboxes = [Inbox() for _ in range(size)]
        self.coordinator = SerialHandler(handler, self._deliver, self._fail)
        self.closed: PeerLost | None = None  # why rank 0 no longer answers

    def leave(self, rank: int, why: str) -> None:
        """Note that ``rank`` went away, for ``LocalWorld.watch``."""
        if rank == 0:
            self.stop(f"rank 0, the coordinator, {why}")
        elif self.closed is None:
            self.coordinator.lost(rank)

    def stop(self, why: str) -> None:
        """End the service: the others learn that rank 0 is gone."""
        if self.closed is None:
            self.closed = PeerLost(why, [0])
            for inbox in self.inboxes[1:]:
                inbox.fail(self.closed)

    def _deliver(self, messages: list[bytes]) -> None:
        for inbox in reversed(self.inboxes):  # rank 0's last: it may be told to leave, which ends
            inbox.put(messages)  # the others' inboxes

    def _fail(self, error: BaseException) -> None:
        self.inboxes[0].fail(error)
        self.stop(f"the coordinator on rank 0 failed with {type(error).__name__}: {error}")


class LocalControl(ControlPlane):
    """One rank's end when all ranks are threads of this process, or when there is one rank."""

    def __init__(self, hub: LocalHub, rank: int) -> None:
        self.rank = rank
        self.size = hub.size
        self._hub = hub
        self._pid = os.getpid()
        self._closed = False

    def send(self, message: bytes) -> None:
        """Call the handler from this thread."""
        self._check()
        if self._hub.closed is None or self.rank == 0:
            self._hub.coordinator.message(self.rank, message)

    def receive(self, timeout: float | None = None) -> list[bytes]:
        """Return the broadcasts since the last call; see ``ControlPlane``."""
        self._check()
        return self._hub.inboxes[self.rank].take(timeout)

    def wake(self) -> None:
        """Make ``receive`` return."""
        self._check()
        self._hub.inboxes[self.rank].wake()

    def close(self) -> None:
        """Say goodbye; when rank 0 does, the others raise PeerLost from now on."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        self._hub.inboxes[self.rank].fail(RingError("this control plane is closed"))
        self._hub.coordinator.goodbye(self.rank)
        if self.rank == 0:
            self._hub.stop("rank 0, the coordinator, closed the control plane")

    def _check(self) -> None:
        usable(self._closed, self._pid)


def usable(closed: bool, pid: int) -> None:
    """Refuse to serve after ``close``, and in a process forked from the one that opened."""
    if closed:
        raise RingError("this control plane is closed")
    if pid != os.getpid():
        raise RingError(
            f"this control plane belongs to process {pid} and does not survive a fork into"
            f" {os.getpid()}: open a new one there"
        )
