"""Fixtures of the tests of ring."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from launched_jobs import PYTHON, Launcher, Running, marked


@pytest.fixture
def mark() -> Iterator[str]:
    """A mark that started processes carry; afterwards none of them may be left."""
    name = uuid.uuid4().hex
    yield name
    for pid in marked(name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def ringlet(tmp_path: Path) -> Iterator[Launcher]:
    """Start ``ringlet run``; afterwards no process and no temporary file may be left."""
    started: list[Running] = []
    scratch = tmp_path / "scratch"
    scratch.mkdir()

    def begin(
        code: str, np: int = 2, transport: str = "gloo", *options: str, command: Any = PYTHON
    ) -> Running:
        arguments = ["-m", "ringlet", "run", "-np", str(np), "--transport", transport, *options]
        mark, env = uuid.uuid4().hex, {"TMPDIR": str(scratch)}
        started.append(Running([sys.executable, *arguments, *command, code], mark, env))
        return started[-1]

    yield begin
    for running in started:
        running.process.kill()
        running.process.communicate()
        for pid in marked(running.mark):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert not list(scratch.iterdir())
