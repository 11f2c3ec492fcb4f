"""Python's garbage collector, which is in the way while modules are imported."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Collect no garbage meanwhile: imports leave none, and each look walks all of torch's objects.

    That is two fifths of the time in which ``ringlet.torch`` is imported, behind torch.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()
