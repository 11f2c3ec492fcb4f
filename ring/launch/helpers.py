"""The processes that bring the ranks up, what they say themselves, and the end of them."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import time
from collections.abc import Mapping
from typing import BinaryIO

from ringlet.ring.errors import LaunchError
from ringlet.ring.launch.allocation import Allocation
from ringlet.ring.launch.rank_table import RankTable
from ringlet.ring.launch.spawn import bring_up, complaint, hopeless
from ringlet.ring.launch.start import Started
from ringlet.ring.processes import processes
from ringlet.ring.wire.listener import Listener

NOISE = 1 << 14  # bytes kept of what mpiexec and the wrappers say themselves
TIDY = 5.0  # seconds that helpers whose ranks have gone may take to go as well


class Helpers:
    """Wrappers, MPI's process manager and remote shells for the ranks of ``site``.

    ``rank_table`` knows which ranks have reported. ``noise`` is the pipe through which helpers say
    things, None when nothing more can come.
    """

    def __init__(self, site: Allocation, rank_table: RankTable) -> None:
        self.started: list[Started] = []
        self._site, self._rank_table = site, rank_table
        self.noise: BinaryIO | None = None
        self._said = bytearray()
        self._limit = 0.0

    def start(self, managed: bool, listener: Listener, remote_env: Mapping[str, str]) -> None:
        """Start them all; what the arguments are, ``bring_up`` says. Raises LaunchError."""
        self._limit = self._rank_table.clock.now() + self._site.reach.start_timeout
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        self.noise = os.fdopen(reader, "rb", buffering=0)
        with os.fdopen(writer, "wb") as said:
            for one in bring_up(self._site, managed, listener, remote_env, said):
                self.started.append(one)  # at once: what follows may fail

    def listen(self) -> None:
        """Take what they have said."""
        if self.noise is None:
            return
        data = self.noise.read(NOISE)
        if data == b"":
            self._hush()
        self._said += data or b""
        del self._said[:-NOISE]

    def check(self) -> None:
        """Raise LaunchError when a rank that has not reported never will."""
        missing = self._rank_table.missing()
        if not missing:
            return
        gone = hopeless(self.started, missing)
        if gone or self._rank_table.clock.now() >= self._limit:
            said, ranks = self._heard(), self._rank_table.ranks
            raise LaunchError(complaint(self._site, ranks, self.started, missing, gone, said))

    def dismiss(self) -> None:
        """Leave no process behind."""
        for started in self.started:
            if started.process.stdin:
                with contextlib.suppress(OSError):
                    started.process.stdin.close()  # an agent ends with its input
        # What never brought its ranks up has nothing to tidy up.
        limit = time.monotonic() + (1.0 if self._rank_table.missing() else TIDY)
        for process in [started.process for started in self.started]:
            try:
                process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                processes.signal_group(process.pid, signal.SIGKILL)
                process.wait()
        self._hush()

    def _hush(self) -> None:
        if self.noise is not None:
            self.noise.close()
            self.noise = None

    def _heard(self) -> str:
        while self.noise is not None and _can_be_read(self.noise):
            self.listen()
        return self._said.decode(errors="replace").strip()


def _can_be_read(file: BinaryIO) -> bool:
    poll = select.poll()  # which takes descriptors above 1023, too
    poll.register(file, select.POLLIN)
    return bool(poll.poll(0))
