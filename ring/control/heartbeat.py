"""A rank's heartbeat: a small process beside it, which Python's interpreter lock cannot hold up.

It watches its rank, which is its parent, and beats as long as that runs: not while it is stopped,
nor once it has ended. Beats go to rank 0's heartbeat, and its beats to everybody. Who was silent
for too long is told to all, and so is a rank whose process has ended, although a child of it may
live and keep its connections open.

``heartbeat_process.py`` is its program. It imports little of the standard library, and of Ringlet
only how connections are proved and framed, so that it starts at once and takes little memory. It is
given what ``WatchedRank`` says on a line of its standard input, and tells on its standard output, a
line each, ``joined`` (on rank 0: all have), ``silent R``, ``gone R`` (ranks) and ``bye`` (rank 0
has left). A word ``bye`` on its input, or the end of its rank, ends it.

Both ends of a connection prove that they know the heartbeats' key, and what follows is framed.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import struct
import sys
import time
from abc import ABC, abstractmethod

from ringlet.ring.awake_clock import AwakeClock
from ringlet.ring.descriptors import allow_more
from ringlet.ring.errors import ProtocolError
from ringlet.ring.wire.admission import Admission
from ringlet.ring.wire.framing import Incoming, Outgoing
from ringlet.ring.wire.handshake import Claim, Keys, Unwelcome, connect_as

BEAT, GONE, SILENT, BYE = range(4)
RANK = struct.Struct("<I")  # all that a frame holds
HANDSHAKE = 5.0  # seconds a stranger has to prove that it belongs to the job
LONGEST = 1.0  # seconds between two beats
LATE = 1.5  # seconds that ranks have to find out that rank 0 has left before they came
AGAIN = 0.1  # seconds between two attempts to connect, and
LATER = 1.0  # between those once the time is up in which that should have been (below LATE)
# Linux's options TCP_THIN_LINEAR_TIMEOUTS and, since 6.15, TCP_RTO_MAX_MS, with their values here.
RESENDING = ((16, 1), (44, 1000)) if sys.platform == "linux" else ()


def state_of(pid: int) -> str:
    """Return the letter of a process's state; X when it has gone, R where that is not known."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return chr(file.read().rpartition(b")")[2].split()[0][0])
    except ProcessLookupError:
        return "X"
    except OSError:
        return "X" if os.path.exists("/proc/self/stat") else "R"


def resend_steadily(sock: socket.socket) -> None:
    """Let lost beats be sent again each second at least: TCP doubles its wait each time.

    Links that lose many packets would look silent otherwise.
    """
    for option, value in RESENDING:
        with contextlib.suppress(OSError):  # an older kernel
            sock.setsockopt(socket.IPPROTO_TCP, option, value)


class WatchedRank:
    """What the rank says of itself, as words of one line, in this order.

    ``parent`` is its process, ``seconds`` the longest silence. ``where`` says where rank 0's
    heartbeat listens: on rank 0 the number of a descriptor, elsewhere an address and a port, to be
    reached within ``timeout`` seconds.
    """

    def __init__(self, line: str) -> None:
        rank, size, parent, seconds, secret, timeout, *where = line.split()
        self.rank, self.size, self.parent = int(rank), int(size), int(parent)
        self.seconds, self.timeout = float(seconds), float(timeout)
        self.secret, self.where = bytes.fromhex(secret), where


class BeatLink:
    """One connection, once both ends have proved who they are and so have ``keys``."""

    def __init__(self, sock: socket.socket, keys: Keys, clock: AwakeClock) -> None:
        self.sock = sock
        self._clock, self.heard = clock, clock.now()
        self._outgoing = Outgoing(keys.sending)
        self._incoming = Incoming(keys.receiving, range(4), RANK.size)
        self._unsent = b""

    def send(self, kind: int, rank: int) -> None:
        """Send a record; a beat only if there is room: who does not read is silent anyway."""
        if kind != BEAT or not self._unsent:
            self._unsent += self._outgoing.frame(kind, RANK.pack(rank))
        with contextlib.suppress(OSError):
            self._unsent = self._unsent[self.sock.send(self._unsent) :]

    def receive(self) -> tuple[list[tuple[int, int]], bool]:
        """Return the records that have come, and whether more can come."""
        try:
            data = self.sock.recv(1 << 14)
            frames = self._incoming.feed(data)
            records = [(kind, *RANK.unpack(body)) for kind, body in frames]
        except BlockingIOError:
            return [], True
        except (OSError, ProtocolError, struct.error):
            return [], False
        if records:
            self.heard = self._clock.now()
        return records, bool(data)


