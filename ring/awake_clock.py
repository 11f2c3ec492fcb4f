"""A clock for the time that others are given: it counts none in which this process stood still.

A host that freezes, or a virtual machine that is suspended, stops the processes of a job together.
By any other clock those who were given two seconds to leave have then had them, and did not run.
"""

from __future__ import annotations

import time

LOOK = 0.2  # seconds between two looks at the clock, at most, while somebody's time runs out
SLACK = 0.1  # seconds by which a look may come later than it was to: a turn of a loop takes time


class AwakeClock:
    """Seconds in which this process ran, for a loop that looks at the clock in every turn.

    A look that comes later than ``sleep`` has said, by more than SLACK, was held up: what is more
    does not count. So a loop that sleeps by ``left`` counts LOOK and SLACK of a stall at most.
    """

    def __init__(self) -> None:
        self._looked = time.monotonic()
        self._asleep = 0.0  # seconds that the loop may take until it looks, besides SLACK
        self._stood = 0.0

    def now(self) -> float:
        """Return the seconds until now."""
        now = time.monotonic()
        self._stood += max(0.0, now - self._looked - self._asleep - SLACK)
        self._looked, self._asleep = now, 0.0
        return now - self._stood

    def sleep(self, seconds: float | None) -> None:
        """Note that this process waits next: for so many seconds at most, or for ever (None)."""
        self.now()
        self._asleep = float("inf") if seconds is None else seconds

    def left(self, at: float) -> float:
        """Return for how many seconds to sleep before ``at``, or until the next look."""
        return max(0.0, min(LOOK, at - self.now()))
