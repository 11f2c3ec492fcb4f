"""How the ranks of a job are ended: time to raise, then SIGTERM, a time of grace, then SIGKILL."""

from __future__ import annotations

import signal

from ringlet.ring.awake_clock import LOOK
from ringlet.ring.launch.failure_report import FailureReport
from ringlet.ring.launch.rank_table import Rank, RankTable
from ringlet.ring.processes.output import Printer

SAVING = 30.0  # seconds for those that a signal asked to end, once another rank has failed
NOTICE = 2.0  # seconds in which those that lost another rank may raise and leave by themselves
STUCK = 5.0  # seconds after SIGKILL until a rank that cannot be killed is given up
SILENT = 5.0  # seconds in which nothing comes from a host until its ranks are not waited for


class Termination:
    """Ends what is left of the ranks of ``rank_table`` once ``failure`` is known.

    The others first have NOTICE seconds to find out themselves, and ``grace`` ones after SIGTERM.
    Where the user's signal was passed on they have SAVING seconds: they may be saving their work.

    ``forwarded`` are the signals that were passed on, ``killed`` tells whether SIGKILL was sent.
    """

    def __init__(
        self, rank_table: RankTable, failure: FailureReport, printer: Printer, grace: float
    ) -> None:
        self.forwarded: list[int] = []
        self.killed = False
        self._rank_table, self._failure, self._printer = rank_table, failure, printer
        self._grace, self._clock = grace, rank_table.clock
        self._ask_at: float | None = None
        self._kill_at: float | None = None
        self._announced = False
        self._broken = False

    @property
    def interrupted(self) -> bool:
        """Whether the user has asked for the end."""
        return signal.SIGINT in self.forwarded

    @property
    def explained(self) -> bool:
        """Whether it was said why the job failed, if it has."""
        return self._failure.first is None or self._announced

    def forward(self, number: int) -> None:
        """Pass signal ``number`` on to every rank; the second SIGINT kills."""
        if number == signal.SIGINT and number in self.forwarded:
            self._printer.mute()
            self._printer.note("killing every rank")
            self._kill()
            return
        self.forwarded.append(number)
        more = "; once more kills them" if number == signal.SIGINT else ""
        name = signal.Signals(number).name
        self._printer.note(f"{name} passed on to every rank{more}")
        self._rank_table.signal(number)

    def repeat(self) -> None:
        """Pass on what was passed on before, to ranks that have only just come."""
        for earlier in self.forwarded:
            self._rank_table.signal(earlier)

    def judge(self) -> None:
        """End the other ranks when one has failed, say why, and kill when their time is up."""
        now = self._clock.now()
        if not self._broken and self._failure.reached():
            self._ask_at = self._ask_at or now + (0.0 if self.forwarded else NOTICE)
            self._rank_table.give_up_missing()
        if self._ask_at is not None and now >= self._ask_at:
            self._end_others()
        first = self._failure.first
        known = self._failure.explained(self.killed)
        if first and first.done and not self._announced and known:
            self._announced = True  # after what the rank had to say itself
            if not self.forwarded:
                others = bool(self._failure.running) and self._failure.aborted() is None
                ending = "; ending the other ranks" if others else ""
                self._printer.note(f"{self._failure.reason()}{ending}")
        if self._kill_at is not None:
            for rank in self._elsewhere():
                if rank.channel is not None and rank.channel.silence() >= SILENT:
                    self._rank_table.lose(rank)  # a host that is gone ends nothing
            if self._clock.now() >= self._kill_at:
                self._say_who_is_killed()
                self._kill()

    def break_off(self) -> None:
        """End all ranks, because nobody reads what they print."""
        self._broken = True
        self._printer.mute()
        self._end_others()

    def patience(self) -> float | None:
        """Return for how many seconds nothing has to be looked at, None for ever."""
        timeout: float | None = None
        # By what judge() has settled, never by a condition that may have changed since: that would
        # be waited for without end.
        if self._rank_table.missing() or not self.explained or self._failure.awaits_cause():
            timeout = 0.1  # look now and then whether they, or mpiexec, still run
        next_at = self._ask_at if self._kill_at is None else self._kill_at
        if self._kill_at is not None and self._elsewhere():
            timeout = LOOK
        if next_at is not None:
            timeout = max(0.01, min(timeout or 1000.0, self._clock.left(next_at)))
        return timeout

    def code(self) -> int:
        """Return the exit code of the job."""
        if self._failure.first is None:
            return 128 + signal.SIGPIPE if self._broken else 0
        return 128 + signal.SIGINT if self.interrupted and self.killed else self._failure.code()

    def _elsewhere(self) -> list[Rank]:
        """Return the ranks on other hosts that have not ended."""
        return [rank for rank in self._rank_table.ranks if not rank.here and not rank.done]

    def _end_others(self) -> None:
        if self._kill_at is None:
            if self.forwarded:
                self._grace = max(self._grace, SAVING)
            self._kill_at = self._clock.now() + self._grace
            self._rank_table.give_up_missing()
            if not self.forwarded:  # otherwise they know
                self._rank_table.signal(signal.SIGTERM, spared=self._failure.first)

    def _say_who_is_killed(self) -> None:
        running = [rank for rank in self._rank_table.ranks if rank.code is None and not rank.done]
        if self.killed or not running:
            return
        many = len(running) > 1
        after = "the first failure" if self.forwarded else "SIGTERM"
        self._printer.note(
            f"killing rank{'s' * many} {', '.join(str(rank.number) for rank in running)}, which"
            f" {'have' if many else 'has'} not ended within {self._grace:g} s of {after}"
        )

    def _kill(self) -> None:
        if self.killed:
            self._rank_table.give_up()  # what SIGKILL does not end, nothing will
        self.killed = True
        self._kill_at = self._clock.now() + STUCK
        self._rank_table.give_up_missing()
        self._rank_table.signal(signal.SIGKILL)
