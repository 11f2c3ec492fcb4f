"""Ends a process in which something takes too long, and tells where it is, thread by thread.

``faulthandler.dump_traceback_later`` does so without the interpreter's lock: it reads frames of
threads that go on. One dump in forty of a busy program ended with SIGSEGV, in whatever function
that was, and told of no time-out.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

HELD = 15.0  # seconds more for a thread that keeps the lock: no other one goes on beside it


@contextmanager
def ended_after(seconds: float) -> Iterator[None]:
    """End this process with code 1, and tell all stacks, if the with-block takes longer."""

    def end() -> None:
        print(f"Timeout ({seconds:g} s)!", file=sys.__stderr__, flush=True)
        faulthandler.dump_traceback(sys.__stderr__)
        os._exit(1)

    timer = threading.Timer(seconds, end)
    timer.daemon = True
    timer.start()
    faulthandler.dump_traceback_later(seconds + HELD, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        timer.cancel()
        faulthandler.cancel_dump_traceback_later()
