"""Waits for MPI at rest: its own calls that wait turn in circles, each on a core of its own."""

from __future__ import annotations

import os
import time
from typing import Any

_LOOKS = 128  # in a row: each lets MPI move some of what has arrived
_PATIENCE = 2e-4  # seconds until the first rest, in which others that want the core get it
_SHARE = 8  # it rests for this part of the time that it has waited: so much later it may notice
_LONGEST = 0.01  # seconds of a rest


def wait_at_rest(request: Any) -> None:
    """Wait until ``request`` is complete. What interrupts the wait is raised after that."""
    try:
        _wait(request)
    except BaseException:
        request.Wait()  # or MPI would write to memory that is another's by then
        raise


def _wait(request: Any) -> None:
    done, begun = request.Test, time.perf_counter()
    while True:
        for _ in range(_LOOKS):
            if done():
                return
        waited = time.perf_counter() - begun
        if waited < _PATIENCE:
            os.sched_yield()
        else:
            time.sleep(min(waited / _SHARE, _LONGEST))
