"""How the ends of a connection prove to each other that they know a secret, before anything else.

The one that listens greets with a fresh number. The one that connects says who it is, with a number
of its own and a proof over all of that; the answer is a proof over the same. Neither tells
anything of the secret, and neither is of any use on another connection. From both numbers come two
keys, one for each direction, for the frames that follow. This module and those that it imports take
little of the standard library: heartbeats are made of them.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable

from ringlet.ring.errors import ProtocolError
from ringlet.ring.wire.framing import derive, genuine

MAGIC = b"RINGLET3"
NONCE = 32
_FACTS = struct.Struct("<BII")  # role, rank, size
_PROOF = 32
GREETING = len(MAGIC) + NONCE  # bytes of what the listening end says first
CLAIM = _FACTS.size + NONCE + _PROOF  # bytes of what the connecting end says to that
WELCOME = _PROOF  # bytes of the answer
REFUSED = bytes(WELCOME)  # the answer to a claim that is not believed
_CONNECTS, _LISTENS = "proof of who connects", "proof of who listens"
_OUT, _IN = "frames to who connects", "frames to who listens"


class Keys:
    """The keys of one connection, as one end uses them."""

    def __init__(self, sending: bytes, receiving: bytes) -> None:
        self.sending, self.receiving = sending, receiving


class Claim:
    """Who has connected, as it says: in which role, as which rank, of how many."""

    def __init__(self, role: int, rank: int, size: int) -> None:
        self.role, self.rank, self.size = role, rank, size


class Unwelcome(ProtocolError):
    """The other end does not believe this one, or is not what it should be: trying is no use."""


class Listening:
    """The end that listens, for one connection: send ``greeting``, then ``answer`` the claim."""

    def __init__(self) -> None:
        self._nonce = os.urandom(NONCE)
        self.greeting = MAGIC + self._nonce

    def answer(
        self, claim: bytes, secret_of: Callable[[Claim], bytes | None]
    ) -> tuple[Claim, bytes, Keys]:
        """Return who has connected, what to answer, and the keys.

        ``claim`` has CLAIM bytes; ``secret_of`` returns the secret that such a one has to know,
        None if there is no such one. Raises ProtocolError for somebody who does not know it.
        """
        facts, proof = claim[:-_PROOF], claim[-_PROOF:]
        who = Claim(*_FACTS.unpack_from(facts))
        secret = secret_of(who)
        said = self._nonce + facts
        if secret is None or not genuine(proof, derive(secret, _CONNECTS, said)):
            raise ProtocolError("whoever connected does not know this job's secret")
        keys = Keys(derive(secret, _OUT, said), derive(secret, _IN, said))
        return who, derive(secret, _LISTENS, said), keys


def claim_from(greeting: bytes, secret: bytes, who: Claim) -> tuple[bytes, bytes, Keys]:
    """Return what the connecting end says, the answer it has to get, and the keys.

    Raises Unwelcome when ``greeting`` is none.
    """
    if len(greeting) != GREETING or not greeting.startswith(MAGIC):
        raise Unwelcome("what listens there is not Ringlet, or not of this version")
    facts = _FACTS.pack(who.role, who.rank, who.size) + os.urandom(NONCE)
    said = greeting[len(MAGIC) :] + facts
    keys = Keys(derive(secret, _IN, said), derive(secret, _OUT, said))
    return facts + derive(secret, _CONNECTS, said), derive(secret, _LISTENS, said), keys


def connect_as(
    sock: socket.socket, secret: bytes, who: Claim, limit: float, answered: float | None = None
) -> Keys:
    """Prove ``secret`` over a connection, and have it proved, until ``limit`` (monotonic seconds).

    The answer may come until ``answered``, for who knows the other end by its greeting: that may
    count this one among its own already, and take it for lost if it comes anew.

    Raises Unwelcome when the other end does not believe it or does not know the secret itself, and
    OSError when the connection or the time is over.
    """
    claim, expected, keys = claim_from(receive(sock, GREETING, limit), secret, who)
    sock.sendall(claim)
    answer = receive(sock, WELCOME, limit if answered is None else answered)
    if not genuine(answer, expected):
        if answer == REFUSED:
            raise Unwelcome("it does not take this process for one of the job's")
        raise Unwelcome("whoever answers there does not know this job's secret")
    return keys


def receive(sock: socket.socket, nbytes: int, limit: float) -> bytes:
    """Return exactly so many bytes. Raises OSError when the connection or the time is over."""
    data = b""
    while len(data) < nbytes:
        left = limit - time.monotonic()
        if left <= 0:
            raise TimeoutError("the other end does not answer")
        sock.settimeout(left)
        piece = sock.recv(nbytes - len(data))
        if not piece:
            raise ConnectionResetError("the other end closed the connection")
        data += piece
    return data
