"""The descriptors of this process: the standard ones, and how many there may be."""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from ringlet.ring.errors import LaunchError

MOST = 1 << 16  # that a process may have open, if the system lets it


def hold_standard_descriptors() -> None:
    """Let descriptors 0, 1 and 2 that are closed (``>&-``) lead nowhere, and so Python's streams.

    The next socket would have their number: what is printed would go to whoever is at its end.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free, which is this
            os.set_inheritable(number, True)
    # Python has no streams where there were no descriptors when it began.
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", errors="replace", closefd=False)  # noqa: SIM115


def flush_standard_streams() -> None:
    """Print what Python has kept back, so that it comes before what others print from now on."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError, AttributeError):  # closed, or none at all
            stream.flush()


def allow_more() -> None:
    """Let this process have as many as it may, up to 65536."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST if hard == resource.RLIM_INFINITY else min(MOST, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class _Before:
    """The limit that was there before the first block of ``more_descriptors``."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        self.limit: int | None = None


_before = _Before()


@contextmanager
def more_descriptors() -> Iterator[None]:
    """Let this process have more within the block, though not what it starts (``limit_as_before``).

    A launcher has some for each rank; programs that know nothing of it may rely on few. Raises
    LaunchError where the block needs more than there may be.
    """
    with _before.lock:
        if not _before.users:
            _before.limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        _before.users += 1
        allow_more()
    try:
        yield
    except OSError as error:
        if error.errno != errno.EMFILE:
            raise
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        raise LaunchError(
            f"the launcher has all of the {most} descriptors that it may have: allow it more"
            " (ulimit -n)"
        ) from error
    finally:
        with _before.lock:
            _before.users -= 1
            if not _before.users and _before.limit is not None:
                limit, _before.limit = _before.limit, None
                _set_limit(os.getpid(), limit)


def limit_as_before(pid: int) -> None:
    """Give a process that was just started the limit that was there before ``more_descriptors``."""
    if (limit := _before.limit) is not None:
        _set_limit(pid, limit)


def _set_limit(pid: int, soft: int) -> None:
    with contextlib.suppress(OSError, ValueError):
        hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)[1]
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))
