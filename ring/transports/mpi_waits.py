"""Waits for MPI at rest: its own calls that wait turn in circles, each on a core of its own."""

from __future__ import annotations

import os
import time
from typing import Any

_LOOKS = 16  # in a row: each lets MPI move a little of what has arrived
_PATIENCE = 5e-4  # seconds until the first rest, in which others that want the core get it
_SHARE = 8  # it rests for this part of the time that it has waited: so much later it may notice
_LONGEST = 2e-3  # seconds of a rest
_AWAKE = 4  # then it looks for this part of the rest, or what arrives would pile up


def wait_at_rest(request: Any) -> None:
    """Wait until ``request`` is complete. What interrupts the wait is raised after that."""
    try:
        _wait(request)
    except BaseException:
        request.Wait()  # or MPI would write to memory that is another's by then
        raise


def _wait(request: Any) -> None:
    done, clock = request.Test, time.perf_counter
    begun = until = clock()
    while True:
        for _ in range(_LOOKS):
            if done():
                return
        now = clock()
        if now < until:
            continue
        waited = now - begun
        if waited < _PATIENCE:
            os.sched_yield()
        else:
            rest = min(waited / _SHARE, _LONGEST)
            time.sleep(rest)
            until = clock() + rest / _AWAKE
