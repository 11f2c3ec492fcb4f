"""Processes that end when they should: parent-death signals, descendants, and waiting for them."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Iterator
from pathlib import Path

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
# Looked up once, here: between fork and exec only the call itself may happen.
_prctl = ctypes.CDLL(None).prctl


def die_with_parent(number: int, parent: int) -> None:
    """Have the kernel send signal ``number`` to this process when ``parent`` ends.

    Safe between fork and exec. Ends the process at once if ``parent`` has gone already.
    """
    _prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(128 + number)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children_of(parent: int) -> list[int]:
    """Return the ids of the processes whose parent is ``parent``, zombies included."""
    return [pid for pid, fields in _all() if int(fields[1]) == parent]


def is_stopped(group: int) -> bool:
    """Whether a process of ``group`` has been stopped, as by SIGSTOP."""
    return any(fields[0] == b"T" and int(fields[2]) == group for _, fields in _all())


def _all() -> Iterator[tuple[int, list[bytes]]]:
    """Yield the id of each process with its state, its parent, its group, and more."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                # pid (name) state ppid ...; the name may hold blanks and parentheses itself
                yield int(entry.name), (entry / "stat").read_bytes().rpartition(b")")[2].split()


def reap() -> dict[int, int] | None:
    """Collect the children that have ended: exit code (minus the signal) by id; None if none live.

    None means that this process has no child left at all.
    """
    ended: dict[int, int] = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended or None
        if pid == 0:
            return ended
        ended[pid] = os.waitstatus_to_exitcode(status)


def kill_children() -> None:
    """Send SIGKILL to every child of this process, adopted ones included."""
    for pid in children_of(os.getpid()):
        signal_process(pid, signal.SIGKILL)


def signal_group(group: int, number: int) -> None:
    """Send signal ``number`` to process group ``group``, which may have gone, or be stopped."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
        if number == signal.SIGTERM:
            os.killpg(group, signal.SIGCONT)  # a stopped process ends when it goes on


def signal_process(pid: int, number: int) -> None:
    """Send signal ``number`` to process ``pid``, which may have gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def describe(code: int) -> str:
    """Say how a process ended: ``code`` is its exit code, or minus the signal that ended it."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was ended by signal {-code} ({signal.Signals(-code).name})"
    except ValueError:
        return f"was ended by signal {-code}"


def shell_code(code: int) -> int:
    """Return the exit code a shell would report: 128 + signal for a process ended by one."""
    return code if code >= 0 else 128 - code
