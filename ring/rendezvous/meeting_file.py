"""The file in which ranks of one host meet where their launcher names no place: see ``join``.

A job that is killed leaves it behind, and launchers number their jobs anew in every container, so
that a later job may have the same name: what is in it then would part its ranks. So each rank holds
a lock beside it as long as it lives, and who finds a file that nobody holds removes it.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
from pathlib import Path

_LOCK = ".lock"
_held: dict[Path, int] = {}  # descriptors, by the files that this process has joined


def join(path: Path) -> None:
    """Hold the file ``path`` until this process ends; before, remove it if nobody else does.

    So are all files beside it that nobody holds. Nothing happens where there are no locks.
    """
    if path in _held:
        return
    for lock in path.parent.glob(f"*{_LOCK}"):
        if lock != _beside(path):
            _remove_unheld(lock)
    while True:
        descriptor = os.open(_beside(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        with contextlib.suppress(OSError):
            if _taken(descriptor, fcntl.LOCK_EX):
                path.unlink(missing_ok=True)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        if _is_still(descriptor, _beside(path)):
            break
        os.close(descriptor)  # somebody has removed it in the meantime
    if not _held:
        atexit.register(_leave)
    _held[path] = descriptor


def _leave() -> None:
    """Remove the locks that no other rank holds any more, of files that are gone already.

    torch removes these, and would make one anew that it does not find.
    """
    for path, descriptor in _held.items():
        os.close(descriptor)
        if not path.exists():
            _remove_unheld(_beside(path))
    _held.clear()


def _remove_unheld(lock: Path) -> None:
    with contextlib.suppress(OSError):
        descriptor = os.open(lock, os.O_RDWR | os.O_CLOEXEC)
        try:
            if _taken(descriptor, fcntl.LOCK_EX) and _is_still(descriptor, lock):
                lock.with_name(lock.name.removesuffix(_LOCK)).unlink(missing_ok=True)
                lock.unlink()
        finally:
            os.close(descriptor)


def _beside(path: Path) -> Path:
    return path.with_name(path.name + _LOCK)


def _taken(descriptor: int, kind: int) -> bool:
    try:
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _is_still(descriptor: int, path: Path) -> bool:
    """Whether ``path`` is what ``descriptor`` was opened as."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(descriptor))
