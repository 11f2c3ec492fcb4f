"""Which hosts there are: what a script of the user's prints, or a list that stays as it is."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from typing import IO

from ringlet.ring.descriptors import limit_as_before
from ringlet.ring.errors import LaunchError
from ringlet.ring.hosts.hosts import Host, check_all_slots, parse_host
from ringlet.ring.processes import processes

PERIOD = 1.0  # seconds from the end of one run to the beginning of the next
UNUSABLE = (126, 127)  # a shell's exit codes for what is not executable, or not there
PATIENCE = 30.0  # seconds that a run may take
LONGEST = 1 << 20  # bytes of what a run prints
KILLED = 1.0  # seconds that one which is killed is waited for: it may be stuck in the kernel


class Discovery:
    """Runs ``script`` again and again; None: ``hosts`` are all there is.

    A line is ``host`` or ``host:slots``; ``slots`` are those of a host without a number. A run that
    fails, prints nothing, too much or what makes no sense, or takes longer than 30 s changes
    nothing: ``look`` says so, once for the same reason. It raises LaunchError where the first run
    shows that the script is not there, or not executable; so does an empty one at once.
    """

    def __init__(self, script: str | None, slots: int = 1, hosts: Sequence[Host] = ()) -> None:
        if script is not None and not script.strip():
            raise LaunchError(
                "--host-discovery-script is empty: it takes a command that prints the hosts there"
                " are, such as ./hosts.sh"
            )
        self._script, self._slots, self._hosts = script, slots, list(hosts)
        self._process: subprocess.Popen[bytes] | None = None
        self._stuck: subprocess.Popen[bytes] | None = None  # it was killed, and has not ended
        self._output: IO[bytes] | None = None
        self._said: IO[bytes] | None = None  # on the standard error
        self._next = self._began = 0.0
        self._complaint = ""
        self._known: list[Host] | None = None
        self._ran = False

    def look(self, now: float) -> tuple[list[Host] | None, str]:
        """Return the hosts where they are other than before, else None, and what to tell."""
        if self._script is None:
            found, self._hosts = self._hosts, []
            return (found or None), ""
        if self._process is None:
            return None, self._start(now) if now >= self._next else ""
        runs = self._process.poll() is None
        if self._printed() > LONGEST:  # which is not left to fill the disk
            self._end_run()
            return None, self._complain(f"printed more than {LONGEST >> 20} MiB", now)
        if runs and now - self._began < PATIENCE:
            return None, ""
        if runs:
            self._end_run()
            return None, self._complain(f"did not end within {PATIENCE:g} s", now)
        try:
            found = self._result()
        except LaunchError as error:
            if self._known is None and self._process.returncode in UNUSABLE:
                self._done(now)
                raise LaunchError(
                    f"--host-discovery-script {self._script} cannot be run: {error}. It is a"
                    " shell's command, such as ./hosts.sh, which has to be there and executable"
                ) from None
            return None, self._complain(str(error), now)
        self._done(now)
        self._complaint = ""
        if found == self._known:
            return None, ""
        self._known = found
        return found, ""

    def patience(self, now: float) -> float | None:
        """Return the seconds until there is something to look at, None for ever."""
        if self._script is None:
            return 0.0 if self._hosts else None
        return 0.05 if self._process is not None else max(0.0, self._next - now)

    def close(self) -> None:
        """Leave no process behind."""
        if self._process is not None:
            self._end_run()
            self._done(time.monotonic())

    def _printed(self) -> int:
        """Return how many bytes the run has printed so far, on the standard error too."""
        files = (self._output, self._said)
        return sum(os.fstat(file.fileno()).st_size for file in files if file is not None)

    def _end_run(self) -> None:
        """Kill what runs, and remember what does not end by that: it is stuck in the kernel."""
        assert self._process is not None
        if self._process.poll() is None:
            processes.signal_group(self._process.pid, signal.SIGKILL)
            try:
                self._process.wait(KILLED)
            except subprocess.TimeoutExpired:
                self._stuck = self._process

    def _start(self, now: float) -> str:
        """Begin a run; return what to tell. Raises LaunchError where the first one cannot begin."""
        assert self._script is not None
        if self._stuck is not None and self._stuck.poll() is None:
            self._next = now + PERIOD
            return ""
        self._stuck = None
        self._began = now
        try:
            self._output = tempfile.TemporaryFile()  # noqa: SIM115 - closed when the run is over
            self._said = tempfile.TemporaryFile()  # noqa: SIM115
            self._process = self._run(os.path.abspath(self._script))
        except OSError as error:
            why = f"cannot be started: {error.strerror}"
            said = self._complain(why, now)
            if not self._ran:
                raise LaunchError(f"--host-discovery-script {self._script} {why}") from error
            return said
        self._ran = True
        return ""

    def _run(self, file: str) -> subprocess.Popen[bytes]:
        assert self._script is not None
        # A folder may have the name of a command, and can be "executed" by its permissions.
        if not os.path.isfile(file) or not os.access(file, os.X_OK):
            return self._popen(["sh", "-c", self._script])
        try:
            return self._popen([file])
        except OSError as error:
            if error.errno != errno.ENOEXEC:
                raise
        return self._popen(["sh", file])  # as shells do where no first line names an interpreter

    def _popen(self, command: list[str]) -> subprocess.Popen[bytes]:
        me = os.getpid()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._said,
            start_new_session=True,
            preexec_fn=lambda: processes.die_with_parent(signal.SIGKILL, me),
        )
        limit_as_before(process.pid)
        return process

    def _result(self) -> list[Host]:
        assert self._process is not None
        assert self._output is not None
        assert self._said is not None
        text, aside = _read(self._output), _read(self._said)
        if code := self._process.returncode:
            said = (aside.strip() or text.strip()).splitlines()[-1:] or ["nothing"]
            raise LaunchError(f"{processes.describe(code)}; it said: {said[0][:200]}")
        hosts: dict[str, int] = {}
        for line in filter(None, map(str.strip, text.splitlines())):
            try:
                host = parse_host(line, "its output", self._slots)
            except LaunchError as error:
                raise LaunchError(f"printed what names no host: {error}") from None
            if host.name in hosts:
                raise LaunchError(f"printed host {host.name} twice")
            hosts[host.name] = host.slots
        if not hosts:
            raise LaunchError("printed no host")
        found = [Host(name, count) for name, count in hosts.items()]
        check_all_slots(found, "its output")
        return found

    def _complain(self, what: str, now: float) -> str:
        self._done(now)
        text = f"--host-discovery-script {self._script} {what}; the hosts stay as they were"
        if text == self._complaint:
            return ""
        self._complaint = text
        return text

    def _done(self, now: float) -> None:
        for file in (self._output, self._said):
            if file is not None:
                file.close()
        self._process, self._output, self._said, self._next = None, None, None, now + PERIOD


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read(LONGEST).decode(errors="replace")
