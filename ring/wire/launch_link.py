"""The link between the launcher and one wrapper, or visitor of the store: what its frames say.

Both ends have proved that they know the job's secret, and each frame shows that the other end made
it: the wrapper runs only what its launcher sends, the launcher listens only to its own wrappers.
"""

from __future__ import annotations

import enum
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterator

from ringlet.ring.wire.framing import Incoming, Outgoing, derive
from ringlet.ring.wire.handshake import Keys

LARGE = 16 << 20  # bytes of a frame: a command with its whole environment
CHUNK = 1 << 16  # bytes of output that travel in one frame
HIGH = 1 << 20  # bytes waiting to be sent from which on nothing new is read

# Names through which the launcher tells a wrapper where it is. The user's program sees neither.
ADDRESS, SECRET = "RINGLET_LAUNCHER", "RINGLET_LAUNCHER_SECRET"

_KEEPALIVE = (
    # The kernels ask each other every second; only this long a silence ends a connection. A peer
    # that is stopped, and has more output than its buffers take, may be for that long.
    (socket.TCP_KEEPIDLE, 1), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 120),
    (socket.TCP_USER_TIMEOUT, 120_000),
)  # fmt: skip
_TCP_INFO = struct.Struct("@8B13I")  # as far as the times at which something came last


class Role(enum.IntEnum):
    """Who comes to the launcher's listener, and so which secret it has to know."""

    WRAPPER = 1  # of a rank: the job's secret
    VISITOR = 2  # a rank's program, to the store: the store's key


class Kind(enum.IntEnum):
    """What a frame says, and the body it carries."""

    JOB = 1  # launcher: what to run, a JSON object
    STARTED = 2  # wrapper: process id, which is the process group too (decimal)
    STDOUT = 3  # wrapper: bytes
    STDERR = 4  # wrapper: bytes
    ENDED = 5  # wrapper: exit code (minus the signal), when, and now (monotonic ns; decimal)
    DONE = 6  # wrapper: nothing is left of the program, and all of its output was sent
    SIGNAL = 7  # launcher: number of a signal to pass on (decimal)
    RELEASE = 8  # launcher: the wrapper may go
    ASK = 9  # rank: a request to the store, see ringlet.ring.wire.kv_store
    ANSWER = 10  # launcher: what the store says
    PLACE = 11  # wrapper of rank 0: more variables, for all ranks, that its host decides on (JSON)
    BEGIN = 12  # launcher: start the program, with these variables (JSON)
    PMI = 13  # both: a line that MPI asks for, or gets, see ringlet.ring.processes.pmi
    NODE = 14  # node: its host's name, and how many ranks it takes (JSON)
    CODE = 15  # first node: the job is over, with this exit code (decimal)
    ALIVE = 16  # launcher: does the program run? wrapper: it does, and is not stopped
    REPLACED = 17  # first node: another one has come as this node


def store_key(secret: bytes) -> bytes:
    """Return the key to the job's store, which tells nothing of the secret itself."""
    return derive(secret, "store")


class Channel:
    """One end of a connection: takes frames without ever blocking, hands over whole ones.

    ``keys`` are those that the handshake has led to.
    """

    def __init__(self, sock: socket.socket, keys: Keys) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that vanished without a word is noticed within two minutes.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE:
            sock.setsockopt(socket.IPPROTO_TCP, option, value)
        self.closed = False
        self._sock = sock
        self._incoming = Incoming(keys.receiving, frozenset(Kind), LARGE)
        self._frames = Outgoing(keys.sending)
        self._heard: deque[tuple[int, bytes]] = deque()  # frames that nobody has taken
        self._outgoing = bytearray()
        self.own_address = _own_address(sock)

    def fileno(self) -> int:
        """Return the descriptor to poll."""
        return self._sock.fileno()

    @property
    def pending(self) -> int:
        """Bytes that wait to be sent."""
        return len(self._outgoing)

    def silence(self) -> float:
        """Return for how many seconds nothing has come from the other host, not even its kernel.

        About 1 where all is well; 0 where this kernel does not tell.
        """
        try:
            told = self._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
            *_, data, acknowledgement = _TCP_INFO.unpack(told)
        except (OSError, struct.error):
            return 0.0
        return float(min(data, acknowledgement)) / 1000

    def send(self, kind: Kind, body: bytes = b"") -> None:
        """Queue a frame and send what the connection takes now; a dead peer is not an error."""
        self._outgoing += self._frames.frame(kind, body)
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
        Raises ProtocolError for a frame that is not allowed, or that the other end has not made.
        """
        try:
            data = self._sock.recv(4 * CHUNK)
            self.closed = not data
        except BlockingIOError:
            data = b""
        except OSError:
            self.closed = True
            return
        self._heard += self._incoming.feed(data)
        while self._heard:
            kind, body = self._heard.popleft()
            yield Kind(kind), body

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


def _own_address(sock: socket.socket) -> str:
    """Return this end's address; empty where the other has gone already."""
    try:
        return str(sock.getsockname()[0])
    except OSError:
        return ""
