"""Fixtures of the tests of ring."""

from __future__ import annotations

import contextlib
import os
import signal
import uuid
from collections.abc import Iterator

import pytest
from several_hosts import left


@pytest.fixture
def mark() -> Iterator[str]:
    """A mark that started processes carry; afterwards none of them may be left."""
    name = uuid.uuid4().hex
    yield name
    for pid in left(name):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
