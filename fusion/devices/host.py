"""Where tensors lie, and how work on them is put in order: here host memory.

Work on host memory is done when a call returns. A place whose work is only enqueued, such as a GPU
(``ringlet.fusion.devices.cuda``), is ``ordered`` by events instead.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any, ClassVar, Protocol

import numpy as np

from ringlet.compressors import Workspace
from ringlet.compressors.core.context import State
from ringlet.fusion.devices.fusion_buffers import BufferPool
from ringlet.ring.dtypes import Array
from ringlet.ring.errors import again
from ringlet.ring.pipeline import Steps

log = logging.getLogger("ringlet")


class Mark(Protocol):
    """The end of some work at an ordered place."""

    def collect(self) -> None:
        """Let what the caller enqueues from now on come after that work; does not wait."""

    def release(self) -> None:
        """Refer to its arrays no more: whoever reuses their memory has collected this."""


def collect(marks: Iterable[Mark], error: Exception | None) -> None:
    """Put what the caller enqueues from now on behind ``marks``; then raise ``error``, if any.

    It comes before what a device has to say that is lost as well.
    """
    try:
        for mark in marks:
            mark.collect()
    except Exception:
        if error is None:
            raise
        log.debug("cannot wait for an operation's work", exc_info=True)
    if error is not None:
        raise again(error)


class Place:
    """Host memory, and what the engine needs of any other memory.

    ``xp`` is the array module, ``pool`` holds fusion buffers and ``workspace`` scratch arrays. A
    pool's ``reserved`` bytes cost nothing until they are used only on the host.
    """

    name: ClassVar[str] = "host"
    ordered: ClassVar[bool] = False

    def __init__(self, xp: ModuleType = np, reserved: int = 0) -> None:
        self.xp = xp
        self.workspace = Workspace(xp)
        self.pool = BufferPool(reserved, self.allocate)

    def allocate(self, nbytes: int) -> Array:
        """Return new memory (uint8) with undefined contents; MemoryError where there is none."""
        buffer: Array = self.xp.empty(nbytes, np.uint8)
        return buffer

    def address(self, array: Array) -> int:
        """Return where the elements of ``array`` begin."""
        return int(array.__array_interface__["data"][0])

    def at_work(self) -> AbstractContextManager[object]:
        """Return a context in which work belongs here, behind all that was enqueued before."""
        return nullcontext()

    def steps(self, steps: Steps) -> Steps:
        """Return ``steps`` of an exchange, taken at work."""
        return steps

    def ready(self) -> Any:
        """Return what ``after`` needs to wait for the caller's work so far."""
        return None

    def after(self, ready: Iterable[Any]) -> None:
        """Let work begin behind what ``ready`` was returned for."""

    def done(self, arrays: Iterable[Array]) -> Mark | None:
        """Return the end of the work so far, which needs ``arrays``; None where it is over."""
        return None

    def bring(self, state: State) -> None:
        """Let the arrays that a compressor remembers lie here, wherever they were."""
        for key, value in state.items():
            if isinstance(value, dict):
                self.bring(value)
            elif hasattr(value, "__cuda_array_interface__"):
                state[key] = value.get()

    def to_host(self, array: Array) -> Array:
        """Return ``array`` in host memory, which may wait for the work so far."""
        return array

    def close(self) -> None:
        """Wait, for some seconds at most, until no work touches anybody's memory any more."""
