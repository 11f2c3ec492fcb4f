"""The link between the launcher and one wrapper: authenticated, length-prefixed frames.

Both ends prove that they know the job's secret before anything is said: the wrapper runs only what
its launcher sends, the launcher listens only to its own wrappers. Lengths are checked before
anything is stored, and nothing is ever unpickled.
"""

from __future__ import annotations

import enum
import hmac
import secrets
import select
import socket
import struct
import time
from collections.abc import Iterator

from ringlet.ring.errors import ProtocolError

HANDSHAKE = 256  # bytes a frame may have before the other end has proved itself
LARGE = 16 << 20  # afterwards: a command with its whole environment
CHUNK = 1 << 16  # bytes of output that travel in one frame
HIGH = 1 << 20  # bytes waiting to be sent from which on nothing new is read
NONCE = 32

# Names through which the launcher tells a wrapper where it is. The user's program sees neither.
ADDRESS, SECRET = "RINGLET_LAUNCHER", "RINGLET_LAUNCHER_SECRET"
# The program does see this one: with it a rank may use the job's store, and nothing more.
STORE_KEY = "RINGLET_STORE_KEY"

_HEADER = struct.Struct("!BI")
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 15), (socket.TCP_KEEPINTVL, 5), (socket.TCP_KEEPCNT, 6))


class Kind(enum.IntEnum):
    """What a frame says, and the body it carries."""

    HELLO = 1  # launcher: its nonce
    PROVE = 2  # wrapper: rank (4 bytes), its nonce, its proof
    JOB = 3  # launcher: its proof, then a JSON object
    STARTED = 4  # wrapper: process id, which is the process group too (decimal)
    STDOUT = 5  # wrapper: bytes
    STDERR = 6  # wrapper: bytes
    ENDED = 7  # wrapper: exit code (minus the signal), when, and now (monotonic ns; decimal)
    DONE = 8  # wrapper: nothing is left of the program, and all of its output was sent
    SIGNAL = 9  # launcher: number of a signal to pass on (decimal)
    RELEASE = 10  # launcher: the wrapper may go
    VISIT = 11  # rank: as PROVE, but by the store's key, to use the store
    WELCOME = 12  # launcher: its proof to a visitor
    ASK = 13  # rank: a request to the store, see ringlet.ring.launch.shelf
    ANSWER = 14  # launcher: what the store says
    PLACE = 15  # wrapper of rank 0: more variables, for all ranks, that its host decides on (JSON)
    BEGIN = 16  # launcher: start the program, with these variables (JSON)


def proof(secret: bytes, who: str, rank: int, launcher: bytes, wrapper: bytes) -> bytes:
    """Return what shows that ``who`` knows ``secret``; valid for this pair of nonces only."""
    return hmac.digest(secret, b"%s %d " % (who.encode(), rank) + launcher + wrapper, "sha256")


def store_key(secret: bytes) -> bytes:
    """Return the key to the job's store, which tells nothing of the secret itself."""
    return hmac.digest(secret, b"store", "sha256")


def nonce() -> bytes:
    """Return a number that was never used before."""
    return secrets.token_bytes(NONCE)


class Channel:
    """One end of a connection: takes frames without ever blocking, hands over whole ones."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that vanished without a word is noticed within a minute.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self.limit = HANDSHAKE
        self.closed = False
        self._sock = sock
        self._incoming = bytearray()
        self._outgoing = bytearray()
        self.own_address, self.peer_address = _ends(sock)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._sock.fileno()

    @property
    def pending(self) -> int:
        """Bytes that wait to be sent."""
        return len(self._outgoing)

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Queue a frame and send what the connection takes now; a dead peer is not an error."""
        self._outgoing += _HEADER.pack(kind, len(body)) + body
        self.flush()

    def flush(self) -> None:
        """Send what the connection takes now."""
        while self._outgoing and not self.closed:
            try:
                with memoryview(self._outgoing) as waiting:
                    sent = self._sock.send(waiting[:HIGH])
            except BlockingIOError:
                return
            except OSError:
                self._outgoing.clear()  # what the peer said last may still be received
                return
            del self._outgoing[:sent]

    def receive(self) -> Iterator[tuple[Kind, bytes]]:
        """Read once and yield the frames that are whole; sets ``closed`` at the end.

        Whoever stops in between gets the rest by calling again, also when nothing more has come.
        Raises ProtocolError for a frame of unknown kind or above the limit.
        """
        try:
            data = self._sock.recv(4 * CHUNK)
            self.closed = not data
        except BlockingIOError:
            data = b""
        except OSError:
            self.closed = True
            return
        self._incoming += data
        while len(self._incoming) >= _HEADER.size:
            number, length = _HEADER.unpack_from(self._incoming)
            if number not in Kind.__members__.values() or length > self.limit:
                raise ProtocolError(f"a frame of kind {number} and {length} bytes is not allowed")
            end = _HEADER.size + length
            if len(self._incoming) < end:
                return
            body = bytes(self._incoming[_HEADER.size : end])
            del self._incoming[:end]
            yield Kind(number), body

    def wait(self, seconds: float | None) -> bool:
        """Send what is queued, until something can be received; false when the time is up."""
        limit = None if seconds is None else time.monotonic() + seconds
        while not self.closed:
            left = None if limit is None else max(0.0, limit - time.monotonic())
            poll = select.poll()
            poll.register(self._sock, select.POLLIN | (select.POLLOUT if self._outgoing else 0))
            events = poll.poll(None if left is None else 1000 * left)
            self.flush()
            if any(event & ~select.POLLOUT for _, event in events):
                return True
            if left == 0:
                return False
        return False

    def close(self) -> None:
        """Close the connection. Idempotent."""
        self.closed = True
        self._sock.close()


def _ends(sock: socket.socket) -> tuple[str, str]:
    """Return this end's address and the other's; empty for one that is gone already."""
    try:
        return sock.getsockname()[0], sock.getpeername()[0]
    except OSError:
        return "", ""
