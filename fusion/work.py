"""A submission in flight, and the handle that its caller waits on."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ringlet.compressors import Compressor, NoCompression
from ringlet.compressors.context import State
from ringlet.fusion.request import Request
from ringlet.ring.dtypes import Array


class Handle:
    """The outcome of an operation that is under way."""

    def __init__(self, name: str, hurry: Callable[[], None]) -> None:
        self.name = name
        self.output: Any = np.empty(0)
        self.sizes: tuple[int, ...] = ()
        self._hurry = hurry
        self._finished = threading.Event()
        self._error: Exception | None = None

    def done(self) -> bool:
        """Whether the operation has finished, well or badly."""
        return self._finished.is_set()

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the operation and return its output: a flat array, or the declared group.

        Raises what went wrong, the same on every rank, or TimeoutError after ``timeout`` seconds.
        """
        if not self._finished.is_set():
            self._hurry()
            if not self._finished.wait(timeout):
                raise TimeoutError(f"{self.name!r} has not finished within {timeout} s")
        if self._error is not None:
            raise self._error
        return self.output

    def finish(self, error: Exception | None = None) -> None:
        """Let the waiting caller go on, or raise."""
        self._error = error
        self._finished.set()


@dataclass(eq=False)
class Work:
    """One submission: what was asked for, the flat arrays, and whom to tell."""

    request: Request
    handle: Handle
    input: Array
    output: Array
    compressor: Compressor = field(default_factory=NoCompression)
    state: State = field(default_factory=dict)
