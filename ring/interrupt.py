"""Ending a collective that waits for a rank which will never answer.

gloo has no call for that: a collective ends when its connections do. They are the TCP connections
that came up while the communicator was made. NCCL has one.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Protocol

from ringlet.ring.communicator import Communicator


class Interruptible(Protocol):
    """What can end collectives that wait."""

    def interrupt(self) -> None:
        """End them, from any thread."""


class Connections:
    """The TCP connections that a piece of code has left open; see ``watched``."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[int, int]] = {}  # by descriptor: device and inode

    def interrupt(self) -> None:
        """End them, here and at the other end; what waits on them fails at once."""
        for descriptor, identity in self._known.items():
            with contextlib.suppress(OSError):
                if _identity(descriptor) != identity:
                    continue  # closed since, and the number is somebody else's
                with socket.socket(fileno=os.dup(descriptor)) as sock:
                    sock.shutdown(socket.SHUT_RDWR)


_known: weakref.WeakKeyDictionary[Communicator, Interruptible] = weakref.WeakKeyDictionary()


def remember(comm: Communicator, means: Interruptible) -> None:
    """Note what ends collectives of ``comm``; it must not keep ``comm`` alive."""
    _known[comm] = means


def interrupter(comm: Communicator) -> Callable[[], None] | None:
    """Return what ends collectives that wait, in ``comm`` or any other; None if nothing can.

    A rank that is lost breaks every communicator, so all that are known are interrupted.
    """
    return interrupt_all if comm in _known else None


def interrupt_all() -> None:
    """End what waits in any communicator that is known."""
    for known in list(_known.values()):
        known.interrupt()


@contextmanager
def watched() -> Iterator[Connections]:
    """Yield what will hold the TCP connections that exist after the block and not before."""
    found = Connections()
    before = _sockets()
    yield found
    found._known = {fd: i for fd, i in _sockets().items() if before.get(fd) != i}


def _sockets() -> dict[int, tuple[int, int]]:
    sockets: dict[int, tuple[int, int]] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            identity = _identity(int(name))
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family in (socket.AF_INET, socket.AF_INET6):
                    sock.getpeername()  # raises for one that listens
                    sockets[int(name)] = identity
    return sockets


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    if not stat.S_ISSOCK(found.st_mode):
        raise OSError("not a socket")
    return found.st_dev, found.st_ino
