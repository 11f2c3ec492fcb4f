"""What starts the members of an elastic job, and says whether they have ended: for the launcher."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Mapping
from typing import Any, Protocol

from ringlet.ring.hosts.hosts import Host
from ringlet.ring.processes import processes


class StartedMember(Protocol):
    """Whatever was started for a member: its wrapper, a remote shell, or an actor of an engine."""

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""

    def part(self) -> None:
        """Let it end by itself. Idempotent."""

    def end(self, seconds: float) -> None:
        """Wait for its end so long, then end it."""


class PlacementEngine(Protocol):
    """Something that has machines and starts members on them, instead of a script and a shell.

    ``look`` and ``patience`` are as those of ``ringlet.ring.elastic.discovery.Discovery``.
    """

    address: str  # the launcher's, as it leads to the members
    here: str | None  # the host that is this one, where the launcher starts members itself

    @property
    def secret(self) -> bytes | None:
        """Return the job's, where members know how to make it."""

    def look(self, now: float) -> tuple[list[Host] | None, str]:
        """Return the hosts where they are other than before, else None, and what to tell."""

    def patience(self, now: float) -> float | None:
        """Return the seconds until there is something to look at, None for ever."""

    def start(self, host: str, order: Mapping[str, Any]) -> StartedMember:
        """Have an agent (``ringlet.ring.launch.agent``) on ``host`` obey ``order``."""


class StartedProcess:
    """A process of this launcher's, whose end tells of the member's."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def poll(self) -> int | None:
        """Return its exit code, None while it runs."""
        return self._process.poll()

    def part(self) -> None:
        """Close its input, with which an agent ends."""
        if self._process.stdin:
            with contextlib.suppress(OSError):
                self._process.stdin.close()

    def end(self, seconds: float) -> None:
        """Wait for its end so long, then kill it."""
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            processes.signal_group(self._process.pid, signal.SIGKILL)
            self._process.wait()
