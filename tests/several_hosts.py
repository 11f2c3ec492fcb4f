"""What the tests of jobs over several hosts share: over which transports, and what is left."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
import time
from pathlib import Path

import pytest

from ringlet.ring.launch import start

DEADLINE = 120.0  # seconds; generous, nothing waits for it when all is well
MARK = "RINGLET_TEST_MARK"  # a variable that processes of a test carry
RINGLET = [sys.executable, "-m", "ringlet", "run"]

HAS_TORCH = importlib.util.find_spec("torch") is not None
HAS_MPI = importlib.util.find_spec("mpi4py") is not None and start.mpiexec() is not None
both = pytest.mark.parametrize(
    "transport",
    [
        pytest.param("gloo", marks=pytest.mark.skipif(not HAS_TORCH, reason="needs torch")),
        pytest.param(
            "mpi",
            marks=[
                pytest.mark.mpi,
                pytest.mark.skipif(not HAS_MPI, reason="needs mpi4py and mpiexec"),
            ],
        ),
    ],
)
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="needs torch")


def left(mark: str) -> list[int]:
    """Return the ids of the living processes that were started under ``mark``."""
    found = []
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
    return found


def gone(mark: str) -> bool:
    limit = time.monotonic() + DEADLINE
    while left(mark) and time.monotonic() < limit:
        time.sleep(0.02)
    return not left(mark)
