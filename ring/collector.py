"""Python's garbage collector, in the way while modules are imported and kernels are compiled."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Collect no garbage meanwhile: each look walks all of torch's objects.

    That is two fifths of the time in which ``ringlet.torch`` is imported, behind torch, and a fifth
    of the time in which kernels are compiled.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
