"""Ending a collective that waits for a rank which will never answer.

gloo has no call for that: a collective ends when its connections do. They are the TCP connections
that came up while the communicator was made. NCCL has one.

A forked child holds the connections of its parent too, and would keep them open after the parent's
death: it gives them up.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import socket
import stat
import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from ringlet.ring.communicator import Communicator

_ESTABLISHED = 1  # state of a TCP connection, in Linux's numbers
_SO_ATTACH_FILTER, _RETURN = 26, 6  # of Linux: a socket's packet filter, and its instruction
_MIN_RTT, _UNKNOWN = 148, 0xFFFFFFFF  # where tcp_info holds microseconds, and what if it does not


class Interruptible(Protocol):
    """What can end collectives that wait."""

    def interrupt(self) -> None:
        """End them, from any thread."""


End = tuple[str, int]  # address and port


Identity = tuple[int, int]  # device and inode


class Connections:
    """The TCP connections, and ports, that a piece of code has left open; see ``watched``."""

    def __init__(self) -> None:
        self._known: dict[int, Identity] = {}  # connections, by descriptor
        self._listening: dict[int, Identity] = {}  # ports, by descriptor
        self._ports: dict[int, End] = {}  # where these are
        self._ends: dict[int, tuple[End, End]] = {}  # by descriptor: this one and the other
        self._ranks: dict[int, int] = {}  # by descriptor: who is at the other end

    def interrupt(self) -> None:
        """End them, here and at the other end; what waits on them fails at once."""
        for descriptor in list(self._known):
            self.cut(descriptor)

    def cut(self, descriptor: int) -> None:
        """End one of them, here and at the other end."""
        with contextlib.suppress(OSError), self._shared(descriptor) as sock:
            if sock is not None:
                sock.shutdown(socket.SHUT_RDWR)

    def refuse_more(self) -> None:
        """Let nobody connect to the ports any more; whoever is connected stays.

        Their owner keeps them open, so the kernel is told to drop whatever comes for them.
        """
        nothing = ctypes.create_string_buffer(struct.pack("HBBI", _RETURN, 0, 0, 0))
        program = struct.pack("HP", 1, ctypes.addressof(nothing))
        for descriptor in self._listening:
            with contextlib.suppress(OSError), self._shared(descriptor) as sock:
                if sock is not None:
                    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, program)

    def ends(self) -> list[tuple[End, End]]:
        """Return where the connections begin and end, for ``introduce`` on other ranks."""
        return list(self._ends.values())

    def places(self) -> tuple[list[End], list[End]]:
        """Return where others reach this process, and what it has reached itself."""
        ports = {port for _, port in self._ports.values()}
        here, reached = set(self._ports.values()), []
        for own, other in self._ends.values():
            if own[1] in ports:
                here.add(own)  # a port may be that of all addresses
            else:
                reached.append(other)
        return sorted(here), reached

    def listen_at(self, ports: Connections) -> None:
        """Take the ports of ``ports``, and no others, and whoever has connected to them so far."""
        self._listening, self._ports = ports._listening, ports._ports
        numbers = {number for _, number in self._ports.values()}
        for descriptor, (identity, own, other) in _sockets().items():
            if other is not None and own[1] in numbers:
                self._known[descriptor], self._ends[descriptor] = identity, (own, other)
                os.set_inheritable(descriptor, False)

    def introduce(self, ends: Sequence[Iterable[tuple[End, End]]], own: int) -> None:
        """Learn who is at the other ends, from what ``ends`` returned on every rank, by rank.

        Rank ``own`` is this one. Where addresses are translated on the way they stay unknown; else
        what the program's threads have opened meanwhile is left to them, such as a connection
        between two of them, whose end would be taken for a rank's.
        """
        found = {
            (_end(there), _end(here)): rank
            for rank, pairs in enumerate(ends)
            for here, there in pairs
            if rank != own
        }
        for descriptor, pair in self._ends.items():
            if pair in found:
                self._ranks[descriptor] = found[pair]
        networks = max(1, len(self._listening))
        others = [rank for rank in range(len(ends)) if rank != own]
        if all(len(self.to(rank)) >= networks for rank in others):
            self._forget_others()

    def _forget_others(self) -> None:
        """Keep what leads to ranks alone, and whoever has come to the ports."""
        ports = {port for _, port in self._ports.values()}
        for descriptor, (here, _) in list(self._ends.items()):
            if descriptor not in self._ranks and here[1] not in ports:
                del self._known[descriptor], self._ends[descriptor]

    def to(self, rank: int) -> list[int]:
        """Return the descriptors of the connections to ``rank``."""
        return [descriptor for descriptor, other in self._ranks.items() if other == rank]

    def trips(self) -> list[float | None]:
        """Return the seconds to the other end of each and back, the least seen, as ``ends`` does.

        None where a connection has ended, or the system does not tell.
        """
        return [self._trip(descriptor) for descriptor in self._ends]

    def _trip(self, descriptor: int) -> float | None:
        with contextlib.suppress(OSError), self._shared(descriptor) as sock:
            if sock is not None:
                told = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _MIN_RTT + 4)
                (least,) = struct.unpack_from("I", told.ljust(_MIN_RTT + 4, b"\0"), _MIN_RTT)
                return None if least == _UNKNOWN else least / 1e6
        return None

    def severed(self) -> list[int]:
        """Return the ranks at the other ends of connections that have ended, ascending."""
        ranks = list(self._ranks.items())
        return sorted({rank for descriptor, rank in ranks if not self._stands(descriptor)})

    def give_up(self) -> None:
        """Let go of them in a forked child, without a word to the other ends."""
        with contextlib.suppress(OSError):
            nothing = os.open(os.devnull, os.O_RDWR)
            for descriptor in [*self._known, *self._listening]:
                if self._is_open(descriptor):
                    # The number stays taken: gloo's destructors may close it once more.
                    os.dup2(nothing, descriptor, inheritable=False)
            os.close(nothing)
        self._known.clear()
        self._listening.clear()

    def _is_open(self, descriptor: int, known_as: int | None = None) -> bool:
        """Whether it is not closed since, and its number somebody else's."""
        number = descriptor if known_as is None else known_as
        try:
            known = self._known.get(number) or self._listening.get(number)
            return _identity(descriptor) == known
        except OSError:
            return False

    @contextmanager
    def _shared(self, descriptor: int) -> Iterator[socket.socket | None]:
        """Lend a socket for it, or None if it is closed.

        Its owner may close it at any time: the copy is made first, and looked at then. Where this
        process may have no more descriptors it is lent itself: it must not look closed then.
        """
        try:
            copy = os.dup(descriptor)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE) or not self._is_open(descriptor):
                yield None
                return
            sock = socket.socket(fileno=descriptor)
            try:
                yield sock
            finally:
                sock.detach()
            return
        if not self._is_open(copy, descriptor):
            os.close(copy)
            yield None
            return
        with socket.socket(fileno=copy) as sock:
            yield sock

    def _stands(self, descriptor: int) -> bool:
        with self._shared(descriptor) as sock:
            if sock is None:
                return False
            return sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == _ESTABLISHED


