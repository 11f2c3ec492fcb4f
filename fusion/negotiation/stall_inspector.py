"""The stall inspector: which tensors wait for which ranks, when they have waited for long."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ringlet.fusion.negotiation.validation import named_ranks

_LISTED = 6
_CAUSES = 2  # of the lines listed, those that an error repeats
_FOR_EVER = "Nothing ends such a wait; RINGLET_STALL_SHUTDOWN_TIME_SECONDS=300 would, after 300 s."


class Stalled(NamedTuple):
    """What waits, in words: ``ready`` ranks have asked for it, ``missing`` ones have not.

    ``turn`` differs from one time to the next, where the same is asked for again and again.
    """

    what: str
    ready: Sequence[int]
    missing: Sequence[int]
    turn: int = 0


@dataclass
class StallInspector:
    """Keeps the time at which a wait was first seen; part of the coordinator.

    ``warn_after`` and ``give_up_after`` are in seconds; 0 stands for never. Where it is asked
    ``every`` so many seconds, time in which it was not does not count: this process stood still.
    """

    warn_after: float = 60.0
    give_up_after: float = 0.0
    clock: Callable[[], float] = time.monotonic
    every: float = 0.0
    _asked: float = field(default=0.0, init=False)  # by the clock, last
    _stood: float = field(default=0.0, init=False)  # seconds that do not count
    _since: dict[tuple[str, int], float] = field(default_factory=dict)
    _warned: dict[tuple[str, int], float] = field(default_factory=dict)
    _text: str = ""

    def cause(self) -> str:
        """Return the first lines of what was last told: for an error, which has less room."""
        lines = self._text.splitlines()
        return " ".join(line.strip() for line in lines[: 1 + min(len(lines) - 1, _CAUSES)])

    def inspect(self, waiting: Iterable[Stalled]) -> tuple[str, bool]:
        """Return what to warn of (or nothing), and whether it is time to give up."""
        now = self._now()
        found = {(each.what, each.turn): each for each in waiting}
        self._since = {key: self._since.get(key, now) for key in found}
        self._warned = {key: at for key, at in self._warned.items() if key in found}
        ages = {key: now - since for key, since in self._since.items()}
        over = self.give_up_after > 0 and any(age >= self.give_up_after for age in ages.values())
        due = [
            key
            for key, age in ages.items()
            if (over and age >= self.give_up_after)
            or (self.warn_after > 0 and age >= self.warn_after
                and now - self._warned.get(key, -self.warn_after) >= self.warn_after)
        ]  # fmt: skip
        if not due:
            return "", over
        self._warned |= dict.fromkeys(due, now)
        # An operation that has just begun may be one of many under way at once.
        shortest = min(limit for limit in (self.warn_after, self.give_up_after) if limit > 0)
        long = [found[key] for key, age in ages.items() if age >= shortest]
        self._text = self._in_words([(found[key], ages[key]) for key in due], cycle(long))
        return self._text, over

    def _now(self) -> float:
        """Return the time, without that in which this process stood still."""
        now = self.clock()
        if self.every and self._asked:
            self._stood += max(0.0, now - self._asked - 2 * self.every)
        self._asked = now
        return now - self._stood

    def _in_words(
        self, stalled: Sequence[tuple[Stalled, float]], crossed: Sequence[tuple[int, Stalled]]
    ) -> str:
        late: dict[int, int] = {}
        for each, _ in stalled:
            for rank in each.missing:
                late[rank] = late.get(rank, 0) + 1
        lines = [
            f"  {each.what}: {age:.0f} s, ready on {named_ranks(each.ready)}, "
            f"waiting for {named_ranks(each.missing)}"
            for each, age in stalled[:_LISTED]
        ]
        if len(stalled) > _LISTED:
            lines.append(f"  and {len(stalled) - _LISTED} more")
        if not self.give_up_after:
            lines.append(f"  {_FOR_EVER}")
        latest = max(late, key=lambda rank: late[rank])
        least = min(age for _, age in stalled)
        waited = f"{len(stalled)} operation(s) have waited for ranks for {least:.3g} s or more"
        if crossed:
            turns = [*crossed[1:], crossed[0]]
            steps = [f"rank {crossed[0][0]} has asked for {crossed[0][1].what}"]
            steps += [f"not so rank {r}, which has asked for {each.what}" for r, each in turns[:-1]]
            circle = ", ".join(steps) + f", not so rank {crossed[0][0]}"
            head = (
                f"ranks run collectives in another order, or different ones: {circle}. Call the "
                f"same ones in one order on all ranks; {waited}:"
            )
        else:
            head = (
                f"{waited}; rank {latest} is missing in {late[latest]} of them. Either ranks ask "
                "for different things, or one is stuck or slow:"
            )
        return "\n".join([head, *lines])


def cycle(waiting: Iterable[Stalled]) -> list[tuple[int, Stalled]]:
    """Return ranks that wait for each other in a circle, each with what it waits in; or nothing.

    The rank in each pair has asked for what that in the next pair has not, and the last for what
    the first has not. Of the shortest circles it is the one with the lowest first rank.
    """
    edges: dict[int, dict[int, Stalled]] = {}
    for each in waiting:
        for rank in each.ready:
            for other in each.missing:
                edges.setdefault(rank, {}).setdefault(other, each)
    best: list[tuple[int, Stalled]] = []
    for start in sorted(edges):
        paths: dict[int, list[tuple[int, Stalled]]] = {start: []}
        queue = deque([start])
        while queue:
            rank = queue.popleft()
            for other, each in sorted(edges.get(rank, {}).items(), key=lambda item: item[0]):
                path = [*paths[rank], (rank, each)]
                if other == start and (not best or len(path) < len(best)):
                    best = path
                if other not in paths:
                    paths[other] = path
                    queue.append(other)
    return best
