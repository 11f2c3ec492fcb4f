"""The stall inspector: which tensors wait for which ranks, when they have waited for long."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ringlet.fusion.validation import named_ranks

_LISTED = 6


@dataclass
class StallInspector:
    """Keeps the time at which a wait was first seen; part of the coordinator.

    ``warn_after`` and ``give_up_after`` are in seconds; 0 stands for never.
    """

    warn_after: float = 60.0
    give_up_after: float = 0.0
    clock: Callable[[], float] = time.monotonic
    _since: dict[str, float] = field(default_factory=dict)
    _warned: dict[str, float] = field(default_factory=dict)

    def inspect(
        self, waiting: Mapping[str, tuple[Sequence[int], Sequence[int]]]
    ) -> tuple[str, bool]:
        """Return what to warn of (or nothing), and whether it is time to give up.

        ``waiting`` maps what waits to the ranks that are ready, and those it waits for.
        """
        now = self.clock()
        self._since = {what: self._since.get(what, now) for what in waiting}
        self._warned = {what: at for what, at in self._warned.items() if what in waiting}
        ages = {what: now - since for what, since in self._since.items()}
        over = self.give_up_after > 0 and any(age >= self.give_up_after for age in ages.values())
        stalled = [
            what
            for what, age in ages.items()
            if self.warn_after > 0 and age >= self.warn_after
            and (over or now - self._warned.get(what, -self.warn_after) >= self.warn_after)
        ]  # fmt: skip
        if not stalled:
            return "", over
        self._warned |= dict.fromkeys(stalled, now)
        return self._in_words(stalled, ages, waiting), over

    def _in_words(
        self,
        stalled: Sequence[str],
        ages: Mapping[str, float],
        waiting: Mapping[str, tuple[Sequence[int], Sequence[int]]],
    ) -> str:
        late: dict[int, int] = {}
        for what in stalled:
            for rank in waiting[what][1]:
                late[rank] = late.get(rank, 0) + 1
        lines = [
            f"  {what}: {ages[what]:.0f} s, ready on {named_ranks(waiting[what][0])}, "
            f"waiting for {named_ranks(waiting[what][1])}"
            for what in stalled[:_LISTED]
        ]
        if len(stalled) > _LISTED:
            lines.append(f"  and {len(stalled) - _LISTED} more")
        latest = max(late, key=lambda rank: late[rank])
        return "\n".join(
            [
                f"{len(stalled)} operation(s) have waited for ranks for {self.warn_after:.0f} s or "
                f"more; rank {latest} is missing in {late[latest]} of them. Either ranks ask for "
                "different things, or one is stuck or slow:",
                *lines,
            ]
        )
