"""Ranks of which nothing is heard once others have ended, as their wrappers are stopped."""

from __future__ import annotations

from ringlet.ring.launch.rank_table import Rank, RankTable
from ringlet.ring.processes.output import HIGH, Printer
from ringlet.ring.wire.launch_link import Kind


class Unanswered:
    """Names each rank whose wrapper does not answer once others have ended well.

    No other rank misses it, and the job waits for it. Its wrapper is asked whether the program
    runs, which it may do for long, and has ``silence`` seconds to answer (0: nobody is asked).
    Times are monotonic seconds.
    """

    def __init__(self, rank_table: RankTable, printer: Printer, silence: float) -> None:
        self._rank_table, self._printer, self._silence = rank_table, printer, silence
        self._asked: dict[int, float] = {}  # when a rank's wrapper was asked
        self._named: set[int] = set()

    def look(self, now: float) -> None:
        """Ask those that are left, and name those that have not answered in time."""
        left = self._left()
        self._asked = {rank.number: self._asked.get(rank.number, 0.0) for rank in left}
        for rank in left:
            asked = self._asked[rank.number]
            if asked and self._printer.pending >= HIGH:
                self._asked[rank.number] = now  # nobody reads, so nobody is heard
            elif now < self._due(rank):
                continue
            elif asked and rank.heard < asked:
                self._named.add(rank.number)
                self._printer.note(
                    f"rank {rank.number} on {rank.host} has given no sign of life for"
                    f" {self._silence:g} s, while other ranks have ended: it, or the process"
                    " around it, is stopped or cut off, and the job waits for it"
                )
            elif rank.channel is not None:
                self._asked[rank.number] = now
                rank.channel.send(Kind.ALIVE)

    def patience(self, now: float) -> float | None:
        """Return the seconds until there is something to look at, None for ever."""
        return min((max(0.01, self._due(rank) - now) for rank in self._left()), default=None)

    def _left(self) -> list[Rank]:
        """Return those that may be asked, where others have ended and none has failed."""
        ranks = self._rank_table.ranks
        if not self._silence or any(r.code for r in ranks) or not any(r.code == 0 for r in ranks):
            return []
        there = [rank for rank in ranks if rank.code is None and not rank.done and rank.channel]
        return [rank for rank in there if rank.number not in self._named]

    def _due(self, rank: Rank) -> float:
        """Return when to ask about a rank again, or to name it."""
        asked = self._asked.get(rank.number, 0.0)
        if not asked:
            return 0.0
        return asked + self._silence if rank.heard < asked else rank.heard + self._silence / 2
