"""Who comes to a port of the job, until it has proved that it belongs there.

Anybody may connect and say nothing. Such strangers must neither keep ranks out nor take memory and
descriptors without end, so their number is bounded, and when a door is full one of them goes:

1. If more have come from one network than all ranks together would open, one of that network goes.
   So a flood from one address, or from a few, harms nobody who comes from elsewhere.
2. Of those in question, the oldest goes if it has been silent for longer than a rank takes.
3. Otherwise chance decides. If strangers come so fast that all of them are young, a rank still gets
   its answer through at some try, and ranks try again. With the oldest going first it never would.

The launcher, the hub of the control plane and rank 0's heartbeat let ranks in this way. Like the
handshake, this module takes little of the standard library.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import socket
import time
from collections.abc import Callable, Iterator
from itertools import islice
from select import EPOLLIN, epoll

from ringlet.ring.errors import ProtocolError
from ringlet.ring.wire.handshake import CLAIM, REFUSED, Claim, Keys, Listening

ROOM = 4096  # strangers at a time, besides the ranks expected, but no more than
SHARE = 2  # the limit of descriptors divided by this, and no less than
LEAST = 64  # this, however few descriptors there may be
SLOW = 1.0  # seconds within which a rank answers, however long its way
FEW = 16  # connections from one network that are never too many
AT_ONCE = 64  # connections that are taken before those are served who are here
PAUSE = 0.1  # seconds until it is looked again whether there is a descriptor for who connects
_SHORT = (errno.EMFILE, errno.ENFILE)
_MAPPED = bytes(10) + b"\xff\xff"  # what IPv4 addresses begin with, written as IPv6 ones


class Admitted:
    """Somebody who has proved to be ``who``, over ``sock``, whose frames have these ``keys``."""

    def __init__(self, sock: socket.socket, who: Claim, keys: Keys) -> None:
        self.sock, self.who, self.keys = sock, who, keys


class Stranger:
    """A connection, made at ``since`` (monotonic seconds), whose other end has to prove itself."""

    def __init__(self, sock: socket.socket, network: str | bytes, since: float) -> None:
        self.sock, self.network, self.since = sock, network, since
        self.number = sock.fileno()
        self.handshake = Listening()
        self.claim = b""


class Admission:
    """The strangers who have connected to ``listener``; each has ``patience`` seconds.

    Poll ``fileno()`` for reading, for at most ``time_left()`` seconds; then take all that ``serve``
    yields, whatever was ready. ``secret_of`` returns the secret that somebody with such a claim has
    to know, None if nobody like that may come. ``expected`` is how many connections all ranks may
    have here at a time before they have proved themselves. ``prepare`` gets each new socket.
    """

    def __init__(
        self,
        listener: socket.socket,
        secret_of: Callable[[Claim], bytes | None],
        expected: int,
        patience: float,
        prepare: Callable[[socket.socket], None] = lambda _: None,
    ) -> None:
        self.shortage: OSError | None = None  # why, at some time, there was no descriptor left
        self._listener, self._secret_of = listener, secret_of
        self._patience, self._prepare = patience, prepare
        self._strangers: dict[int, Stranger] = {}  # by descriptor, the oldest first
        self._networks: dict[str | bytes, dict[int, Stranger]] = {}
        self._crowds: dict[str | bytes, dict[int, Stranger]] = {}  # those that have too many
        self._shut: float | None = None  # until when (monotonic) nobody is let in
        self.expect(expected)
        listener.setblocking(False)
        self._epoll = epoll()
        self._epoll.register(listener.fileno(), EPOLLIN)

    def __len__(self) -> int:
        """Return how many strangers there are."""
        return len(self._strangers)

    @property
    def closed(self) -> bool:
        """Whether nobody is let in any more."""
        return self._epoll.closed

    def fileno(self) -> int:
        """Return the descriptor that can be read when there is something to do."""
        return self._epoll.fileno()

    def expect(self, connections: int) -> None:
        """Count on so many connections of ranks at a time."""
        self._expected, self._bearable = connections, max(connections, FEW)
        self._crowds = {
            name: each for name, each in self._networks.items() if len(each) > self._bearable
        }

    def time_left(self) -> float | None:
        """Return in how many seconds there is something to do though nobody comes; None: never."""
        times = [each.since + self._patience for each in islice(self._strangers.values(), 1)]
        if self._shut is not None:
            times.append(self._shut)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def serve(self) -> Iterator[Admitted]:
        """Yield who has proved itself, each before the next one's claim is looked at."""
        if self.closed:
            return
        now = time.monotonic()
        if self._shut is not None and self._shut <= now:
            self._shut = None
            self._epoll.register(self._listener.fileno(), EPOLLIN)
        ready = [number for number, _ in self._epoll.poll(0)]
        # First those who are here: a newcomer may get the number of one who is sent away.
        for number in ready:
            stranger = self._strangers.get(number)
            if stranger is not None and (admitted := self._hear(stranger)) is not None:
                yield admitted
        while (oldest := self._oldest(self._strangers)) and oldest.since + self._patience <= now:
            self._send_away(oldest)
        if self._listener.fileno() in ready:
            self._accept(now)

    def close(self) -> None:
        """Close the port and every connection that was not admitted. Idempotent."""
        # After a fork this runs in the child as well: what the parent polls has to stay as it is.
        self._epoll.close()
        self._listener.close()
        for stranger in self._strangers.values():
            stranger.sock.close()
        for each in (self._strangers, self._networks, self._crowds):
            each.clear()
        self._shut = None

    def _accept(self, now: float) -> None:
        for _ in range(AT_ONCE):
            try:
                sock, peer = self._listener.accept()
            except OSError as error:  # nobody is left, it has gone again, or has no descriptor
                if error.errno in _SHORT and self._find_descriptor(error, now):
                    continue
                return
            if len(self._strangers) >= self._room():
                self._send_away(self._victim(now))
            sock.setblocking(False)
            stranger = Stranger(sock, network_of(peer[0]), now)
            self._add(stranger)
            with contextlib.suppress(OSError):  # it has gone: that is heard next
                self._prepare(sock)
                sock.send(stranger.handshake.greeting)

    def _room(self) -> int:
        limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        share = ROOM if limit == resource.RLIM_INFINITY else limit // SHARE
        return self._expected + min(ROOM, max(LEAST, share))

    def _find_descriptor(self, error: OSError, now: float) -> bool:
        """Have a stranger make room, unless all may be ranks: then nobody is let in for now."""
        oldest = self._oldest(self._strangers)
        slow = oldest is not None and now - oldest.since >= SLOW
        if slow or len(self._strangers) > self._expected:
            self._send_away(self._victim(now))
            return True
        self.shortage = error
        self._epoll.unregister(self._listener.fileno())
        self._shut = now + PAUSE
        return False

    def _victim(self, now: float) -> Stranger:
        """Return who has to go, as the module says."""
        crowd = max(self._crowds.values(), key=len) if self._crowds else self._strangers
        oldest = self._oldest(crowd)
        assert oldest is not None
        if now - oldest.since >= SLOW:
            return oldest
        return next(islice(crowd.values(), _any_below(len(crowd)), None))

    def _hear(self, stranger: Stranger) -> Admitted | None:
        try:
            data = stranger.sock.recv(CLAIM + 1 - len(stranger.claim))
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        stranger.claim += data
        if not data:
            self._send_away(stranger)
        elif len(stranger.claim) >= CLAIM:
            return self._answer(stranger)
        return None

    def _answer(self, stranger: Stranger) -> Admitted | None:
        try:
            if len(stranger.claim) > CLAIM:
                raise ProtocolError("whoever connected says more than it was asked")
            who, welcome, keys = stranger.handshake.answer(stranger.claim, self._secret_of)
        except ProtocolError:
            with contextlib.suppress(OSError):
                stranger.sock.send(REFUSED)
            self._send_away(stranger)
            return None
        self._remove(stranger)
        with contextlib.suppress(OSError):  # it has gone: whoever has the connection now hears that
            stranger.sock.send(welcome)
        return Admitted(stranger.sock, who, keys)

    def _send_away(self, stranger: Stranger) -> None:
        self._remove(stranger)
        stranger.sock.close()

    def _add(self, stranger: Stranger) -> None:
        self._strangers[stranger.number] = stranger
        near = self._networks.setdefault(stranger.network, {})
        near[stranger.number] = stranger
        if len(near) > self._bearable:
            self._crowds[stranger.network] = near
        self._epoll.register(stranger.number, EPOLLIN)

    def _remove(self, stranger: Stranger) -> None:
        del self._strangers[stranger.number]
        near = self._networks[stranger.network]
        del near[stranger.number]
        if len(near) <= self._bearable:
            self._crowds.pop(stranger.network, None)
        if not near:
            del self._networks[stranger.network]
        self._epoll.unregister(stranger.number)

    @staticmethod
    def _oldest(strangers: dict[int, Stranger]) -> Stranger | None:
        return next(iter(strangers.values()), None)


def network_of(address: str) -> str | bytes:
    """Return what somebody with this numeric address has in common with all its other addresses.

    That is the address itself, but of an IPv6 address its first 64 bits: hosts have all the rest.
    """
    if ":" not in address:
        return address
    packed = socket.inet_pton(socket.AF_INET6, address.partition("%")[0])
    return address if packed.startswith(_MAPPED) else packed[:8]


def _any_below(number: int) -> int:
    # Not by ``random``, which is a large module, and which strangers might foresee.
    return int.from_bytes(os.urandom(4), "little") % number