class Heartbeat(ABC):
    """What both roles have in common: the rank that is watched, the clock, and what is told."""

    def __init__(self, given: WatchedRank) -> None:
        self.rank, self.size, self.parent = given.rank, given.size, given.parent
        self.seconds, self.secret = given.seconds, given.secret
        self.interval = min(LONGEST, self.seconds / 5)
        self.poll = select.poll()
        self.poll.register(0, select.POLLIN)
        self.ended = -1
        with contextlib.suppress(OSError, AttributeError):  # older kernels: it is looked at
            self.ended = os.pidfd_open(self.parent)
            self.poll.register(self.ended, select.POLLIN)
        self.links: dict[int, BeatLink] = {}  # by rank
        self.clock = AwakeClock()  # nobody is silent while this process stands still

    def run(self) -> None:
        """Beat and listen until the rank has left, or has ended."""
        beat = now = self.clock.now()
        while True:
            if now >= beat:
                state = state_of(self.parent)
                if state in "XZ" or os.getppid() != self.parent:
                    self.leave(GONE)
                    return
                if state not in "Tt":
                    self.beat()
                beat = now + self.interval
            pause = max(0.0, beat - self.clock.now())
            self.clock.sleep(pause)
            ready = {fd for fd, _ in self.poll.poll(pause * 1e3)}
            now = self.clock.now()
            if self.ended in ready:
                self.leave(GONE)
                return
            if 0 in ready:
                polite = os.read(0, 64).startswith(b"bye")
                self.leave(BYE if polite else GONE)
                return
            if not self.serve(ready):
                return
            for rank, link in list(self.links.items()):
                if now - link.heard > self.seconds:
                    self.drop(rank)
                    self.lost(SILENT, rank)

    def tell(self, word: str, *rank: int) -> None:
        """Write a line for the rank."""
        with contextlib.suppress(OSError):
            os.write(1, " ".join([word, *map(str, rank)]).encode() + b"\n")

    def beat(self) -> None:
        """Give a sign of life."""
        for link in self.links.values():
            link.send(BEAT, self.rank)

    def leave(self, kind: int) -> None:
        """Say, last, how the rank has ended."""
        for link in self.links.values():
            link.send(kind, self.rank)

    def join(self, rank: int, link: BeatLink) -> None:
        """Begin to listen to ``rank``."""
        self.links[rank] = link
        link.sock.setblocking(False)
        link.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.poll.register(link.sock, select.POLLIN)

    def drop(self, rank: int) -> None:
        """Expect nothing more of ``rank``."""
        link = self.links.pop(rank)
        self.poll.unregister(link.sock)
        link.sock.close()

    @abstractmethod
    def serve(self, ready: set[int]) -> bool:
        """Listen on descriptors that are ready; return whether there is a reason to go on."""

    def lost(self, kind: int, rank: int) -> None:
        """Tell of a rank that is lost."""
        self.tell("silent" if kind == SILENT else "gone", rank)


