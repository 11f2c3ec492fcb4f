"""Where wrappers report to their launcher: a port, on one address, that knows the job's secret."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import time
from dataclasses import dataclass

from ringlet.ring.errors import ProtocolError
from ringlet.ring.launch.wire import LARGE, NONCE, Channel, Kind, nonce, proof, store_key
from ringlet.ring.network import listen, with_port

STRANGERS = 64  # connections, besides two a rank, that have not proved themselves yet
PATIENCE = 10.0  # seconds they have to do so


@dataclass(frozen=True)
class Guest:
    """Somebody who has been let in: the wrapper of ``rank``, or a visitor to the store.

    ``proof`` is the launcher's, for the first frame to go back.
    """

    rank: int
    channel: Channel
    proof: bytes
    visitor: bool


class Door:
    """Listens on ``host`` and lets in, as a rank below ``size``, who proves to know the secret.

    Visitors to the store prove that they know the store's key, which is derived from the secret.
    """

    def __init__(self, size: int, host: str = "127.0.0.1") -> None:
        self.size = size
        self.secret = secrets.token_bytes(32)
        self._key = store_key(self.secret)
        self._listener = listen(host, max(128, 2 * size))
        self._listener.setblocking(False)
        self._strangers: dict[Channel, tuple[bytes, float]] = {}
        self.address = with_port(host, self._listener.getsockname()[1])

    def sources(self) -> list[int]:
        """Return the descriptors to poll for reading."""
        return [self._listener.fileno(), *(channel.fileno() for channel in self._strangers)]

    def admit(self, ready: set[int]) -> list[Guest]:
        """Serve what is ``ready``; return who is let in. Everybody else is turned away."""
        if self._listener.fileno() in ready:
            self._accept()
        admitted = []
        for channel, (_, limit) in list(self._strangers.items()):
            try:
                found = self._hear(channel) if channel.fileno() in ready else None
            except ProtocolError:
                channel.closed = True
                found = None
            if found:
                del self._strangers[channel]
                channel.limit = LARGE
                admitted.append(found)
            elif channel.closed or time.monotonic() > limit:
                del self._strangers[channel]
                channel.close()
        return admitted

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            if len(self._strangers) >= STRANGERS + 2 * self.size:
                sock.close()
                return
            channel, mine = Channel(sock), nonce()
            self._strangers[channel] = (mine, time.monotonic() + PATIENCE)
            channel.send(Kind.HELLO, mine)

    def _hear(self, channel: Channel) -> Guest | None:
        mine, _ = self._strangers[channel]
        for kind, body in channel.receive():
            visitor = kind is Kind.VISIT
            secret, role = (self._key, "visitor") if visitor else (self.secret, "wrapper")
            rank, theirs = int.from_bytes(body[:4], "big"), body[4 : 4 + NONCE]
            known = hmac.compare_digest(body[4 + NONCE :], proof(secret, role, rank, mine, theirs))
            if kind not in (Kind.PROVE, Kind.VISIT) or not known or rank >= self.size:
                raise ProtocolError("not one of this job's wrappers")
            return Guest(rank, channel, proof(secret, "launcher", rank, mine, theirs), visitor)
        return None

    def close(self) -> None:
        """Close the port and every connection that was not admitted."""
        for channel in self._strangers:
            channel.close()
        self._strangers.clear()
        self._listener.close()
