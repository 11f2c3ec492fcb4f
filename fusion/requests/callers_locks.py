"""What callers hold or do for moments, where a signal's handler may interrupt them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
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


def uninterrupted(call: Callable[[bytes], None], message: bytes) -> None:
    """Make ``call(message)``, in the midst of which no signal's handler runs.

    One that raises would cut the message off; one that waits for the engine's end, which sends
    messages too, would wait for this one. Handlers run on the main thread: another one calls there.
    """
    if threading.current_thread() is not threading.main_thread():
        return call(message)
    failed: list[BaseException] = []

    def run() -> None:
        try:
            call(message)
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="ringlet-message", daemon=True)
    try:
        thread.start()
    except RuntimeError:  # the interpreter is about to end, or there may be no more threads
        return call(message)
    thread.join()
    if failed:
        raise failed[0]
    return None