class Hub(Heartbeat):
    """Rank 0's: everybody connects to it."""

    def __init__(self, given: WatchedRank) -> None:
        super().__init__(given)
        allow_more()  # for strangers, who else would leave none
        listener = socket.socket(fileno=int(given.where[0]))
        self.admission = Admission(
            listener, self.secret_of, self.size - 1, HANDSHAKE, resend_steadily
        )
        self.poll.register(self.admission, select.POLLIN)
        self.arrived: set[int] = set()
        self.last_word: int | None = None  # that rank 0 has left, or has ended

    def run(self) -> None:
        """Beat and listen; then tell ranks that come late."""
        super().run()
        self.poll.unregister(0)
        if self.ended >= 0:
            self.poll.unregister(self.ended)
        told, until = set(self.arrived), self.clock.now() + LATE
        while len(self.arrived) < self.size - 1 or self.links.keys() - told:
            if not (pause := self.clock.left(until)):
                return
            self.clock.sleep(pause)
            self.serve({fd for fd, _ in self.poll.poll(pause * 1e3)})

    def leave(self, kind: int) -> None:
        """Say, last, how the rank has ended."""
        super().leave(kind)
        self.last_word = kind

    def serve(self, ready: set[int]) -> bool:
        """Listen to ranks and strangers."""
        if not self.admission.closed:
            self.admit()
        for rank in [r for r, link in self.links.items() if link.sock.fileno() in ready]:
            records, more = self.links[rank].receive()
            kinds = {kind for kind, _ in records}
            if not more or kinds & {GONE, BYE}:
                self.drop(rank)
            if GONE in kinds:
                self.lost(GONE, rank)
        return True

    def lost(self, kind: int, rank: int) -> None:
        """Tell everybody."""
        super().lost(kind, rank)
        for link in self.links.values():
            link.send(kind, rank)

    def admit(self) -> None:
        """Let ranks in; once all of them have come, say so, and listen no more."""
        for each in self.admission.serve():
            rank = each.who.rank
            self.join(rank, BeatLink(each.sock, each.keys, self.clock))
            self.arrived.add(rank)
            if self.last_word is not None:
                self.links[rank].send(self.last_word, self.rank)
        if len(self.arrived) == self.size - 1:
            self.poll.unregister(self.admission)
            self.admission.close()
            self.tell("joined")

    def secret_of(self, who: Claim) -> bytes | None:
        """Return the key that such a rank has to know; None where none is expected."""
        expected = who.size == self.size and 0 < who.rank < who.size
        return self.secret if expected and who.rank not in self.arrived else None


class Spoke(Heartbeat):
    """Another rank's, connected to rank 0's.

    If it could not connect in time, it goes on trying: else nobody would notice that its rank
    freezes, as long as the job lasts.
    """

    def __init__(self, given: WatchedRank) -> None:
        super().__init__(given)
        self.where = given.where[0], int(given.where[1])
        self.until = time.monotonic() + given.timeout
        self.hopeless = False  # whether trying is no use any more

    def run(self) -> None:
        """Connect, then beat and listen."""
        while not (link := self.connect()):
            pause = AGAIN if time.monotonic() < self.until else LATER
            if self.hopeless or select.select([0], [], [], pause)[0]:
                return
            if os.getppid() != self.parent:
                return
        self.join(0, link)
        self.tell("joined")
        super().run()

    def connect(self) -> BeatLink | None:
        """Return the link to rank 0's heartbeat; None where there is none yet."""
        sock: socket.socket | None = None
        try:
            sock = socket.create_connection(self.where, timeout=HANDSHAKE)
            resend_steadily(sock)
            who, limit = Claim(0, self.rank, self.size), time.monotonic() + HANDSHAKE
            answered = max(limit, self.until)
            keys = connect_as(sock, self.secret, who, limit, answered)
            return BeatLink(sock, keys, self.clock)
        except ConnectionRefusedError:
            self.hopeless = True  # rank 0's listened before anybody was told where
        except (OSError, ProtocolError) as error:
            # Until then it may be somebody else who answers.
            self.hopeless = isinstance(error, Unwelcome) and time.monotonic() > self.until
            if sock is not None:
                sock.close()
        return None

    def serve(self, ready: set[int]) -> bool:
        """Listen to rank 0; return whether there is a reason to go on."""
        link = self.links.get(0)
        if link is None:
            return False  # it was silent for too long
        if link.sock.fileno() not in ready:
            return True
        records, more = link.receive()
        for kind, rank in records:
            if kind in (GONE, SILENT):
                self.lost(kind, rank)
            elif kind == BYE:
                self.tell("bye")
                return False
        return more


def main() -> None:
    """Do what the first line of the standard input says."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # the rank decides, and its end is this one's
    line = b""
    while not line.endswith(b"\n"):
        piece = os.read(0, 1)  # nothing behind the line may be read with it
        if not piece:
            return
        line += piece
    given = WatchedRank(line.decode())
    (Spoke(given) if given.rank else Hub(given)).run()
