"""Locks that callers hold for moments, and the engine's thread takes as well."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol


class Lock(Protocol):
    """One that a thread may hold several times: ``threading.RLock``, or a condition of one."""

    def acquire(self) -> Any:
        """Wait for it."""

    def release(self) -> None:
        """Let go of it once. Raises RuntimeError where this thread does not hold it."""


@contextmanager
def lent(locks: Iterable[Lock]) -> Iterator[None]:
    """Let other threads have those of ``locks`` in the block that this one holds.

    It holds some where a signal's handler, or a finaliser, runs in the midst of another call.
    """
    held: list[Lock] = []
    for lock in locks:
        with suppress(RuntimeError):
            while True:
                lock.release()
                held.append(lock)
    try:
        yield
    finally:
        for lock in reversed(held):
            lock.acquire()
