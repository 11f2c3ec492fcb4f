"""Jobs that tests start by ``ringlet run``, and the processes that are left of them."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ringlet.ring.launch import start

DEADLINE = 120.0  # seconds; generous, nothing waits for it when all is well
MARK = "RINGLET_TEST_MARK"  # a variable that processes of a test carry
RINGLET = [sys.executable, "-m", "ringlet", "run"]
PYTHON = [sys.executable, "-I", "-S", "-c"]

HAS_MPI = importlib.util.find_spec("mpi4py") is not None and start.mpiexec() is not None
HAS_TORCH = importlib.util.find_spec("torch") is not None
NEEDS = {
    "mpi": [pytest.mark.mpi, pytest.mark.skipif(not HAS_MPI, reason="needs mpi4py and mpiexec")],
    "gloo": [pytest.mark.skipif(not HAS_TORCH, reason="needs torch")],
}
both = pytest.mark.parametrize(
    "transport", [pytest.param(name, marks=marks) for name, marks in NEEDS.items()]
)
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="needs torch")


def until(condition: Callable[[], Any]) -> Any:
    """Wait for ``condition`` to hold; fail after the deadline."""
    limit = time.monotonic() + DEADLINE
    while not (value := condition()):
        assert time.monotonic() < limit, "the deadline has passed"
        time.sleep(0.01)
    return value


def marked(mark: str) -> dict[int, str]:
    """Return command lines by id of the living processes that were started under ``mark``."""
    found = {}
    wanted = f"{MARK}={mark}".encode()
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if entry.name.isdecimal() and wanted in (entry / "environ").read_bytes().split(b"\0"):
                found[int(entry.name)] = (entry / "cmdline").read_text().replace("\0", " ")
    return found  # a zombie has neither environment nor command line


class Running:
    """A launcher as a process of its own, and what it prints."""

    def __init__(self, command: list[str], mark: str, env: dict[str, str]) -> None:
        self.mark = mark
        self.output = b""
        self.process = subprocess.Popen(
            command,
            env=os.environ | {MARK: mark} | env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )

    def until(self, text: bytes, times: int = 1) -> None:
        """Read the standard output until ``text`` was there ``times`` times."""
        assert self.process.stdout is not None
        limit = time.monotonic() + DEADLINE
        while self.output.count(text) < times:
            assert select.select([self.process.stdout], [], [], limit - time.monotonic())[0]
            data = os.read(self.process.stdout.fileno(), 1 << 16)
            assert data, (self.output, self.process.communicate())
            self.output += data

    def end(self) -> tuple[int, bytes, bytes]:
        """Wait for the end and for everything it started; return code and output."""
        out, err = self.process.communicate(timeout=DEADLINE)
        until(lambda: not marked(self.mark))
        return self.process.returncode, self.output + out, err

    def pids(self, what: str) -> list[int]:
        """Return the ids of the job's processes whose command line holds ``what``."""
        return sorted(pid for pid, line in marked(self.mark).items() if what in line)


Launcher = Callable[..., Running]
