"""One process of a machine compiles kernels while the others wait, which then find them on disk."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
import threading
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

PATIENCE_S = 300.0  # for whoever was first, and still shows signs of life
SIGN_S = 1.0  # between two signs of life, which are the times of the lock's file
# A holder that works misses some signs while LLVM has the GIL or other processes the cores. One
# that was stopped misses all, and to compile beside it costs less than to wait much longer.
SILENCE_S = 12.0

_LOCKS = 64  # files at most, of which some stand for several specs

_silent: dict[Path, int] = {}  # the last sign of a holder that was given up, which is known at once


def kernels_of(spec: str) -> str:
    """Return what to lock for a compressor's kernels.

    Who compiles those of another one, or into another folder, is not waited for.
    """
    folder = os.environ.get("NUMBA_CACHE_DIR", "")
    text = f"{folder} {spec}".encode(errors="surrogateescape")  # a folder's name may be no UTF-8
    return f"kernels-{zlib.crc32(text) % _LOCKS}"


@contextmanager
def compile_lock(what: str = "kernels", patience: float = PATIENCE_S) -> Iterator[bool]:
    """Enter at once if nobody is inside, else when the first is out again, with all that waited.

    Yields whether this one was first. ``what`` is part of a file's name, and belongs to the user
    who runs this. Processes and threads count alike. Waits ``patience`` seconds at most, and
    ``SILENCE_S`` for one that shows no sign of life, as it was stopped.
    """
    path, descriptor = Path(), -1
    with suppress(OSError):  # where there is no place for a lock, everybody is first
        path = Path(tempfile.gettempdir()) / f"ringlet-{what}-{os.getuid()}.lock"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        found = os.fstat(descriptor)
        if found.st_uid != os.getuid() or not stat.S_ISREG(found.st_mode):
            os.close(descriptor)  # somebody else's, who could hold it for ever
            descriptor = -1
    if descriptor < 0:
        yield True
        return
    try:
        if _locked(descriptor, fcntl.LOCK_EX):
            with _alive(descriptor):
                yield True
        else:
            _wait(descriptor, path, patience)
            yield False
    finally:
        os.close(descriptor)


@contextmanager
def _alive(descriptor: int) -> Iterator[None]:
    """Show signs of life on a lock that this process holds, and unlock it."""
    done, holder = threading.Event(), os.getpid()

    def show() -> None:
        while not done.wait(SIGN_S):
            _sign(descriptor)

    _sign(descriptor)  # the file has the time of whoever was here before
    thread = threading.Thread(target=show, name="ringlet-compile-lock", daemon=True)
    with suppress(RuntimeError):  # no more threads: the others will not wait for long
        thread.start()
    try:
        yield
    finally:
        if os.getpid() == holder:  # not a child of it, which has no such thread
            done.set()
            if thread.ident is not None:
                thread.join()  # it must not touch another file that gets the number
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # children may have it open


def _sign(descriptor: int) -> None:
    with suppress(OSError):
        os.utime(descriptor)


def _wait(descriptor: int, path: Path, patience: float) -> None:
    """Wait until nobody is first any more, or whoever is has shown no sign for ``SILENCE_S``.

    A sign is a time other than the last: what it says depends on clocks, and on earlier holders.
    """
    start = seen = time.monotonic()
    sign = os.fstat(descriptor).st_mtime_ns
    while not _locked(descriptor, fcntl.LOCK_SH):
        now, latest = time.monotonic(), os.fstat(descriptor).st_mtime_ns
        if latest != sign:
            sign, seen = latest, now
        if now - seen >= SILENCE_S or sign == _silent.get(path):
            _silent[path] = sign
            return
        if now - start >= patience:
            return
        time.sleep(0.02)
    fcntl.flock(descriptor, fcntl.LOCK_UN)


def _locked(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
