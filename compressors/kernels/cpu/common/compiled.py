"""Numba's njit, whose cached functions one process of a machine compiles, and the others load."""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Callable, Iterator
from typing import Any

import numba
from numba.core.compiler_lock import global_compiler_lock

PATIENCE = 60.0  # seconds that another process may take for one function
PAUSE = 0.001, 0.02  # seconds between two looks whether it is done: at first, and at most


def njit(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Return Numba's decorator; with ``cache`` ranks of a host do not compile the same function.

    They would all do so when they start for the first time, as none finds it on disk. So whoever
    compiles holds a lock beside what Numba keeps there, and the others wait, and find it.
    """

    def decorated(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(**options)(function)
        if options.get("cache"):
            compiled = dispatcher.compile

            def compile_once(signature: Any) -> Any:
                # This process's own lock first: its threads take both in one order.
                with global_compiler_lock, _alone(dispatcher):
                    return compiled(signature)

            dispatcher.compile = compile_once
        return dispatcher

    return decorated


@contextlib.contextmanager
def _alone(dispatcher: Any) -> Iterator[None]:
    """Hold the lock of a function, if that is possible, and is so in time."""
    name = f"{dispatcher.py_func.__module__}.{dispatcher.py_func.__qualname__}.lock"
    descriptor = None
    with contextlib.suppress(OSError):
        folder = dispatcher.stats.cache_path
        os.makedirs(folder, exist_ok=True)
        path = os.path.join(folder, name.replace("<", "").replace(">", ""))
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        limit, pause = time.monotonic() + PATIENCE, PAUSE[0]
        while descriptor is not None and not _locked(descriptor) and time.monotonic() < limit:
            time.sleep(pause)
            pause = min(2 * pause, PAUSE[1])
        yield
    finally:
        if descriptor is not None:
            with contextlib.suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_UN)  # a forked child may have it open as well
            os.close(descriptor)


def _locked(descriptor: int) -> bool:
    """Take the lock if it is free; true, too, where there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
