"""Signs of life: how ranks notice that another one is frozen, or that its host has vanished.

The kernel tells when a process ends, but not when it is stopped or when its host is cut off. So
every rank sends a beat to rank 0, and rank 0 to every rank, over a control plane of their own that
a thread of their own reads: neither a collective that waits nor a queue in front of the other
control plane delays it. Somebody who was silent for too long is lost, everybody is told, and
collectives that wait for it are interrupted.

A beat needs the interpreter: a rank that is in an extension which holds the GIL for longer than the
limit looks frozen. That is why the limit is generous; RINGLET_HEARTBEAT sets it.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping

from ringlet.ring.control import ControlPlane
from ringlet.ring.errors import LOST_PEER, PeerLost, RingError

log = logging.getLogger("ringlet")

DEFAULT = 60.0  # seconds of silence after which a rank is lost
LONGEST = 5.0  # seconds between two beats
STUCK = 10.0  # seconds that a collective may go on waiting for a lost rank, at most

Lose = Callable[[int, str], None]


def seconds_from(env: Mapping[str, str]) -> float:
    """Return RINGLET_HEARTBEAT, in seconds; 0 means that nobody listens for signs of life.

    Raises ValueError when it is not a number of at least 0.
    """
    text = env.get("RINGLET_HEARTBEAT")
    if text is None:
        return DEFAULT
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise ValueError(f"RINGLET_HEARTBEAT={text!r} is not a number of seconds of at least 0")
    return seconds


class Register:
    """When each rank was last heard of; rank 0's ``Handler`` of the plane that beats go over."""

    def __init__(self, size: int) -> None:
        now = time.monotonic()
        self.heard = dict.fromkeys(range(1, size), now)

    def on_message(self, rank: int, message: bytes) -> list[bytes]:
        """Note a sign of life; pass on what rank 0 says."""
        if rank == 0:
            return [message]
        if rank in self.heard:
            self.heard[rank] = time.monotonic()
        if message:  # its last: it closes
            self.heard.pop(rank, None)
        return []

    def on_lost(self, rank: int, why: str | None = None) -> list[bytes]:
        """Expect nothing more: the control plane that carries messages reports it."""
        self.heard.pop(rank, None)
        return []

    def forgive(self) -> None:
        """Give everybody a new start: it was this rank that did not listen."""
        for rank in list(self.heard):
            self.heard[rank] = time.monotonic()

    def silent(self, seconds: float) -> list[int]:
        """Return, once, the ranks that were silent for ``seconds``."""
        limit = time.monotonic() - seconds
        found = [rank for rank, heard in list(self.heard.items()) if heard < limit]
        for rank in found:
            self.heard.pop(rank, None)
        return found


class Pulse:
    """One rank's thread that beats and listens, over ``plane``, until ``close``.

    ``lose(rank, why)`` ends the message plane's connection to a rank; ``interrupt`` ends the
    collective that this rank waits in, if the transport can; ``turns`` counts how often messages
    were read. Where a loss does not get through to whoever reads them, the process is ended.
    """

    def __init__(
        self,
        plane: ControlPlane,
        seconds: float,
        lose: Lose,
        turns: Callable[[], int],
        interrupt: Callable[[], None] | None,
        register: Register | None,
    ) -> None:
        self._plane, self._seconds, self._register = plane, seconds, register
        self._lose, self._turns, self._interrupt = lose, turns, interrupt
        self._interval = min(LONGEST, seconds / 5)
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="ringlet pulse", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Say goodbye and end the thread. Idempotent; never raises."""
        self._closing = True
        try:
            self._plane.send(b"bye" if self._register is None else b"")
            self._plane.wake()
        except RingError:
            pass  # it is over already
        if threading.current_thread() is not self._thread:
            self._thread.join(self._interval + 1.0)
        self._plane.close()

    def _run(self) -> None:
        try:
            self._listen()
        except RingError:
            pass  # closed; or rank 0 went, which the other plane tells
        except Exception:
            log.exception("the heartbeat failed; frozen ranks will not be noticed")

    def _listen(self) -> None:
        heard = awake = time.monotonic()
        beat = 0.0
        while not self._closing:
            now = time.monotonic()
            if now >= beat:
                self._plane.send(b"")
                beat = now + self._interval
            messages = self._plane.receive(max(0.0, beat - now))
            now = time.monotonic()
            for message in messages:
                heard = now
                if message:
                    self._alarm(int(message), interrupt_only=True)
            if now - awake > 2 * self._interval + 0.5:  # it was this process that stood still
                heard = now
                if self._register is not None:
                    self._register.forgive()
            awake = now
            if self._register is not None:
                for rank in self._register.silent(self._seconds):
                    self._alarm(rank)
            elif now - heard > self._seconds:
                self._alarm(0)
                return

    def _alarm(self, rank: int, interrupt_only: bool = False) -> None:
        why = f"no sign of life for {self._seconds:g} s"
        turns = self._turns()
        if not interrupt_only:
            self._lose(rank, why)
            if self._register is not None:
                self._plane.send(b"%d" % rank)
        if self._interrupt is not None:
            self._interrupt()
        threading.Thread(target=self._insist, args=(rank, why, turns), daemon=True).start()

    def _insist(self, rank: int, why: str, turns: int) -> None:
        """End this process if the loss does not get through: MPI waits for ever."""
        limit = time.monotonic() + min(STUCK, self._seconds)
        while time.monotonic() < limit:
            if self._closing or self._turns() != turns:
                return
            time.sleep(0.05)
        error = PeerLost(f"rank {rank} is gone: {why}", [rank])
        print(
            f"ringlet: {error}; a collective still waits for it, so this rank ends", file=sys.stderr
        )
        sys.stderr.flush()
        os._exit(LOST_PEER)
