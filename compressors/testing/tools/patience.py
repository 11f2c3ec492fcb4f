"""An end to what has none: a plugin that looks for a threshold, and never finds it."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class GivenUp(BaseException):
    """What took too long. Not an Exception: no plugin is meant to catch it, nor to shrink it."""

    def __str__(self) -> str:
        return "it does not come to an end"


@contextmanager
def given_up_after(seconds: float) -> Iterator[None]:
    """Raise GivenUp in this thread where the with-block takes longer, at its next line of Python.

    Signals would do as well, but they are the user's, and those of other tools.
    """
    thread, lock, ended = ctypes.c_ulong(threading.get_ident()), threading.Lock(), False

    def give_up() -> None:
        with lock:
            if not ended:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(GivenUp))

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        with lock:
            ended = True
        timer.cancel()
