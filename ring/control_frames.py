"""What travels on a control connection: frames, and the proof that an end belongs to the job.

Both ends prove that they know the job's secret (HMAC-SHA256 over fresh nonces and the rank) before
anything else is read. A frame is a header (length, kind) and that many bytes; a length over 64 MiB
ends the connection before memory is taken for it.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import struct
import weakref
from collections.abc import Iterable
from typing import Any

from ringlet.ring.errors import ProtocolError

LIMIT = 64 << 20  # bytes of one message
HANDSHAKE = 5.0  # seconds a stranger has to prove that it belongs to the job
LINGER = 2.0  # seconds that closing waits for the other end
MESSAGE, GOODBYE, READY = 0, 1, 2
MAGIC = b"RINGLET1"
NONCE = 32
_HEADER = struct.Struct("<QB")
HELLO = struct.Struct(f"<II{NONCE}s32s")  # rank, size, nonce, proof


def frame(kind: int, message: bytes = b"") -> bytes:
    """Put the header before a message."""
    if len(message) > LIMIT:
        raise ValueError(f"a control message of {len(message)} bytes is over the limit of {LIMIT}")
    return _HEADER.pack(len(message), kind) + message


def proof(secret: bytes, side: bytes, *facts: bytes) -> bytes:
    """Return what only an end that knows ``secret`` can say about these facts."""
    return hmac.digest(secret, b"ringlet control " + side + b"".join(facts), "sha256")


class Frames:
    """Cuts the bytes of one connection into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """Return the frames (kind, message) that ``data`` completes."""
        self._buffer += data
        frames: list[tuple[int, bytes]] = []
        start = 0
        while len(self._buffer) - start >= _HEADER.size:
            length, kind = _HEADER.unpack_from(self._buffer, start)
            if length > LIMIT or kind > READY:
                raise ProtocolError(f"bad control frame: kind {kind}, {length} bytes")
            end = start + _HEADER.size + length
            if len(self._buffer) < end:
                break
            frames.append((kind, bytes(self._buffer[start + _HEADER.size : end])))
            start = end
        del self._buffer[:start]
        return frames


def prepare(sock: socket.socket) -> None:
    """Send small frames at once, and notice a host that vanished within a minute."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 6)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def shut(sock: socket.socket) -> None:
    """End a connection without giving up its file descriptor."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)


def release(socks: Iterable[socket.socket]) -> None:
    """Close file descriptors."""
    for sock in socks:
        with contextlib.suppress(OSError):
            sock.close()


live: weakref.WeakSet[Any] = weakref.WeakSet()


def _forget() -> None:
    # A child that kept these sockets open would hide the death of its parent from the others.
    for control in list(live):
        control._abandon()


os.register_at_fork(after_in_child=_forget)
