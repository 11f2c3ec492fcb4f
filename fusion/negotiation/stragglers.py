"""Which rank the others keep waiting for, and how long: seen from when ranks vote for buckets."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

_BUCKETS = 20  # fewer say little
_SHARE = 0.8  # of the buckets for which a straggler is the last
_LAG_S = 0.01  # by which it is, on average


@dataclass
class Stragglers:
    """Part of the coordinator. ``every`` is in seconds; 0 stands for never."""

    every: float = 60.0
    clock: Callable[[], float] = time.monotonic
    _latest: dict[Hashable, float] = field(default_factory=dict)  # vote so far, by bucket
    _last: dict[int, int] = field(default_factory=dict)  # how often, by rank
    _lags: dict[int, float] = field(default_factory=dict)  # behind the rank before it, summed
    _since: float | None = None

    def voted(self, bucket: Hashable, rank: int, complete: bool) -> None:
        """Note a vote; ``complete`` if it was the last one for ``bucket``."""
        now = self.clock()
        if self._since is None:
            self._since = now
        before = self._latest.get(bucket, now)
        if not complete:
            self._latest[bucket] = now
            return
        self._latest.pop(bucket, None)
        self._last[rank] = self._last.get(rank, 0) + 1
        self._lags[rank] = self._lags.get(rank, 0.0) + now - before

    def forget(self) -> None:
        """Forget votes for buckets that will not be complete."""
        self._latest.clear()

    def report(self) -> str:
        """Return what to warn of, if it is time and there is something."""
        now, total = self.clock(), sum(self._last.values())
        if not self.every or self._since is None or now - self._since < self.every:
            return ""
        seconds, self._since = now - self._since, now
        last, self._last = self._last, {}
        lags, self._lags = self._lags, {}
        if total < _BUCKETS:
            return ""
        rank = max(last, key=lambda rank: last[rank])
        lag = lags[rank] / last[rank]
        if last[rank] < _SHARE * total or lag < _LAG_S:
            return ""
        return (
            f"the others wait for rank {rank}: in the last {seconds:.0f} s it was the last to be "
            f"ready for {last[rank]} of {total} buckets, {1e3 * lag:.0f} ms after the rank before "
            "it on average. Its host may be slow or busy, or its share of the data larger"
        )
