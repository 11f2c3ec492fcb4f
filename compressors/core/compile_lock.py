"""One process of a machine compiles kernels while the others wait, which then find them on disk."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PATIENCE_S = 300.0  # for whoever was first, which may have been stopped


@contextmanager
def compile_lock(what: str = "kernels", patience: float = PATIENCE_S) -> Iterator[bool]:
    """Enter at once if nobody is inside, else when the first is out again, with all that waited.

    Yields whether this one was first. ``what`` is part of a file's name, and belongs to the user
    who runs this. Processes and threads count alike. Waits ``patience`` seconds at most.
    """
    path = Path(tempfile.gettempdir()) / f"ringlet-{what}-{os.getuid()}.lock"
    descriptor = -1
    with suppress(OSError):  # where there is no place for a lock, everybody is first
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid() or not stat.S_ISREG(found.st_mode):
            os.close(descriptor)  # somebody else's, who could hold it for ever
            descriptor = -1
    if descriptor < 0:
        yield True
        return
    try:
        first = _locked(descriptor, fcntl.LOCK_EX)
        if not first:
            end = time.monotonic() + patience
            while not _locked(descriptor, fcntl.LOCK_SH) and time.monotonic() < end:
                time.sleep(0.02)
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        yield first
    finally:
        os.close(descriptor)  # which unlocks


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
