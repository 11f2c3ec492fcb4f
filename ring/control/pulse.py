"""Signs of life: how ranks notice that another one is frozen, or that its host has vanished.

The kernel tells when a process ends, but not when it is stopped or when its host is cut off. So
every rank has a heartbeat (``ringlet.ring.control.heartbeat``), a small process beside it: it is
no matter to that how long the rank holds Python's interpreter lock. A thread hears what it has to
tell. Who was silent for too long is lost, everybody is told, and collectives that wait for it are
interrupted.
"""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ringlet.ring.control.frame_kinds import live
from ringlet.ring.errors import LOST_PEER, PeerLost
from ringlet.ring.process_owner import is_lent
from ringlet.ring.variables import read_number
from ringlet.ring.wire.framing import derive

log = logging.getLogger("ringlet")

DEFAULT = 5.0  # seconds of silence after which a rank is lost
STUCK = 10.0  # seconds that a collective may go on waiting for a lost rank, at most
GRACE = 0.25  # seconds until a rank's end has to be known by the end of its connection
_LOOK = 0.05  # seconds between two looks whether a loss has got through
PROGRAM = Path(__file__).with_name("heartbeat_process.py")

Lose = Callable[[int, str], None]


def seconds_from(env: Mapping[str, str]) -> float:
    """Return RINGLET_HEARTBEAT, in seconds; 0 means that nobody listens for signs of life.

    Raises ValueError when it is not a number of at least 0.
    """
    text = env.get("RINGLET_HEARTBEAT")
    return DEFAULT if text is None else read_number("RINGLET_HEARTBEAT", text)


def start(
    rank: int,
    size: int,
    seconds: float,
    secret: bytes,
    where: Sequence[str | int],
    timeout: float = 60.0,
) -> subprocess.Popen[bytes] | None:
    """Start the heartbeat of rank ``rank``; None, with a warning, where that is not possible.

    ``where`` says where rank 0's heartbeat listens: on rank 0 the number of a descriptor, elsewhere
    an address and a port, to be reached within ``timeout`` seconds. ``secret`` is the
    control plane's.
    """
    key = derive(secret, "heartbeat")
    words = (rank, size, os.getpid(), seconds, key.hex(), timeout, *where)
    try:
        # -I and -S: nothing of the user's is imported, and nothing that takes time.
        process = subprocess.Popen(
            [sys.executable or "python3", "-I", "-S", str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,  # buffers have locks, which a forked child may find held
            pass_fds=[int(where[0])] if rank == 0 else [],
            cwd="/",
        )
        assert process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended: the pulse will see that
            os.write(process.stdin.fileno(), " ".join(map(str, words)).encode() + b"\n")
    except (OSError, TypeError) as error:  # the latter where there is no ``sys.executable``
        log.warning("rank %d has no heartbeat: %s; if it freezes nobody notices", rank, error)
        return None
    return process


class Pulse:
    """Rank ``rank``'s heartbeat, a ``process``, and the thread that hears it, until ``close``.

    ``lose(rank, why)`` ends the control plane's connection to a rank; ``interrupt`` ends the
    collective that this rank waits in, if the transport can; ``turns`` counts how often messages
    were read. Where a frozen rank's loss does not get through to whoever reads them, the process is
    ended.
    """

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        rank: int,
        seconds: float,
        lose: Lose,
        turns: Callable[[], int],
        interrupt: Callable[[], None] | None,
    ) -> None:
        self._process, self._rank, self._seconds = process, rank, seconds
        self._lose, self._turns, self._interrupt = lose, turns, interrupt
        self._closing = False
        self._joined = threading.Event()
        self._late = False  # whether it was told that it has not joined yet
        live.add(self)
        self._thread = threading.Thread(target=self._run, name="ringlet pulse", daemon=True)
        self._thread.start()

    def wait_joined(self, timeout: float) -> None:
        """Return once rank 0's heartbeat listens to this one, which may also have failed.

        Where that takes over ``timeout`` seconds, warn: the heartbeat goes on trying.
        """
        if not self._joined.wait(timeout):
            self._late = True
            log.warning(
                "the heartbeat of rank %d has not reached rank 0's in %g s; until it does, which it"
                " goes on trying, nobody notices if rank %d freezes",
                self._rank, timeout, self._rank,
            )  # fmt: skip

    def close(self) -> None:
        """Say goodbye, end the heartbeat and the thread. Idempotent; never raises."""
        if self._closing:
            return
        self._closing = True
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            os.write(self._process.stdin.fileno(), b"bye")
        try:
            self._process.wait(2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if threading.current_thread() is not self._thread:
            self._thread.join(2.0)
        self._abandon()

    def _abandon(self) -> None:
        """Close the pipes: a forked child that held them would hide the end of its parent."""
        self._closing = True
        for pipe in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                if pipe is not None:
                    pipe.close()

    def _run(self) -> None:
        assert self._process.stdout is not None
        left = False
        with contextlib.suppress(OSError, ValueError):  # closed
            for line in self._process.stdout:
                word, *rank = line.split()
                self._joined.set()
                if word == b"joined" and self._late:
                    log.info("the heartbeat of rank %d has reached rank 0's now", self._rank)
                left = left or word == b"bye"
                if rank:
                    left = left or int(rank[0]) == 0
                    self._alarm(int(rank[0]), frozen=word == b"silent")
        self._joined.set()
        if not self._closing and not left:
            log.warning("the heartbeat of rank %d ended; if it freezes nobody notices", self._rank)

    def _alarm(self, rank: int, frozen: bool) -> None:
        turns = self._turns()
        if frozen:
            why = f"no sign of life for {self._seconds:g} s"
            self._tell(rank, why)
            if self._interrupt is not None:
                self._interrupt()
            threading.Thread(target=self._insist, args=(rank, why, turns), daemon=True).start()
            return
        why = "its process has ended"
        time.sleep(GRACE)  # its connection may have said so, with what it had sent before
        self._tell(rank, why)
        if self._interrupt is not None and self._turns() == turns and not self._closing:
            self._interrupt()
            threading.Thread(target=self._insist, args=(rank, why, turns), daemon=True).start()

    def _tell(self, rank: int, why: str) -> None:
        if self._rank == 0 or rank == 0:  # rank 0 tells the others
            self._lose(rank, why)

    def _insist(self, rank: int, why: str, turns: int) -> None:
        """End this process if the loss does not get through: MPI waits for ever.

        What can be interrupted gets more time: it wakes up by itself, on a busy machine late.
        """
        limit = min(STUCK, self._seconds) if self._interrupt is None else STUCK
        # Counted, not timed: while this process does not run, nobody in it can get through.
        for _ in range(round(limit / _LOOK)):
            if self._closing or self._turns() != turns:
                return
            time.sleep(_LOOK)
        error = PeerLost(f"rank {rank} is gone: {why}", [rank])
        if is_lent():
            log.error("%s; a collective still waits for it: end this worker", error)
            return
        print(
            f"ringlet: {error}; a collective still waits for it, so this rank ends", file=sys.stderr
        )
        sys.stderr.flush()
        os._exit(LOST_PEER)
