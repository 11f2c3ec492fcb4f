"""The ranks of a job as the launcher sees them: what they say, and what they are told."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringlet.ring.awake_clock import AwakeClock
from ringlet.ring.errors import LOST_PEER, ProtocolError
from ringlet.ring.processes import processes
from ringlet.ring.processes.output import HIGH, STDERR, STDOUT, Printer
from ringlet.ring.processes.pmi import Pmi
from ringlet.ring.wire.kv_store import KvStore
from ringlet.ring.wire.launch_link import Channel, Kind
from ringlet.ring.wire.listener import Guest

CAUSE = 5.0  # seconds that an effect waits for its cause
LEAVING = 60.0  # and for one that is known to be on its way out
LONGEST = 3600.0  # seconds of one wait: some say "never" with more than poll takes, 24 days


@dataclass
class Rank:
    """What the launcher knows of one rank; ``here`` tells whether it runs on this host."""

    number: int
    host: str = ""
    here: bool = True
    channel: Channel | None = None
    group: int | None = None
    code: int | None = None  # minus the signal that ended it
    when: int = 0  # monotonic time of its end, ns
    lost: bool = False  # its wrapper went away without a word
    broken: str = ""  # or was sent away, as what came from it could not be believed: why
    aborted: bool = False  # it has called MPI_Abort
    done: bool = False
    heard: float = 0.0  # when its wrapper said last that its program runs, by the table's clock


class RankTable:
    """All ``ranks`` of a job. ``job`` gives what a rank's wrapper is to run, as a JSON object.

    ``pmi`` answers what MPI asks, where it is not another process manager that does. ``place`` is
    what ranks begin with; None: what rank 0's wrapper says. ``clock`` is that of the loop around.
    """

    def __init__(
        self,
        ranks: Sequence[Rank],
        printer: Printer,
        job: Callable[[int], Mapping[str, Any]],
        pmi: Pmi | None = None,
        place: bytes | None = None,
        clock: AwakeClock | None = None,
    ) -> None:
        self.ranks = list(ranks)
        self._printer = printer
        self._job = job
        self._pmi = pmi
        self._place = place
        self.clock = clock or AwakeClock()
        self._failed: float | None = None  # since when it is known that a rank has

    @property
    def done(self) -> bool:
        """Whether nothing is left of any rank."""
        return all(rank.done for rank in self.ranks)

    def missing(self) -> list[int]:
        """Return the ranks whose wrappers have not reported and are still expected to."""
        return [rank.number for rank in self.ranks if not rank.channel and not rank.done]

    def channels(self) -> list[Channel]:
        """Return the connections on which something may still come."""
        return [rank.channel for rank in self.ranks if rank.channel and not rank.done]

    def first_failed(self, leaves: Callable[[Rank], bool]) -> Rank | None:
        """Return the rank that failed first, if one has, cause before effect.

        A rank that ended because it lost another one may be quicker to end than that one: for
        some seconds it is not named while others still run, and longer while one of them ``leaves``
        for another reason.
        """
        failed = [rank for rank in self.ranks if rank.code]
        first = min(failed, key=lambda r: (r.code == LOST_PEER, r.when), default=None)
        running = [rank for rank in self.ranks if rank.code is None]
        if first is None or first.code != LOST_PEER or not running:
            return first
        now = self.clock.now()
        if self._failed is None:
            self._failed = now
        patience = LEAVING if any(map(leaves, running)) else CAUSE
        return first if now - self._failed > patience else None

    def engage(self, guest: Guest) -> bool:
        """Have a wrapper that has just reported run its rank; false if it is not wanted."""
        rank = self.ranks[guest.rank]
        if rank.channel or rank.done:
            guest.channel.close()
            return False
        rank.channel = guest.channel
        job = json.dumps(self._job(guest.rank)).encode()
        guest.channel.send(Kind.JOB, job)
        if self._place is not None:
            guest.channel.send(Kind.BEGIN, self._place)
        return True

    def wait(self, sources: Iterable[int], store: KvStore, seconds: float | None) -> set[int]:
        """Return the descriptors that are ready, once one is, or in so many ``seconds``.

        They are of ``sources``, of ranks, of who uses ``store``, and of what is printed to.
        """
        poll = select.poll()  # which takes descriptors above 1023, too
        for source in sources:
            poll.register(source, select.POLLIN)
        # While too much waits to be printed, the ranks have to wait as well.
        reading = select.POLLIN if self._printer.pending < HIGH else 0
        for channel in self.channels():
            poll.register(channel, reading | (select.POLLOUT if channel.pending else 0))
        for channel in store.channels():
            poll.register(channel, select.POLLIN | (select.POLLOUT if channel.pending else 0))
        if (output := self._printer.wants) is not None:
            poll.register(output, select.POLLOUT)
        timeout = None if seconds is None else 1000 * min(seconds, LONGEST)
        self.clock.sleep(seconds)
        return {descriptor for descriptor, _ in poll.poll(timeout)}

    def serve(self, ready: set[int]) -> None:
        """Take what the ranks whose connections are ``ready`` have sent."""
        for rank in self.ranks:
            if rank.channel and not rank.done and rank.channel.fileno() in ready:
                rank.channel.flush()
                try:
                    for kind, body in rank.channel.receive():
                        self._take(rank, kind, body)
                except (ProtocolError, ValueError) as error:
                    rank.broken = str(error)
                    self.lose(rank)
                if rank.channel.closed and not rank.done:
                    self.lose(rank)

    def _take(self, rank: Rank, kind: Kind, body: bytes) -> None:
        if kind is Kind.STDOUT:
            self._printer.feed(rank.number, STDOUT, body)
        elif kind is Kind.STDERR:
            self._printer.feed(rank.number, STDERR, body)
        elif kind is Kind.PLACE and rank.number == 0 and self._place is None:
            self._place = body
            for channel in self.channels():
                channel.send(Kind.BEGIN, body)
        elif kind is Kind.PMI and self._pmi is not None:
            replies = self._pmi.take(rank.number, body)
            for number, line in replies:
                other = self.ranks[number].channel
                if other is not None and not other.closed:
                    other.send(Kind.PMI, line)
        elif kind is Kind.STARTED:
            rank.group = int(body)
        elif kind is Kind.ENDED:
            code, when, now = map(int, body.split())
            # Another host's clock counts from another moment.
            skew = 0 if rank.here else time.monotonic_ns() - now
            rank.code, rank.when = code, when + skew
            if self._pmi is not None and rank.number in self._pmi.aborted:
                rank.code, rank.aborted = self._pmi.aborted[rank.number], True
        elif kind is Kind.ALIVE:
            rank.heard = self.clock.now()
        elif kind is Kind.DONE:
            self._finish(rank)
        else:
            raise ProtocolError(f"a wrapper does not send {kind.name}")

    def _finish(self, rank: Rank) -> None:
        rank.done = True
        for stream in (STDOUT, STDERR):
            self._printer.finish(rank.number, stream)

    def lose(self, rank: Rank) -> None:
        """Count ``rank`` as killed: without its wrapper the kernel ends the program."""
        if rank.group is not None and rank.here:
            processes.signal_group(rank.group, signal.SIGKILL)  # and what the program had started
        if rank.code is None:
            rank.code, rank.when, rank.lost = -signal.SIGKILL, time.monotonic_ns(), True
        if rank.channel:
            rank.channel.close()
        self._finish(rank)

    def signal(self, number: int, spared: Rank | None = None) -> None:
        """Pass signal ``number`` on to every rank's process group, except the one ``spared``."""
        for rank in self.ranks:
            if rank.channel and not rank.done and rank is not spared:
                rank.channel.send(Kind.SIGNAL, b"%d" % number)

    def give_up_missing(self) -> None:
        """Expect no more wrappers: those that report from now on are sent away."""
        for rank in self.ranks:
            rank.done = rank.done or rank.channel is None

    def give_up(self) -> None:
        """Count every rank that is not done as lost."""
        for rank in self.ranks:
            if not rank.done:
                self.lose(rank)

    def release(self) -> None:
        """Let every wrapper go; one whose rank is not done kills it."""
        for rank in self.ranks:
            if rank.channel and not rank.channel.closed:
                with contextlib.suppress(OSError):
                    if rank.done:
                        rank.channel.send(Kind.RELEASE)
                    rank.channel.close()
