"""Signals do within MPI what they did before.

MPICH's libraries take SIGHUP and SIGUSR1 for themselves where a program has not: a rank then
outlives the terminal that its job was started from.
"""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Iterator
from contextlib import contextmanager

# What launchers pass on, and batch systems send before a job's time is over.
_KEPT = (signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_ROOM = 1024  # bytes: more than any system's struct sigaction has


@contextmanager
def signals_kept() -> Iterator[None]:
    """Put back what signals do, at the end, on whichever thread: Python's module needs the main."""
    sigaction = ctypes.CDLL(None, use_errno=True).sigaction
    before = {number: ctypes.create_string_buffer(_ROOM) for number in _KEPT}
    for number, action in before.items():
        sigaction(int(number), None, action)
    try:
        yield
    finally:
        for number, action in before.items():
            sigaction(int(number), action, None)
