"""How a process of the job gets in at the launcher's door: the other half of the handshake."""

from __future__ import annotations

import hmac
import socket
import time

from ringlet.ring.errors import ProtocolError
from ringlet.ring.launch.wire import LARGE, NONCE, Channel, Kind, nonce, proof
from ringlet.ring.network import split_port

PATIENCE = 60.0  # seconds for the launcher to answer


def enter(
    address: str, secret: bytes, rank: int, visitor: bool = False, patience: float = PATIENCE
) -> tuple[Channel, bytes]:
    """Connect to the launcher, prove and have proved ``secret``.

    ``address`` is host:port; each answer may take ``patience`` seconds. Returns the link and what
    the launcher said first. Raises ProtocolError when whoever answers is not the launcher, OSError
    when nobody does.
    """
    channel = Channel(socket.create_connection(split_port(address), timeout=patience))
    try:
        theirs, mine = expect(channel, Kind.HELLO, patience), nonce()
        if len(theirs) != NONCE:
            raise ProtocolError("the launcher's greeting is malformed")
        role = "visitor" if visitor else "wrapper"
        answer = proof(secret, role, rank, theirs, mine)
        kind = Kind.VISIT if visitor else Kind.PROVE
        channel.send(kind, rank.to_bytes(4, "big") + mine + answer)
        channel.limit = LARGE
        body = expect(channel, Kind.WELCOME if visitor else Kind.JOB, patience)
        expected = proof(secret, "launcher", rank, theirs, mine)
        # Compared in constant time: what follows may be a command to run.
        if not hmac.compare_digest(body[: len(expected)], expected):
            raise ProtocolError("whoever answers at the launcher's address is not the launcher")
    except BaseException:
        channel.close()
        raise
    return channel, body[len(expected) :]


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
