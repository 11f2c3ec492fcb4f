"""The stall inspector: which tensors wait for which ranks, when they have waited for long."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ringlet.fusion.validation import named_ranks

_LISTED = 6


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

    ``warn_after`` and ``give_up_after`` are in seconds; 0 stands for never.
    """

    warn_after: float = 60.0
    give_up_after: float = 0.0
    clock: Callable[[], float] = time.monotonic
    _since: dict[tuple[str, int], float] = field(default_factory=dict)
    _warned: dict[tuple[str, int], float] = field(default_factory=dict)

    def inspect(self, waiting: Iterable[Stalled]) -> tuple[str, bool]:
        """Return what to warn of (or nothing), and whether it is time to give up."""
        now = self.clock()
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
        return self._in_words([(found[key], ages[key]) for key in due]), over

    def _in_words(self, stalled: Sequence[tuple[Stalled, float]]) -> str:
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
        latest = max(late, key=lambda rank: late[rank])
        least = min(age for _, age in stalled)
        return "\n".join(
            [
                f"{len(stalled)} operation(s) have waited for ranks for {least:.3g} s or more; "
                f"rank {latest} is missing in {late[latest]} of them. Either ranks ask for "
                "different things, or one is stuck or slow:",
                *lines,
            ]
        )