def nearest_and_farthest(
    ends: Sequence[Sequence[tuple[End, End]]], trips: Sequence[Sequence[float | None]]
) -> tuple[float, float]:
    """Return the seconds from rank to rank and back: the least, and the most; 0 where unknown.

    ``ends`` and ``trips`` are what every rank's connections returned, by rank. Strangers may have
    connected too, and do not count, unless ranks cannot be told from them as addresses are
    translated on the way.
    """
    both = [[(_end(here), _end(there)) for here, there in pairs] for pairs in ends]
    known = {(there, here) for pairs in both for here, there in pairs}
    told = all(sum(pair in known for pair in pairs) >= len(ends) - 1 for pairs in both)
    seen = [
        trip
        for pairs, own in zip(both, trips, strict=True)
        for pair, trip in zip(pairs, own, strict=True)
        if trip is not None and (pair in known or not told)
    ] or [0.0]
    return min(seen), max(seen)


_known: weakref.WeakKeyDictionary[Communicator, Interruptible] = weakref.WeakKeyDictionary()


_waiting: weakref.WeakSet[Interruptible] = weakref.WeakSet()


def notify(waiting: Interruptible) -> None:
    """Let ``waiting`` know, after they were ended, that collectives were interrupted."""
    _waiting.add(waiting)


def remember(comm: Communicator, means: Interruptible) -> None:
    """Note what ends collectives of ``comm``; it must not keep ``comm`` alive."""
    _known[comm] = means


_holders: weakref.WeakSet[object] = weakref.WeakSet()


def hold(holder: object, on: bool = True) -> None:
    """Let connections stay when a collective fails, until ``holder`` lets go, ends, or interrupts.

    Whoever waits for this rank learns of the failure from the holder, with its cause: a connection
    that ends would look like another failure.
    """
    (_holders.add if on else _holders.discard)(holder)


def held() -> bool:
    """Whether connections are to stay when a collective fails."""
    return bool(_holders)


def interrupter(comm: Communicator) -> Callable[[], None] | None:
    """Return what ends collectives that wait, in ``comm`` or any other; None if nothing can.

    A rank that is lost breaks every communicator, so all that are known are interrupted.
    """
    return interrupt_all if comm in _known else None


def interrupt_all() -> None:
    """End what waits in any communicator that is known."""
    for known in list(_known.values()):
        known.interrupt()
    for waiting in list(_waiting):
        waiting.interrupt()


@contextmanager
def watched() -> Iterator[Connections]:
    """Yield what will hold the TCP sockets that exist after the block and not before."""
    found = Connections()
    before = _sockets()
    yield found
    for descriptor, (identity, own, other) in _sockets().items():
        if descriptor in before and before[descriptor][0] == identity:
            continue
        if other is None:
            found._listening[descriptor], found._ports[descriptor] = identity, own
        else:
            found._known[descriptor], found._ends[descriptor] = identity, (own, other)
        os.set_inheritable(descriptor, False)  # programs that this one starts need them not


def _sockets() -> dict[int, tuple[Identity, End, End | None]]:
    """Return the TCP sockets of this process, with both ends; one that listens has no other."""
    sockets: dict[int, tuple[Identity, End, End | None]] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            identity = _identity(int(name))
            with socket.socket(fileno=os.dup(int(name))) as sock:
                if sock.family not in (socket.AF_INET, socket.AF_INET6):
                    continue
                other = None
                if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                    other = _end(sock.getpeername())  # raises where there is none
                sockets[int(name)] = identity, _end(sock.getsockname()), other
    return sockets


def _end(address: Sequence[Any]) -> End:
    return str(address[0]), int(address[1])


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    if not stat.S_ISSOCK(found.st_mode):
        raise OSError("not a socket")
    return found.st_dev, found.st_ino


def _give_up_all() -> None:
    for known in list(_known.values()):
        if isinstance(known, Connections):
            known.give_up()


os.register_at_fork(after_in_child=_give_up_all)
