"""What a control connection says: the kinds of its frames, and how its sockets are treated.

Frames, and the proof that an end belongs to the job, are those of ``ringlet.ring.wire``.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from ringlet.ring.errors import ProtocolError

LIMIT = 64 << 20  # bytes of one frame
HANDSHAKE = 5.0  # seconds a stranger has to prove that it belongs to the job
LINGER = 2.0  # seconds that closing waits for the other end
MESSAGES, GOODBYE, READY = 0, 1, 2
KINDS = (MESSAGES, GOODBYE, READY)
_LENGTH = struct.Struct("<I")


def pack(messages: Sequence[bytes]) -> bytes:
    """Return messages as one frame's bytes. Raises ValueError when they are over the limit."""
    packed = b"".join([part for m in messages for part in (_LENGTH.pack(len(m)), m)])
    if len(packed) > LIMIT:
        raise ValueError(f"control messages of {len(packed)} bytes are over the limit of {LIMIT}")
    return packed


def unpack(packed: bytes) -> Iterator[bytes]:
    """Yield the messages of a frame."""
    start, size = 0, len(packed)
    while start < size:
        if size - start < _LENGTH.size:
            raise ProtocolError("a control message has no length")
        begin = start + _LENGTH.size
        start = begin + _LENGTH.unpack_from(packed, start)[0]
        if start > size:
            raise ProtocolError("a control message ends too late")
        yield packed[begin:start]


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
