"""Where wrappers report to their launcher: a loopback port that knows the job's secret."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import time

from ringlet.ring.errors import ProtocolError
from ringlet.ring.launch.wire import LARGE, NONCE, Channel, Kind, nonce, proof

STRANGERS = 64  # connections that have not proved themselves yet
PATIENCE = 10.0  # seconds they have to do so


class Door:
    """Accepts connections and lets in, as a rank below ``size``, who proves to know ``secret``."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.secret = secrets.token_bytes(32)
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=max(128, size))
        self._listener.setblocking(False)
        self._strangers: dict[Channel, tuple[bytes, float]] = {}
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def sources(self) -> list[int]:
        """Return the descriptors to poll for reading."""
        return [self._listener.fileno(), *(channel.fileno() for channel in self._strangers)]

    def admit(self, ready: set[int]) -> list[tuple[int, Channel, bytes]]:
        """Serve what is ``ready``; return rank, channel and the launcher's proof of new wrappers.

        The proof goes in front of the first frame to the wrapper. Everybody else is turned away.
        """
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
                admitted.append((found[0], channel, found[1]))
            elif channel.closed or time.monotonic() > limit:
                del self._strangers[channel]
                channel.close()
        return admitted

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            sock, _ = self._listener.accept()
            if len(self._strangers) >= STRANGERS:
                sock.close()
                return
            channel, mine = Channel(sock), nonce()
            self._strangers[channel] = (mine, time.monotonic() + PATIENCE)
            channel.send(Kind.HELLO, mine)

    def _hear(self, channel: Channel) -> tuple[int, bytes] | None:
        mine, _ = self._strangers[channel]
        for kind, body in channel.receive():
            rank, theirs = int.from_bytes(body[:4], "big"), body[4 : 4 + NONCE]
            expected = proof(self.secret, "wrapper", rank, mine, theirs)
            known = hmac.compare_digest(body[4 + NONCE :], expected)
            if kind is not Kind.PROVE or not known or rank >= self.size:
                raise ProtocolError("not one of this job's wrappers")
            return rank, proof(self.secret, "launcher", rank, mine, theirs)
        return None

    def close(self) -> None:
        """Close the port and every connection that was not admitted."""
        for channel in self._strangers:
            channel.close()
        self._strangers.clear()
        self._listener.close()
