"""Where wrappers report to their launcher: a port, on one address, that knows the job's secret."""

from __future__ import annotations

import contextlib
import errno
import resource
import secrets
import socket
import time
from collections import Counter
from dataclasses import dataclass

from ringlet.ring.addresses import listen, with_port
from ringlet.ring.errors import ProtocolError
from ringlet.ring.wire.handshake import CLAIM, REFUSED, Claim, Listening
from ringlet.ring.wire.launch_link import Channel, Role, store_key

STRANGERS = 256  # connections, besides two a rank, that have not proved themselves yet
PATIENCE = 10.0  # seconds they have to do so
AT_ONCE = 64  # that are taken before those who are let in are served
PAUSE = 1.0  # seconds until it is looked again whether there is a descriptor for who connects


@dataclass(frozen=True)
class Guest:
    """Somebody who has been let in: the wrapper of ``rank``, or a visitor to the store."""

    rank: int
    channel: Channel
    visitor: bool


class _Stranger:
    """Somebody who has connected from ``address``, until ``limit`` (monotonic seconds)."""

    def __init__(self, sock: socket.socket, address: str) -> None:
        self.sock, self.address = sock, address
        self.limit = time.monotonic() + PATIENCE
        self.handshake = Listening()
        self.claim = b""


class Listener:
    """Listens on ``host`` and lets in, as a rank below ``size``, who proves to know the secret.

    Visitors to the store prove that they know the store's key, which is derived from the secret.
    ``port`` and ``secret`` (32 bytes) are chosen here unless they are given.
    When there are too many strangers, the oldest makes room for the next, of those who come from
    where most of them come from. Where this process may have no more descriptors, a stranger who
    has been silent for a second does; if there is none, whoever connects has to wait.
    """

    def __init__(
        self, size: int, host: str = "127.0.0.1", port: int = 0, secret: bytes | None = None
    ) -> None:
        self.size = size
        self.secret = secrets.token_bytes(32) if secret is None else secret
        self._key = store_key(self.secret)
        self._listener = listen(host, max(128, 2 * size), port)
        self._listener.setblocking(False)
        self._strangers: list[_Stranger] = []  # the oldest first
        self._pause = 0.0  # until when nobody is let in, monotonic seconds (0: they are),
        self._short = ""  # why, and
        self._told = False  # whether that was told
        self.address = with_port(host, self._listener.getsockname()[1])

    def sources(self) -> list[int]:
        """Return the descriptors to poll for reading."""
        if time.monotonic() >= self._pause:
            self._pause = 0.0
        door = [] if self._pause else [self._listener.fileno()]
        return [*door, *(each.sock.fileno() for each in self._strangers)]

    def patience(self) -> float | None:
        """Return for how many seconds nobody's time is up, None for ever."""
        now = time.monotonic()
        times = [stranger.limit for stranger in self._strangers[:1]]
        if self._pause:  # whatever the clock says by now: sources() left the door out
            times.append(self._pause)
        return max(0.0, min(times) - now) if times else None

    def complaint(self) -> str:
        """Return, once, why nobody is let in any more; empty while all is well."""
        if self._told or not self._short:
            return ""
        self._told = True
        return self._short

    def admit(self, ready: set[int]) -> list[Guest]:
        """Serve what is ``ready``; return who is let in. Everybody else is turned away."""
        # First those who are here: a newcomer may get the number of one who is sent away.
        heard = [each for each in self._strangers if each.sock.fileno() in ready]
        admitted = [guest for stranger in heard if (guest := self._hear(stranger))]
        now = time.monotonic()
        while self._strangers and self._strangers[0].limit <= now:
            self._send_away(self._strangers[0])
        if self._listener.fileno() in ready:
            self._accept()
        return admitted

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                sock, peer = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:  # it has gone again, or there is no descriptor for it
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    self._find_descriptor(error)
                return
            sock.setblocking(False)
            stranger = _Stranger(sock, str(peer[0]))
            self._strangers.append(stranger)
            if len(self._strangers) > STRANGERS + 2 * self.size:
                self._make_room()
            with contextlib.suppress(OSError):
                sock.send(stranger.handshake.greeting)

    def _find_descriptor(self, error: OSError) -> None:
        """Have a stranger who has been silent for a while make room, or let nobody in for now."""
        now = time.monotonic()
        oldest = self._strangers[0] if self._strangers else None
        if oldest is not None and oldest.limit - PATIENCE + PAUSE <= now:
            self._send_away(oldest)
            return
        self._pause = now + PAUSE
        self._short = _no_descriptors(error)

    def _make_room(self) -> None:
        ((most, _),) = Counter(stranger.address for stranger in self._strangers).most_common(1)
        self._send_away(next(each for each in self._strangers if each.address == most))

    def _hear(self, stranger: _Stranger) -> Guest | None:
        try:
            data = stranger.sock.recv(CLAIM - len(stranger.claim))
        except BlockingIOError:
            return None
        except OSError:
            data = b""
        if not data:
            self._send_away(stranger)
            return None
        stranger.claim += data
        if len(stranger.claim) < CLAIM:
            return None
        try:
            who, welcome, keys = stranger.handshake.answer(stranger.claim, self._secret_of)
            stranger.sock.sendall(welcome)  # there is room for so little
        except (ProtocolError, OSError) as error:
            if isinstance(error, ProtocolError):
                with contextlib.suppress(OSError):
                    stranger.sock.send(REFUSED)
            self._send_away(stranger)
            return None
        self._strangers.remove(stranger)
        return Guest(who.rank, Channel(stranger.sock, keys), who.role == Role.VISITOR)

    def _secret_of(self, who: Claim) -> bytes | None:
        secrets_of = {int(Role.WRAPPER): self.secret, int(Role.VISITOR): self._key}
        return secrets_of.get(who.role) if who.rank < self.size else None

    def _send_away(self, stranger: _Stranger) -> None:
        self._strangers.remove(stranger)
        stranger.sock.close()

    def close(self) -> None:
        """Close the port and every connection that was not admitted."""
        while self._strangers:
            self._send_away(self._strangers[0])
        self._listener.close()


def _no_descriptors(error: OSError) -> str:
    if error.errno == errno.ENFILE:
        return "this host has no descriptors left, so ranks cannot connect to the launcher"
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    return (
        f"ranks cannot connect to the launcher, which has all of the {limit} descriptors that it"
        " may have: allow it more (`ulimit -n` in the shell that starts it), four for each rank"
    )
