"""Another time of day: what goes by the clock is not the same twice."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ringlet.compressors.testing.tools.replaced import replaced

# Not monotonic, by which other threads' time-outs go.
_CLOCKS = {"time": 1, "time_ns": 10**9, "perf_counter": 1, "perf_counter_ns": 10**9}


@contextmanager
def later(seconds: int) -> Iterator[None]:
    """Let the clocks of ``time`` be so many seconds ahead until the with-block ends.

    For one thread at a time. Who imported a clock by its own name keeps the usual one.
    """
    ahead = {n: _ahead(getattr(time, n), seconds * ticks) for n, ticks in _CLOCKS.items()}
    with replaced(time, **ahead):
        yield


def _ahead(clock: Callable[[], float], by: int) -> Callable[[], float]:
    return lambda: clock() + by


@contextmanager
def abroad(hours: int) -> Iterator[None]:
    """Let it be so many hours later than in Greenwich until the with-block ends."""
    before = os.environ.get("TZ")
    try:
        os.environ["TZ"] = f"KIT-{hours}"  # to whoever wrote the standard, east is negative
        time.tzset()
        yield
    finally:
        if before is None:
            del os.environ["TZ"]
        else:
            os.environ["TZ"] = before
        time.tzset()
