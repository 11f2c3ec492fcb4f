"""Another time of day, and a slower machine: what goes by the clock is not the same twice."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

from ringlet.compressors.testing.tools.plugin_code import is_library
from ringlet.compressors.testing.tools.replaced import replaced

# Of the day. Not monotonic, by which time-outs go.
_CLOCKS = {"time": 1, "time_ns": 10**9, "perf_counter": 1, "perf_counter_ns": 10**9}
_TIMERS = "monotonic", "process_time", "thread_time"


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
def slowly(seconds: int) -> Iterator[None]:
    """Let so many seconds pass between two looks at a clock, until the with-block ends.

    For plugins alone: Ringlet and Python's own modules see the usual clocks. Who imported a clock
    by its own name does, too.
    """
    names = [*_CLOCKS, *(f"{n}{ns}" for n in _TIMERS for ns in ("", "_ns"))]
    ticks = {name: 10**9 if name.endswith("_ns") else 1 for name in names}
    slow = {n: _slow(getattr(time, n), seconds * ticks[n]) for n in names}
    with replaced(time, **slow):
        yield


def _slow(clock: Callable[[], float], by: int) -> Callable[[], float]:
    looks = count(1)

    def look() -> float:
        theirs = not is_library(str(sys._getframe(1).f_globals.get("__name__")))
        return clock() + by * next(looks) if theirs else clock()

    return look


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
