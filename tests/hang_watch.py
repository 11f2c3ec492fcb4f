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
from typing import TextIO

LOOK = 0.1  # seconds between two looks, which are counted: while nothing here runs, there is none
HELD = 15.0  # seconds more for a thread that keeps the lock: no other one goes on beside it


@contextmanager
def ended_after(seconds: float, said: TextIO | None = None) -> Iterator[None]:
    """End this process with code 1 if the with-block takes longer.

    Then ``said``, or the standard error, tells all stacks.
    """
    file, over = said or sys.__stderr__, threading.Event()

    def watch() -> None:
        for _ in range(round(seconds / LOOK)):
            if over.wait(LOOK):
                return
        print(f"Timeout ({seconds:g} s)!", file=file, flush=True)
        faulthandler.dump_traceback(file)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
    faulthandler.dump_traceback_later(seconds + HELD, exit=True, file=file)
    try:
        yield
    finally:
        over.set()
        faulthandler.cancel_dump_traceback_later()
