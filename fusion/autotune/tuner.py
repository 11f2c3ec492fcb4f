"""The autotuner, on rank 0: measures, searches, announces, and in the end leaves things be."""

from __future__ import annotations

import logging
import queue
import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

from ringlet.fusion.autotune.sample_log import Log
from ringlet.fusion.autotune.search import BayesianSearch, Search
from ringlet.fusion.autotune.space import BOUNDS, from_unit, to_unit
from ringlet.fusion.autotune.tuned_limits import names
from ringlet.fusion.limits import Limits
from ringlet.fusion.recording.events import BucketDone, Quiet

log = logging.getLogger("ringlet")

WINDOWS = 5  # stretches whose median is a setting's score
_Key = tuple[str, str]  # an owner of buckets, and a name of one
_SETTLING = 6  # steps until a new setting is in effect everywhere
_SHORTEST = 0.02  # seconds of a window: shorter ones measure the clock


class Autotuner(Quiet):
    """An observer that scores settings by reduced bytes (uncompressed) per second.

    One search goes through all that ``limits.autotune`` names, numbers and switches alike.
    ``apply(setting)`` brings a setting into effect on all ranks; it is called on the thread of
    the search, which thinks while training goes on. A step is the time between two reductions of
    the same tensor.
    """

    def __init__(
        self,
        limits: Limits,
        apply: Callable[[dict[str, Any]], None],
        finished: Callable[[], None] = lambda: None,
        search: Search | None = None,
    ) -> None:
        self._tuned = names(limits.autotune)
        self._limits, self._apply, self._finished = limits, apply, finished
        self._search = search or BayesianSearch(self._tuned, limits.seed)
        self._setting: dict[str, Any] = {name: getattr(limits, name) for name in BOUNDS}
        self.tried: list[tuple[dict[str, Any], float]] = []
        self.frozen = False
        self._log = Log(limits.autotune_log)
        self._measuring = True
        self._windows: list[float] = []
        self._warming = limits.autotune_warmup
        self._settle(_SETTLING)
        self._scored: queue.SimpleQueue[float | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._think, name="ringlet-autotune", daemon=True)
        self._thread.start()

    # -- on the engine's thread -----------------------------------------------------------------

    def bucket_done(self, event: BucketDone) -> None:
        """Count a bucket, and note the ends of steps and windows."""
        if not self._measuring:
            return
        self._bytes += sum(member.nbytes for member in event.bucket.members)
        # Names from a counter never return: one of them stands for all of their operation.
        key = event.owner, event.bucket.members[0].name.partition(".noname.")[0]
        seen = self._seen[key] = self._seen.get(key, 0) + 1
        if self._settling:
            if seen >= self._settling:
                self._settle(0, key)
        elif self._ends(key, seen):
            elapsed = time.perf_counter() - self._began
            if elapsed >= _SHORTEST:
                self._window_done(self._bytes / elapsed, key)

    def _ends(self, key: _Key, seen: int) -> bool:
        """Whether a window may end: behind the bucket that it began behind, with whole steps."""
        steps = self._limits.autotune_steps
        if key == self._opened:
            return seen >= steps
        return seen >= 2 * steps and self._opened not in self._seen  # which comes no more

    def restart(self) -> None:
        """Measure anew: a setting has just been announced."""
        self._settle(_SETTLING)
        self._windows.clear()
        self._measuring = True

    def close(self) -> None:
        """End the search. Idempotent."""
        self._scored.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    def _settle(self, steps: int, opened: _Key | None = None) -> None:
        self._settling, self._opened = steps, opened
        self._seen: dict[_Key, int] = {}
        self._bytes = 0
        self._began = time.perf_counter()

    def _window_done(self, score: float, key: _Key) -> None:
        self._settle(0, key)
        if self._warming:
            self._warming -= 1
            return
        self._windows.append(score)
        if len(self._windows) == WINDOWS:
            self._measuring = False
            self._scored.put(statistics.median(self._windows))

    # -- on the search's thread -----------------------------------------------------------------

    def _think(self) -> None:
        try:
            while not self.frozen and (score := self._scored.get()) is not None:
                self._learn(score)
        except Exception:
            log.warning("autotuning has failed and ends", exc_info=True)
            self._go_back()
        finally:
            self._log.close()
            self._finished()

    def _go_back(self) -> None:
        """Leave the engine with the best that was tried, not with what is being tried."""
        if self.tried:
            best, _ = max(self.tried, key=lambda pair: pair[1])
            self._apply({name: best[name] for name in self._tuned})

    def _learn(self, score: float) -> None:
        self.tried.append((self._setting, score))
        self._log.write(len(self.tried), self._setting, score)
        self._search.tell(to_unit(self._setting, self._tuned), score)
        if len(self.tried) >= self._limits.autotune_samples:
            best, most = max(self.tried, key=lambda pair: pair[1])
            self._setting, self.frozen = best, True
            self._log.write(0, best, most)
            log.info("autotune: settled on %s, %.0f bytes/s", best, most)
        else:
            self._setting = self._setting | from_unit(self._search.ask())
        self._apply({name: self._setting[name] for name in self._tuned})
