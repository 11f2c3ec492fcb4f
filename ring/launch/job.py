"""The launcher: starts the ranks of a job, prints what they say, and ends them together."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringlet.ring.errors import LaunchError
from ringlet.ring.launch import processes, start
from ringlet.ring.launch.bringup import Noise, bring_up, complaint, hopeless
from ringlet.ring.launch.crew import Crew
from ringlet.ring.launch.door import Door
from ringlet.ring.launch.forward import forwarded
from ringlet.ring.launch.hosts import Host
from ringlet.ring.launch.output import HIGH, Printer
from ringlet.ring.launch.parcel import seal
from ringlet.ring.launch.remote import Reach
from ringlet.ring.launch.shelf import Shelf
from ringlet.ring.launch.signals import Signals
from ringlet.ring.launch.site import Site
from ringlet.ring.launch.start import Started
from ringlet.ring.launch.torchrun import users_own
from ringlet.ring.launch.verdict import Verdict
from ringlet.ring.launch.wire import store_key

GRACE = 5.0  # seconds between asking the ranks to end and killing them
STUCK = 5.0  # seconds after that until a rank that cannot be killed is given up
NOISE = 1 << 14  # bytes kept of what mpiexec and the wrappers say themselves


@dataclass(frozen=True)
class Outcome:
    """How a job ended: exit code as a shell reports it, and the rank that failed first, if any."""

    code: int
    rank: int | None = None
    reason: str = ""
    interrupted: bool = False


def launch(
    command: Sequence[str],
    np: int,
    transport: str | None = None,
    env: Mapping[str, str] | None = None,
    *,
    hosts: Sequence[Host] = (),
    reach: Reach | None = None,
    output: str | None = None,
    prefix: bool = True,
    verbose: bool = False,
    grace: float = GRACE,
) -> int:
    """Run ``command`` as ``np`` ranks and return the job's exit code.

    They run on this machine, or on ``hosts``, filled one after the other; ``reach`` says how those
    are reached.

    It is 0 when every rank exits with 0, otherwise the code of the rank that failed first (128 +
    number for a signal). ``transport`` is mpi or gloo; None prefers mpi. ``env`` adds to this
    process's environment. Output goes to descriptors 1 and 2, whole lines at a time, with
    ``[rank]<stdout>: `` in front unless ``prefix`` is false, and, as it was written, into files
    of the directory ``output`` if that is given. After a failure the other ranks have
    ``grace`` seconds to end. Raises LaunchError or TransportUnavailable if the job cannot start.
    """
    job = Job(
        command,
        np,
        transport,
        env,
        hosts=hosts,
        reach=reach,
        output=output,
        prefix=prefix,
        verbose=verbose,
        grace=grace,
    )
    return job.run().code


class Job:
    """One run of ``command`` on ``np`` ranks; the arguments are those of ``launch``."""

    def __init__(
        self,
        command: Sequence[str],
        np: int,
        transport: str | None = None,
        env: Mapping[str, str] | None = None,
        *,
        hosts: Sequence[Host] = (),
        reach: Reach | None = None,
        output: str | None = None,
        prefix: bool = True,
        verbose: bool = False,
        grace: float = GRACE,
    ) -> None:
        if np < 1:
            raise LaunchError(f"a job needs at least one rank, not {np}")
        if not command:
            raise LaunchError("a job needs a command")
        self.size, self.grace, self.command = np, grace, list(command)
        self.transport, remark = start.choose_transport(transport)
        self.reach = reach or Reach()
        self.site = Site(hosts, np, self.reach)
        self.env = {**os.environ, **(env or {})}
        asked = {*(env or {}), *self.reach.forward}
        self._remote_env = forwarded(self.env, asked)
        self._users = users_own(self.env, asked)
        self.shelf = Shelf()
        self.printer = Printer(np, prefix, output)
        if remark:
            self.printer.note(remark)
        if verbose:
            ranks = "1 rank" if np == 1 else f"{np} ranks"
            where = f" on {self.site.listed()}" if self.site.several else ""
            self.printer.note(f"{ranks}{where} over {self.transport}: {' '.join(self.command)}")
        self._crew = Crew(self.site.ranks(), self.printer, self._task)
        self._verdict = Verdict(self._crew, self.shelf, self.site.several)
        self._announced = False
        self._forwarded: list[int] = []
        self._broken = False  # nobody reads what is printed
        self._kill_at: float | None = None
        self._killed = False
        self._started: list[Started] = []
        self._said = bytearray()  # by mpiexec and the wrappers themselves

    def run(self, parcels: Mapping[str, bytes] | None = None) -> Outcome:
        """Start the ranks and serve them until none is left. Raises LaunchError.

        ``parcels`` are left for them in the store, sealed with ``key``.
        """
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):
                stream.flush()  # what was printed before comes before
        with contextlib.ExitStack() as stack:
            stack.callback(self.printer.close)
            self._door = Door(self.size, self.site.address())
            stack.enter_context(contextlib.closing(self._door))
            self.key = store_key(self._door.secret)
            for name, data in (parcels or {}).items():
                self.shelf.put(name, seal(self.key, name, data))
            reader, writer = os.pipe()
            self._noise = stack.enter_context(os.fdopen(reader, "rb", buffering=0))
            os.set_blocking(reader, False)
            self._signals = stack.enter_context(Signals())
            stack.callback(self._release)
            self._start_limit = time.monotonic() + self.reach.start_timeout
            with os.fdopen(writer, "wb") as noise:
                helpers = Noise(noise, self._noise)
                for started in bring_up(
                    self.site,
                    self.transport,
                    self._door,
                    self._remote_env,
                    helpers,
                    self._start_limit,
                ):
                    self._started.append(started)  # at once: what follows may fail
            if self.transport == "mpi":
                self._verdict.manager = self._started[0]
            while self.printer.pending or not self._crew.done or not self._explained():
                self._step()
        return self._outcome()

    def _task(self, rank: int) -> dict[str, Any]:
        there = self._crew.ranks[rank]
        base = self.env if there.here else self._remote_env
        seat = self.site.seats[rank]
        env = start.rank_environment(
            base, rank, self.size, self.transport, self._door.address, seat, self._users
        )
        return {
            "command": self.command,
            "env": env,
            "drop": start.dropped(),
            "local_size": seat.local_size,
            "interfaces": self.reach.interfaces,
            "leads": rank == 0,
        }

    # One turn of the loop: wait, take what came, decide, print.

    def _step(self) -> None:
        ready = self._wait()
        if self._signals.fileno() in ready:
            for number in self._signals.arrived():
                self._forward(number)
        if not self._noise.closed and self._noise.fileno() in ready:
            self._listen()
        for guest in self._door.admit(ready):
            if guest.visitor:
                self.shelf.admit(guest)
            elif self._crew.engage(guest):
                for earlier in self._forwarded:
                    self._crew.signal(earlier)
        self._crew.serve(ready)
        self.shelf.serve(ready)
        self._judge()
        if missing := self._crew.missing():
            self._check_start(missing)
        try:
            self.printer.write()
        except BrokenPipeError:
            self._broken = True
            self.printer.mute()
            self._end_others()

    def _wait(self) -> set[int]:
        poll = select.poll()
        for source in (self._signals.fileno(), *self._door.sources()):
            poll.register(source, select.POLLIN)
        if not self._noise.closed:
            poll.register(self._noise, select.POLLIN)
        # While too much waits to be printed, the ranks have to wait as well.
        reading = select.POLLIN if self.printer.pending < HIGH else 0
        for channel in self._crew.channels():
            poll.register(channel, reading | (select.POLLOUT if channel.pending else 0))
        for channel in self.shelf.channels():
            poll.register(channel, select.POLLIN | (select.POLLOUT if channel.pending else 0))
        if (output := self.printer.wants) is not None:
            poll.register(output, select.POLLOUT)
        timeout: float | None = None
        if self._crew.missing() or not self._explained() or self._crew.awaits_cause():
            timeout = 100.0  # look now and then whether they, or mpiexec, still run
        if self._kill_at is not None:
            timeout = max(10.0, min(timeout or 1e6, 1000 * (self._kill_at - time.monotonic())))
        return {descriptor for descriptor, _ in poll.poll(timeout)}

    def _listen(self) -> None:
        data = self._noise.read(NOISE)
        if data == b"":
            self._noise.close()
        self._said += data or b""
        del self._said[:-NOISE]

    def _heard(self) -> str:
        while not self._noise.closed and select.select([self._noise], [], [], 0)[0]:
            self._listen()
        return self._said.decode(errors="replace").strip()

    def _check_start(self, missing: list[int]) -> None:
        """Raise LaunchError when a rank that has not reported never will."""
        gone = hopeless(self._started, missing)
        if gone or time.monotonic() >= self._start_limit:
            said, ranks = self._heard(), self._crew.ranks
            raise LaunchError(complaint(self.site, ranks, self._started, missing, gone, said))

    def _forward(self, number: int) -> None:
        if number == signal.SIGINT and number in self._forwarded:
            self.printer.mute()
            self.printer.note("killing every rank")
            self._kill()
            return
        self._forwarded.append(number)
        more = "; once more kills them" if number == signal.SIGINT else ""
        name = signal.Signals(number).name
        self.printer.note(f"{name} passed on to every rank{more}")
        self._crew.signal(number)

    def _judge(self) -> None:
        if not self._broken and self._verdict.reached():
            self._end_others()
        first = self._verdict.first
        if first and first.done and not self._announced and self._explained():
            self._announced = True  # after what the rank had to say itself
            if not self._forwarded:
                others = bool(self._verdict.running) and self._verdict.aborted() is None
                ending = "; ending the other ranks" if others else ""
                self.printer.note(f"{self._verdict.reason()}{ending}")
        if self._kill_at is not None and time.monotonic() >= self._kill_at:
            self._kill()

    def _explained(self) -> bool:
        return self._verdict.explained(self._killed)

    def _end_others(self) -> None:
        if self._kill_at is None:
            self._kill_at = time.monotonic() + self.grace
            self._crew.give_up_missing()
            if not self._forwarded:  # otherwise they know, and may be saving their work
                self._crew.signal(signal.SIGTERM, spared=self._verdict.first)

    def _kill(self) -> None:
        if self._killed:
            self._crew.give_up()  # what SIGKILL does not end, nothing will
        self._killed = True
        self._kill_at = time.monotonic() + STUCK
        self._crew.give_up_missing()
        self._crew.signal(signal.SIGKILL)

    def _release(self) -> None:
        """Leave no process behind."""
        self._door.close()
        self._crew.release()
        self.shelf.close()
        for started in self._started:
            if started.process.stdin:
                with contextlib.suppress(OSError):
                    started.process.stdin.close()  # an agent ends with its input
        # What never brought its ranks up has nothing to tidy up.
        limit = time.monotonic() + (1.0 if self._crew.missing() else STUCK)
        for process in [started.process for started in self._started]:
            try:
                process.wait(max(0.0, limit - time.monotonic()))
            except subprocess.TimeoutExpired:
                processes.signal_group(process.pid, signal.SIGKILL)
                process.wait()

    def _outcome(self) -> Outcome:
        interrupted = signal.SIGINT in self._forwarded
        if (first := self._verdict.first) is not None:
            killed = interrupted and self._killed
            code = 128 + signal.SIGINT if killed else self._verdict.code()
            return Outcome(code, first.number, self._verdict.reason(), interrupted)
        return Outcome(128 + signal.SIGPIPE if self._broken else 0, interrupted=interrupted)
