"""The launcher: starts the ranks of a job, prints what they say, and ends them together."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringlet.ring.awake_clock import LOOK
from ringlet.ring.descriptors import (
    flush_standard_streams,
    hold_standard_descriptors,
    more_descriptors,
)
from ringlet.ring.errors import LOST_PEER
from ringlet.ring.hosts.hosts import Host
from ringlet.ring.hosts.remote import Reach
from ringlet.ring.launch.absence import Absence
from ringlet.ring.launch.failure_report import FailureReport
from ringlet.ring.launch.helpers import Helpers
from ringlet.ring.launch.plan import Plan
from ringlet.ring.launch.rank_table import RankTable
from ringlet.ring.launch.signed_pickle import leave_parcels
from ringlet.ring.launch.start import listen_for_wrappers
from ringlet.ring.launch.termination import Termination
from ringlet.ring.launch.unanswered import Unanswered
from ringlet.ring.processes.output import Printer
from ringlet.ring.processes.signals import Signals
from ringlet.ring.wire.kv_store import KvStore

GRACE = 5.0  # seconds between asking the ranks to end and killing them


@dataclass(frozen=True)
class Outcome:
    """How a job ended: exit code as a shell reports it, and the rank that failed first, if any."""

    code: int
    rank: int | None = None
    reason: str = ""
    interrupted: bool = False


@more_descriptors()
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
    quiet: bool = True,
    title: str = "ringlet run",
) -> int:
    """Run ``command`` as ``np`` ranks and return the job's exit code.

    They run on this machine, or on ``hosts``, filled one after the other; ``reach`` says how those
    are reached.

    It is 0 when every rank exits with 0, otherwise the code of the rank that failed first (128 +
    number for a signal). ``transport`` is mpi, gloo or nccl; None prefers mpi. ``env`` adds to this
    process's environment. Output goes to descriptors 1 and 2, whole lines at a time, with
    ``[rank]<stdout>: `` in front unless ``prefix`` is false, and, as it was written, into files
    of the directory ``output`` if that is given. After a failure the other ranks have
    ``grace`` seconds to end. Unless ``quiet`` it is said at once what is started where (with
    ``verbose`` too), and in the end what the rank that failed first said last, if others have
    printed since. Lines of the launcher's own begin with ``title``. Raises LaunchError or
    TransportUnavailable if the job cannot start.
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
        quiet=quiet,
        title=title,
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
        quiet: bool = True,
        title: str = "ringlet run",
    ) -> None:
        self._plan = Plan(command, np, transport, env or {}, hosts, reach or Reach())
        site = self._plan.site
        self.kv_store = KvStore()
        self.printer = Printer(np, prefix, output, title=title)
        if self._plan.remark:
            self.printer.note(self._plan.remark)
        self._quiet = quiet
        if verbose or not quiet:
            files = f"; what rank N prints is in {output}/rank.N too" if output else ""
            self.printer.note(f"{self._plan}{files}")
        self._rank_table = RankTable(site.ranks(), self.printer, self._task, self._plan.pmi)
        mpi = self._plan.transport == "mpi"
        self._failure = FailureReport(self._rank_table, self.kv_store, site.several, mpi)
        self._absence = Absence(self._rank_table, self.kv_store, self._plan.pmi, self._failure)
        self._helpers = Helpers(site, self._rank_table)
        self._unanswered = Unanswered(self._rank_table, self.printer, self._plan.silence)
        self._ending = Termination(self._rank_table, self._failure, self.printer, grace)

    def run(self, parcels: Mapping[str, bytes] | None = None) -> Outcome:
        """Start the ranks and serve them until none is left. Raises LaunchError.

        ``parcels`` are left for them in the store, sealed with ``key``.
        """
        hold_standard_descriptors()
        flush_standard_streams()
        with contextlib.ExitStack() as stack:
            stack.callback(self.printer.close)
            site = self._plan.site
            arrived = site.reach.arrived
            secret = arrived.secret if arrived else None
            self._listener = listen_for_wrappers(self._plan.size, site.address(), secret)
            stack.enter_context(contextlib.closing(self._listener))
            self.key = leave_parcels(self.kv_store, self._listener.secret, parcels)
            self._signals = stack.enter_context(Signals())
            stack.callback(self._release)
            managed = self._plan.transport == "mpi" and self._plan.pmi is None
            self._helpers.start(managed, self._listener, self._plan.remote_env)
            if managed:
                self._failure.manager = self._helpers.started[0]
            while self.printer.pending or not self._rank_table.done or not self._ending.explained:
                self._step()
            self.printer.close()
            said = self.printer.losses.summary()
            if said:
                self.printer.note(said)
            if self._remind() or said:
                with contextlib.suppress(BrokenPipeError):
                    self.printer.write()
        first, interrupted = self._failure.first, self._ending.interrupted
        number = None if first is None else first.number
        return Outcome(self._ending.code(), number, self._failure.reason(), interrupted)

    def _remind(self) -> bool:
        first = self._failure.first
        if self._quiet or first is None or self._ending.forwarded:
            return False
        name, remedy = f"rank {first.number}", self._plan.missing_module()
        did = "noticed it first" if first.code == LOST_PEER and not first.lost else "failed first"
        did = did if first.code else "ended first"
        return self.printer.remind(first.number, name, remedy, did)

    def _task(self, rank: int) -> dict[str, Any]:
        return self._plan.task(rank, self._listener.address)

    # One turn of the loop: wait, take what came, decide, print.

    def _step(self) -> None:
        ready = self._wait()
        if self._signals.fileno() in ready:
            for number in self._signals.arrived():
                self._ending.forward(number)
        noise = self._helpers.noise
        if noise is not None and noise.fileno() in ready:
            self._helpers.listen()
        for guest in self._listener.admit(ready):
            if guest.visitor:
                self.kv_store.admit(guest)
            elif self._rank_table.engage(guest):
                self._ending.repeat()
        if complaint := self._listener.complaint():
            self.printer.note(complaint)
        self._rank_table.serve(ready)
        self.kv_store.serve(ready)
        self._absence.look()
        self._unanswered.look(self._rank_table.clock.now())
        self._ending.judge()
        self._helpers.check()
        try:
            self.printer.write()
        except BrokenPipeError:
            self._ending.break_off()

    def _wait(self) -> set[int]:
        sources = [self._signals.fileno(), *self._listener.sources()]
        if self._helpers.noise is not None:
            sources.append(self._helpers.noise.fileno())
        asked = self._unanswered.patience(self._rank_table.clock.now())
        times = self._ending.patience(), self._listener.patience(), asked and min(asked, LOOK)
        seconds = min((time for time in times if time is not None), default=None)
        return self._rank_table.wait(sources, self.kv_store, seconds)

    def _release(self) -> None:
        """Leave no process behind."""
        self._listener.close()
        self._rank_table.release()
        self.kv_store.close()
        self._helpers.dismiss()
