"""How a process of the job gets in at the launcher's listener: the other half of the handshake."""

from __future__ import annotations

import errno
import random
import socket
import time

from ringlet.ring.errors import ProtocolError
from ringlet.ring.wire.addresses import split_port
from ringlet.ring.wire.handshake import Claim, connect_as
from ringlet.ring.wire.launch_link import Channel, Kind, Role

PATIENCE = 60.0  # seconds for the launcher to answer
TRY = 15.0  # seconds for it to answer once
ROUTE = 20.0  # seconds for a way to its host to be found: whoever asks for one may not be heard
PAUSE = 0.05, 1.0  # seconds between two tries: at first, and at most

# Another connection may fare better: the listener may have been full of strangers.
_PASSING = (ConnectionResetError, ConnectionAbortedError, BrokenPipeError, TimeoutError)


def enter(
    address: str, secret: bytes, rank: int, visitor: bool = False, patience: float = PATIENCE
) -> Channel:
    """Connect to the launcher, prove and have proved ``secret``; return the link.

    ``address`` is host:port. A connection that breaks is tried again, for ``patience`` seconds in
    all. Raises ProtocolError when whoever answers is not the launcher, or does not believe this
    process, and OSError when nobody answers, or no way leads to its host within 20 s.
    """
    who = Claim(Role.VISITOR if visitor else Role.WRAPPER, rank, 0)
    began = time.monotonic()
    limit, pause = began + patience, PAUSE[0]
    while True:
        sock: socket.socket | None = None
        now = time.monotonic()
        try:
            once = max(0.001, min(TRY, limit - now))
            sock = socket.create_connection(split_port(address), timeout=once)
            return Channel(sock, connect_as(sock, secret, who, now + once, limit))
        except (OSError, ProtocolError) as error:
            if sock is not None:
                sock.close()
            until = min(limit, began + ROUTE) if _no_route(error) else limit
            passing = isinstance(error, _PASSING) or _no_route(error)
            if not passing or time.monotonic() + pause >= until:
                raise
        time.sleep(pause * random.uniform(0.5, 1.0))  # so that not all come back at once
        pause = min(2 * pause, PAUSE[1])


def _no_route(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno == errno.EHOSTUNREACH


def expect(channel: Channel, wanted: Kind, patience: float = PATIENCE) -> bytes:
    """Wait for the next frame, which has to be of kind ``wanted``."""
    limit = time.monotonic() + patience
    while not channel.closed and (left := limit - time.monotonic()) > 0:
        channel.wait(left)
        for kind, body in channel.receive():
            if kind is wanted:
                return body
            raise ProtocolError(f"expected {wanted.name} from the launcher, got {kind.name}")
    raise ProtocolError(f"the launcher did not send {wanted.name}")
