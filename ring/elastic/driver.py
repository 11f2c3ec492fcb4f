"""The launcher of an elastic job: starts members, tells them their ranks, and ends the job."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, BinaryIO

from ringlet.ring.awake_clock import LOOK, AwakeClock
from ringlet.ring.control import pulse
from ringlet.ring.descriptors import (
    flush_standard_streams,
    hold_standard_descriptors,
    more_descriptors,
)
from ringlet.ring.elastic.discovery import Discovery
from ringlet.ring.elastic.held_back import HeldBack
from ringlet.ring.elastic.member_starter import LOCAL, MemberStarter
from ringlet.ring.elastic.membership import LEAVE, Decisions, JobMember, Membership
from ringlet.ring.elastic.placement_engine import PlacementEngine, StartedMember
from ringlet.ring.elastic.rules import Rules
from ringlet.ring.elastic.signs_of_life import SignsOfLife
from ringlet.ring.errors import LOST_PEER, LaunchError
from ringlet.ring.hosts.hosts import Host
from ringlet.ring.hosts.remote import Reach
from ringlet.ring.launch import start
from ringlet.ring.launch.plan import shown
from ringlet.ring.launch.rank_table import Rank, RankTable
from ringlet.ring.launch.signed_pickle import leave_parcels
from ringlet.ring.processes import processes
from ringlet.ring.processes.output import HIGH, Printer
from ringlet.ring.processes.signals import Signals
from ringlet.ring.rendezvous import epochs
from ringlet.ring.rendezvous.loss_report import leaving_code, leaving_name
from ringlet.ring.wire.kv_store import KvStore
from ringlet.ring.wire.launch_link import Kind

GRACE = 5.0  # seconds between asking members to end and killing them, and until they are given up
GONE = 1.0  # seconds until a member that is killed while others go on counts as gone with its host
NOISE = 1 << 14  # bytes kept of what wrappers and remote shells say themselves


@more_descriptors()
def launch(
    command: Sequence[str],
    rules: Rules,
    discovery: Discovery | PlacementEngine,
    transport: str | None = None,
    env: Mapping[str, str] | None = None,
    *,
    reach: Reach | None = None,
    output: str | None = None,
    prefix: bool = True,
    verbose: bool = False,
    title: str = "ringlet run",
) -> int:
    """Run ``command`` on ranks that come and go, by ``rules``; return the job's exit code.

    It is 0 when a rank ends with 0 and all others do so then, else the code of the rank that failed
    first of those that were there last, or 1 where there were too few. Other arguments are as for
    ``ringlet.ring.launch.job.launch``; the files of ``output`` have the numbers of members. Raises
    LaunchError or TransportUnavailable if the job cannot start.
    """
    driver = Driver(command, rules, discovery, transport, env or {}, reach or Reach())
    return driver.run(Printer(rules.np, prefix, output, True, title), verbose).code


@dataclass(frozen=True)
class ElasticOutcome:
    """How a job has ended: its exit code, and why, in words, where that is not 0.

    ``returned`` are the members that ended well, by rank, and ``failed`` is the one that failed
    first, None for none. ``interrupted`` says whether the user ended the job.
    """

    code: int
    reason: str
    returned: list[int]
    failed: int | None
    interrupted: bool


@dataclass
class _Attended:
    """What the launcher keeps of a member; times are by its clock."""

    started: StartedMember | None = None  # None once it has ended
    start_by: float | None = None  # when it has to have reported
    kill_at: float | None = None  # when it is given up, as it was killed
    questions: int = 0  # that it has asked


class Driver:
    """One elastic job; the arguments are those of ``launch``.

    Whom to start, bar (Horovod's blacklist) and end: ``membership``. Instead of a discovery, an
    engine can both find hosts and start members there. ``kv_store`` is the job's, and ``key`` what
    parcels in it are sealed with.
    """

    def __init__(
        self,
        command: Sequence[str],
        rules: Rules,
        discovery: Discovery | PlacementEngine,
        transport: str | None,
        env: Mapping[str, str],
        reach: Reach,
    ) -> None:
        self._rules, self._discovery = rules, discovery
        self._engine = None if isinstance(discovery, Discovery) else discovery
        self._starter = MemberStarter(command, transport, env, reach, self._engine)
        self._start_timeout = patience = reach.start_timeout
        self._clock = AwakeClock()  # members may have stood still where this process did
        self._membership = Membership(rules, self._clock.now(), start_timeout=patience)
        self.kv_store = KvStore()
        self._changes = 0
        self._held_back = HeldBack(self.kv_store)
        self._attended: dict[int, _Attended] = {}  # by member
        self._silence = self._heartbeat()
        self._over: tuple[int, str] | None = None
        self._blamed: int | None = None  # the member that failed first, if that ends the job
        self._end_at: float | None = None  # when what is left of an ending job is killed
        self._killed = False  # whether that was done
        self._forwarded: list[int] = []

    def run(
        self, printer: Printer, verbose: bool, parcels: Mapping[str, bytes] | None = None
    ) -> ElasticOutcome:
        """Serve the members until none is left. Raises LaunchError.

        ``parcels`` are left for them in the store, sealed with ``key``.
        """
        self._printer = printer
        hold_standard_descriptors()
        flush_standard_streams()
        with contextlib.ExitStack() as stack:
            stack.callback(printer.close)
            if isinstance(self._discovery, Discovery):
                stack.enter_context(contextlib.closing(self._discovery))
            self._signals = stack.enter_context(Signals())
            hosts = self._first_hosts()
            if hosts is None:
                number = self._forwarded[0]
                return ElasticOutcome(
                    128 + number, _ended_by(number), [], None, number == signal.SIGINT
                )
            if verbose:
                printer.note(self._started(hosts))
            self._open(hosts, parcels, stack)
            now = self._clock.now()
            self._membership.hosts_found(hosts, now)
            self._obey(self._membership.decide(now), now)
            while self._over is None or printer.pending or not self._rank_table.done:
                self._step()
            printer.close()
            said = printer.losses.summary()
            if said:
                printer.note(said)
            if self._remind() or said:
                with contextlib.suppress(BrokenPipeError):
                    printer.write()
        assert self._over is not None
        code, reason = self._over
        returned, interrupted = self._membership.returned(), signal.SIGINT in self._forwarded
        return ElasticOutcome(code, reason, returned, self._blamed, interrupted)

    def _started(self, hosts: Sequence[Host]) -> str:
        """Say what is started, on ``hosts``, and where files of the output are."""
        first = "1 rank" if self._rules.np == 1 else f"{self._rules.np} ranks"
        where = ""
        if len(hosts) > 1 or self._starter.elsewhere(hosts):
            slots = (f"{h.slots} slot{'s' * (h.slots > 1)}" for h in hosts)
            listed = ", ".join(f"{h.name} ({n})" for h, n in zip(hosts, slots, strict=True))
            where = f" on {listed},"
        folder = self._printer.directory
        files = f"; what process N prints is in {folder}/rank.N too" if folder else ""
        least, over = self._rules.min_np, self._starter.transport
        what = shown(self._starter.command)
        return f"{first} at first, at least {least},{where} over {over}: {what}{files}"

    def _open(
        self,
        hosts: Sequence[Host],
        parcels: Mapping[str, bytes] | None,
        stack: contextlib.ExitStack,
    ) -> None:
        """Open what members report to, and the pipe of what their wrappers say themselves.

        ``stack`` closes it, when it has ended the members.
        """
        own = self._starter.address(hosts)
        self._local = own == LOCAL and self._engine is None
        secret = self._engine.secret if self._engine is not None else None
        self._listener = start.listen_for_wrappers(0, own, secret)
        stack.enter_context(contextlib.closing(self._listener))
        self.key = leave_parcels(self.kv_store, self._listener.secret, parcels)
        self._rank_table = RankTable([], self._printer, self._task, None, b"{}", self._clock)
        self._signs = SignsOfLife(self._membership, self._rank_table, self._silence)
        self.kv_store.leave(epochs.CHANGES, b"0")
        self.kv_store.leave(epochs.SPECS, b"null")
        reader, writer = os.pipe()
        os.set_blocking(reader, False)
        self._noise: BinaryIO = stack.enter_context(os.fdopen(reader, "rb", buffering=0))
        self._writer = stack.enter_context(os.fdopen(writer, "wb", buffering=0))
        self._said = bytearray()
        stack.callback(self._release)

    def rank_of(self, number: int) -> int:
        """Return the rank that a member had last, or its own number if it never had one."""
        rank = self._membership.members[number].rank
        return number if rank is None else rank

    def _remind(self) -> bool:
        number = self._blamed
        if number is None or self._forwarded:
            return False
        remedy = self._starter.remedy(self._rank_table.ranks[number].here)
        return self._printer.remind(number, f"process {number}", remedy)

    def _first_hosts(self) -> list[Host] | None:
        """Wait until there are hosts; return them, or None where the user ends the job before.

        Raises LaunchError when there are none within the rules' timeout.
        """
        limit = self._clock.now() + self._rules.timeout
        while True:
            now = self._clock.now()
            hosts, complaint = self._discovery.look(now)
            if complaint:
                self._printer.note(complaint)
            self._printer.write()
            if hosts is not None:
                return hosts
            if now >= limit:
                name = self._rules.named("elastic_timeout")
                within = f"within {self._rules.timeout:g} s ({name})"
                what = "engine" if self._engine is not None else "discovery script"
                raise LaunchError(f"the {what} has named no host {within}")
            wait = min(self._discovery.patience(now) or 0.0, limit - now)
            poll = select.poll()  # which takes descriptors above 1023, too
            poll.register(self._signals, select.POLLIN)
            self._clock.sleep(wait)
            if poll.poll(1000 * wait):
                self._forwarded += self._signals.arrived()
            if self._forwarded:
                return None

    def _heartbeat(self) -> float:
        try:
            return pulse.seconds_from(self._starter.env)
        except ValueError as error:
            raise LaunchError(str(error)) from None

    def _reachable(self, hosts: list[Host]) -> list[Host]:
        """Return those of ``hosts`` that can reach this launcher, and say which cannot."""
        others = self._starter.elsewhere(hosts) if self._local else []
        if others:
            self._printer.note(
                f"host {others[0]} cannot join: the hosts at the start were this one alone, so the"
                " job listens on loopback only; name --network-interface, or another host at first"
            )
        return [host for host in hosts if host.name not in others]

    # One turn of the loop: wait, take what came, decide, print.

    def _step(self) -> None:
        self._take_what_came(self._wait())
        now = self._clock.now()
        self._look_at_members(now)
        if self._over is None:
            self._decide(now)
        else:
            self._end_members(now)
        # Whom the job has left behind may end after it.
        for note in self._held_back.notes(self._over is not None and self._over[0] != 0):
            self._printer.note(note)
        try:
            self._printer.write()
        except BrokenPipeError:
            self._printer.mute()
            self._finish(128 + signal.SIGPIPE, "nobody reads what ranks print", now)

    def _take_what_came(self, ready: set[int]) -> None:
        if self._signals.fileno() in ready:
            for number in self._signals.arrived():
                self._forward(number)
        if self._noise.fileno() in ready:
            self._said += self._noise.read(NOISE) or b""
            del self._said[:-NOISE]
        for guest in self._listener.admit(ready):
            if guest.visitor:
                self.kv_store.admit(guest)
            else:
                self._attended[guest.rank].start_by = None
                self._rank_table.engage(guest)
        if complaint := self._listener.complaint():
            self._printer.note(complaint)
        self._rank_table.serve(ready)
        self.kv_store.serve(ready)

    def _decide(self, now: float) -> None:
        hosts, complaint = self._discovery.look(now)
        if complaint:
            self._printer.note(complaint)
        if hosts is not None and not self._forwarded:
            self._membership.hosts_found(self._reachable(hosts), now)
        for note in self._signs.look(now, self._printer.pending < HIGH):
            self._printer.note(note)
        self._obey(self._membership.decide(now), now)

    def _end_members(self, now: float) -> None:
        """End, in a job that is over, those that did not when they were asked to."""
        if self._end_at is None or now < self._end_at:
            return
        left = [rank for rank in self._rank_table.ranks if rank.code is None and not rank.done]
        if left and not self._killed:
            names = ", ".join(f"rank {self.rank_of(r.number)} on {r.host}" for r in left)
            self._printer.note(f"killing what has not ended within {GRACE:g} s: {names}")
        self._killed = True
        self._rank_table.signal(signal.SIGKILL)
        for rank in self._rank_table.ranks:
            if now >= self._end_at + GRACE and rank.code is None and not rank.done:
                self._rank_table.lose(rank)

    def _wait(self) -> set[int]:
        sources = [self._signals.fileno(), self._noise.fileno(), *self._listener.sources()]
        now = self._clock.now()
        attended = self._attended.values()
        starting = [each.start_by for each in attended if each.start_by is not None]
        killed = [each.kill_at for each in attended if each.kill_at is not None]
        times: list[float | None] = [max(0.0, at - now) for at in starting + killed]
        if starting:
            times.append(0.1)  # whether what was started still runs
        if self._end_at is not None:
            times.append(max(0.05, self._end_at - now))
        if self._over is None:
            times += [self._membership.patience(now), self._signs.patience(now)]
        times = [time if time is None else min(time, LOOK) for time in times]
        times.append(self._listener.patience())
        if self._over is None:
            times.append(self._discovery.patience(now))
        seconds = min((time for time in times if time is not None), default=None)
        return self._rank_table.wait(sources, self.kv_store, seconds)

    # What members do.

    def _look_at_members(self, now: float) -> None:
        # Causes before effects, where several have ended since the last turn.
        for rank in sorted(self._rank_table.ranks, key=_cause_first):
            number = rank.number
            attended = self._attended[number]
            if rank.code is not None or rank.done:
                attended.start_by = attended.kill_at = None
                member = self._membership.members[number]
                how, shown = how_ended(rank, member.killed, member.leaving)
                if rank.code and not member.ended and member.seat is not None:
                    self._held_back.gone(number, member.seat.rank, member.seat.epoch)
                self._membership.ended(number, shown, how, now)
                self._let_go(rank)
                continue
            self._read_what_it_left(number, now)
            if attended.kill_at is not None and now >= attended.kill_at:
                self._rank_table.lose(rank)  # a host that is gone does not kill
            elif attended.start_by is not None and attended.started is not None:
                code = attended.started.poll()
                if code is not None or now >= attended.start_by:
                    self._never_came(rank, code, now)

    def _let_go(self, rank: Rank) -> None:
        """Keep nothing of a rank that is done: others may come for as long as the job lasts."""
        if rank.done and rank.channel and not rank.channel.closed:
            with contextlib.suppress(OSError):
                rank.channel.send(Kind.RELEASE)
                rank.channel.close()
        if rank.done:
            self._printer.leave(rank.number)
        attended = self._attended[rank.number]
        if rank.done and attended.started is not None and attended.started.poll() is not None:
            attended.started.part()
            attended.started = None

    def _read_what_it_left(self, number: int, now: float) -> None:
        """Read in the store what a member has said since the last turn, or before."""
        epoch = epochs.met_epoch(self.kv_store.value(epochs.met_name(number)))
        if epoch is not None:
            self._membership.meets(number, epoch)
        if self.kv_store.value(epochs.knows_name(number)) is not None:
            self._membership.learns(number, now)
        code = leaving_code(self.kv_store.value(leaving_name(number)))
        if code is not None:
            self._membership.leaves(number, code, now)
        told = self.kv_store.value(epochs.ask_name(number))
        question = epochs.Question.unpack(told) if told is not None else None
        attended = self._attended[number]
        if question is not None and question.number == attended.questions + 1:
            attended.questions = question.number
            self._membership.asks(number, question.lost, now)

    def _never_came(self, rank: Rank, code: int | None, now: float) -> None:
        why = f"ended with code {code}"
        if code is None:
            name = self._rules.named("start_timeout")
            why = f"did not report within {self._start_timeout:g} s ({name})"
        said = bytes(self._said).decode(errors="replace").strip()
        how = f"did not start: what should have started it {why}"
        how += f"; it said: {said.splitlines()[-1]}" if said else ""
        rank.done, rank.code = True, 1
        self._membership.ended(rank.number, 1, how, now)
        attended = self._attended[rank.number]
        assert attended.started is not None
        attended.started.part()
        attended.started.end(0.0)
        attended.started = attended.start_by = None

    # What is decided.

    def _obey(self, todo: Decisions, now: float) -> None:
        for text in todo.notes:
            self._printer.note(text)
        for epoch in set(todo.lost):
            why = f"a rank of epoch {epoch} ended before all ranks had met"
            self.kv_store.refuse(epochs.meeting(epoch), why)
        for member in todo.start:
            self._start(member, now)
        if todo.changed:
            self._changes += 1
            self.kv_store.leave(epochs.CHANGES, b"%d" % self._changes)
        for number, seat in todo.seats.items():
            self._answer(number, {**asdict(seat), "changes": self._changes})
        for number, why in todo.dismiss.items():
            self._answer(number, {"dismissed": why})
            last = self._membership.members[number].seat
            if not why and last is not None:  # the others go on
                self._held_back.gone(number, last.rank, last.epoch)
        for member in todo.kill:
            rank = self._rank_table.ranks[member.number]
            if rank.channel:
                rank.channel.send(Kind.SIGNAL, b"%d" % signal.SIGKILL)
            self._attended[member.number].kill_at = now + GONE
        if todo.over is not None:
            self._finish(*todo.over, now)

    def _finish(self, code: int, reason: str, now: float) -> None:
        if self._over is not None:
            return
        self._blamed = self._membership.first_failed if code else None  # not whom this ends
        if code - 128 in self._forwarded:  # no rank is to blame for that
            self._blamed, reason = None, _ended_by(code - 128)
        self._over = code, reason
        if reason and not self._forwarded:
            left = any(not rank.done for rank in self._rank_table.ranks)
            self._printer.note(f"{reason}{'; ending the other ranks' if left else ''}")
        self._end_at = now + GRACE
        self._rank_table.give_up_missing()
        if not self._forwarded:
            self._rank_table.signal(signal.SIGTERM)

    def _forward(self, number: int) -> None:
        """Pass signal ``number`` on to every rank; the second SIGINT kills.

        Ranks may be saving: how long that takes, and how the job ends, is theirs.
        """
        now = self._clock.now()
        code, reason = 128 + number, _ended_by(number)
        if number == signal.SIGINT and number in self._forwarded:
            self._printer.mute()
            self._printer.note("killing every rank")
            if self._over is not None and self._over[0]:
                self._over = code, self._over[1]
            self._finish(code, reason, now)
            self._end_at, self._killed = now, True
            return
        self._forwarded.append(number)
        name = signal.Signals(number).name
        more = "; once more kills them" if number == signal.SIGINT else ""
        self._printer.note(f"{name} passed on to every rank{more}")
        self._rank_table.signal(number)
        if self._over is not None:
            return
        self._membership.stop(code, reason)
        for rank in self._rank_table.ranks:
            if not rank.channel and not rank.done:  # what has not begun, need not
                rank.done, rank.code = True, -number

    def _answer(self, number: int, answer: Mapping[str, Any]) -> None:
        name = epochs.answer_name(number, self._attended[number].questions)
        self.kv_store.leave(name, json.dumps(answer).encode())

    def _start(self, member: JobMember, now: float) -> None:
        number, host = member.number, member.host
        rank = Rank(number, host, self._starter.is_here(host))
        self._rank_table.ranks.append(rank)
        self._printer.join(number)
        self._listener.size = number + 1
        attended = self._attended[number] = _Attended(start_by=now + self._start_timeout)
        try:
            attended.started = self._starter.start(number, host, self._listener, self._writer)
        except LaunchError as error:
            attended.start_by = None
            rank.done, rank.code = True, 1
            self._membership.ended(number, 1, f"did not start: {error}", now)

    def _task(self, number: int) -> dict[str, Any]:
        members, here = self._membership.members, self._rank_table.ranks[number].here
        living = [member for member in members.values() if not member.ended]
        return self._starter.task(members[number], living, here, self._listener.address)

    def _release(self) -> None:
        """Leave no process behind."""
        self._listener.close()  # who has not reported yet finds at once that nobody is there
        self._rank_table.release()
        self.kv_store.close()
        limit = time.monotonic() + GRACE
        left = [each.started for each in self._attended.values() if each.started is not None]
        for started in left:
            with contextlib.suppress(Exception):  # of an engine that is gone: the others are left
                started.part()
        for started in left:
            with contextlib.suppress(Exception):
                started.end(limit - time.monotonic())


def _cause_first(rank: Rank) -> tuple[bool, int]:
    return rank.code == LOST_PEER, rank.when


def how_ended(rank: Rank, killed: bool, leaving: int = 0) -> tuple[str, int]:
    """Say how a member ended, and with which code as a shell reports it.

    ``killed`` tells whether the launcher had that done, ``leaving`` is the code with which the
    member has said before that it ends, or 0.
    """
    code = processes.shell_code(rank.code or 0)
    if rank.broken:
        return f"was killed, as its wrapper could not be believed: {rank.broken}", code
    if rank.lost:
        return "was killed together with its wrapper, or its host cannot be reached", code
    if killed and rank.code == -signal.SIGKILL:
        if leaving:
            how = f"was to end with code {leaving}, did not within {LEAVE:g} s, and was killed"
            return how, leaving
        return "was lost by the others, did not come forward, and was killed", code
    return processes.describe(rank.code or 0), code


def _ended_by(number: int) -> str:
    return f"the job was ended by {signal.Signals(number).name}"
