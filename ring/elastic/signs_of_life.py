"""Which members of an elastic job are frozen, or gone with their hosts: asked while others wait."""

from __future__ import annotations

from collections.abc import Iterator

from ringlet.ring.elastic.membership import Membership
from ringlet.ring.launch.rank_table import Rank, RankTable
from ringlet.ring.wire.launch_link import Kind

SILENT = 2.5  # seconds at least until a host that is not heard is gone: kernels ask every second


class SignsOfLife:
    """Looks after members for whom others wait, and whom no other rank hears at that time.

    A late member's wrapper is asked whether its program runs: it is frozen where there is no answer
    within ``silence`` seconds (0: nobody is asked). A wrapper elsewhere whose host is not heard for
    so long is lost.
    """

    def __init__(self, membership: Membership, rank_table: RankTable, silence: float) -> None:
        self._membership, self._rank_table, self._silence = membership, rank_table, silence
        self._asked_at: dict[int, float] = {}  # when a late member's wrapper was asked about it
        self._doubted: list[Rank] = []  # ranks elsewhere for which others wait

    def look(self, now: float, listens: bool) -> Iterator[str]:
        """Ask about late members, and give up those that are silent: it is yielded which.

        Nobody is silent while the launcher does not listen, as nobody reads what it prints.
        """
        if not listens:
            self._asked_at = dict.fromkeys(self._asked_at, now)
        late = set(self._membership.late()) if self._silence else set()
        for number in self._asked_at.keys() - late:
            del self._asked_at[number]
        for number in late:
            if note := self._ask_after(number, now):
                yield note
        ranks = [self._rank_table.ranks[n] for n in late | set(self._membership.called())]
        self._doubted = [rank for rank in ranks if not rank.here and not rank.done]
        for rank in self._doubted:
            if self._unheard(rank) <= 0:
                self._rank_table.lose(rank)

    def patience(self, now: float) -> float | None:
        """Return the seconds until there is something to look at, None for ever."""
        times = [max(0.0, self._due(number) - now) for number in self._asked_at]
        times += [0.0 if r.done else max(0.05, self._unheard(r)) for r in self._doubted]
        return min(times, default=None)

    def _ask_after(self, number: int, now: float) -> str:
        """Ask for a sign of life; give up a member that has not answered, and say so."""
        rank = self._rank_table.ranks[number]
        if number in self._asked_at and now < self._due(number):
            return ""
        if number in self._asked_at and rank.heard < self._asked_at[number]:
            del self._asked_at[number]
            self._membership.silent(number, now)
            own = self._membership.members[number].rank
            name = f"process {number}" if own is None else f"rank {own}"
            return (
                f"{name} on {rank.host} keeps the others"
                f" waiting, and gave no sign of life for {self._silence:g} s"
            )
        self._asked_at[number] = now
        if rank.channel is not None:
            rank.channel.send(Kind.ALIVE)
        return ""

    def _due(self, number: int) -> float:
        """Return when to ask about a late member again, or to give it up."""
        asked, heard = self._asked_at[number], self._rank_table.ranks[number].heard
        return asked + self._silence if heard < asked else heard + self._silence / 2

    def _unheard(self, rank: Rank) -> float:
        """Return the seconds until a rank for which others wait is gone with its host."""
        silence = rank.channel.silence() if rank.channel is not None else 0.0
        return max(self._silence, SILENT) - silence
