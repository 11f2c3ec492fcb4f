"""Rank 0's end of the control plane over TCP: the hub of a star.

A stranger that cannot prove itself, or takes over 5 s for it, is dropped (``Admission``). Rank 0
writes without blocking: what a slow reader leaves in its way waits in a queue of its own.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable

from ringlet.ring.control.frame_kinds import (
    GOODBYE,
    HANDSHAKE,
    KINDS,
    LIMIT,
    LINGER,
    MESSAGES,
    READY,
    live,
    pack,
    prepare,
    release,
    shut,
    unpack,
)
from ringlet.ring.control.in_process import Inbox, SerialHandler, usable
from ringlet.ring.control.plane import ControlPlane, Handler
from ringlet.ring.control.pulse import Pulse
from ringlet.ring.errors import PeerLost, ProtocolError, RingError
from ringlet.ring.wire.admission import Admission
from ringlet.ring.wire.framing import Incoming, Outgoing
from ringlet.ring.wire.handshake import Claim, Keys

BACKLOG = 256 << 20  # bytes that may wait for a slow reader before it counts as lost
_LOOK = 0.1  # seconds between two looks whether ranks that have not joined are still there

Severed = Callable[[], list[int]]  # ranks to which other connections have ended


class _Peer:
    """The connection of ``rank``, which has proved who it is, as the hub sees it."""

    def __init__(self, sock: socket.socket, rank: int, keys: Keys) -> None:
        self.sock, self.rank = sock, rank
        self.incoming = Incoming(keys.receiving, KINDS, LIMIT)
        self.outgoing = Outgoing(keys.sending)
        self.queue = bytearray()
        self.polite = False  # it said goodbye
        self.why: str | None = None  # it is lost, though its connection still stands
        self.writing = False  # the selector watches for room to write


class TcpHub(ControlPlane):
    """Rank 0's end: listens on ``listener``, runs the handler, and serves ranks 1 to size - 1."""

    def __init__(self, handler: Handler, size: int, secret: bytes, listener: socket.socket) -> None:
        self.rank = 0
        self.size = size
        self.turns = 0  # calls of receive that have ended
        self.pulse: Pulse | None = None
        self._secret = secret
        self._admission = Admission(listener, self._secret_of, size - 1, HANDSHAKE, prepare)
        self._inbox = Inbox()
        self._coordinator = SerialHandler(handler, self._deliver, self._fail)
        self._lock = self._coordinator.lock
        self._peers: dict[int, _Peer] = {}
        self._opened = threading.Event()
        self._left_early: tuple[int, str | None] | None = None  # and why
        self._closed = False
        self._pid = os.getpid()
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        for sock in (self._waker, self._woken):
            sock.setblocking(False)
        self._selector.register(self._admission, selectors.EVENT_READ, self._admission)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        live.add(self)
        self._thread = threading.Thread(target=self._run, name="ringlet control", daemon=True)
        self._thread.start()

    def wait_open(self, timeout: float, severed: Severed = list) -> None:
        """Return once all ranks have joined; raise PeerLost naming those that have not.

        At once where one of them is ``severed``, or its heartbeat has told that it is lost.
        """
        deadline = time.monotonic() + timeout
        missing: list[int] = []
        why = "did not join the control plane"
        while not self._opened.wait(_LOOK):
            if missing := severed():
                why += ": the connection to it has ended"
                break
            if time.monotonic() >= deadline:
                missing = [r for r in range(1, self.size) if r not in self._peers]
                break
        if self._left_early is not None:
            missing, told = [self._left_early[0]], self._left_early[1]
            why += f": {told}" if told else ""
        if missing:
            names = ", ".join(map(str, missing))
            raise PeerLost(f"rank{'s' * (len(missing) > 1)} {names} {why}", missing)

    def send(self, message: bytes) -> None:
        """Call the handler from this thread."""
        usable(self._closed, self._pid)
        self._coordinator.message(0, message)

    def receive(self, timeout: float | None = None) -> list[bytes]:
        """Return the broadcasts since the last call; see ``ControlPlane``."""
        usable(self._closed, self._pid)
        try:
            return self._inbox.take(timeout)
        finally:
            self.turns += 1

    def lose(self, rank: int, why: str) -> None:
        """Count ``rank`` as lost though its connection still stands. From any thread."""
        with self._lock:
            peer = self._peers.get(rank)
            if peer is not None:
                peer.why = why
                shut(peer.sock)
            elif not self._opened.is_set():
                self._leave_early(rank, why)

    def wake(self) -> None:
        """Make ``receive`` return."""
        usable(self._closed, self._pid)
        self._inbox.wake()

    def close(self) -> None:
        """Say goodbye to everybody and stop serving."""
        if self._closed or self._pid != os.getpid():
            return
        if self.pulse is not None:
            self.pulse.close()
        self._closed = True
        self._inbox.fail(RingError("this control plane is closed"))
        self._poke()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * LINGER)

    # The hub thread.

    def _run(self) -> None:
        try:
            while not self._closed:
                self._step(self._admission.time_left())
                if not self._admission.closed:
                    self._admit()
            self._part()
        except Exception as error:
            self._fail(error)
        finally:
            self._abandon()

    def _step(self, timeout: float | None) -> None:
        for key, mask in self._selector.select(timeout):
            if key.data is None:
                with contextlib.suppress(BlockingIOError):
                    self._woken.recv(4096)
                with self._lock:
                    for peer in self._peers.values():
                        self._flush(peer)
            elif key.data is self._admission:
                pass  # it is served after each step
            elif key.data.sock.fileno() >= 0:  # not dropped on behalf of another event
                if mask & selectors.EVENT_WRITE:
                    with self._lock:
                        self._flush(key.data)
                if mask & selectors.EVENT_READ:
                    self._read(key.data)

    def _admit(self) -> None:
        """Let ranks in; once all of them are there, tell them so, and listen no more."""
        for each in self._admission.serve():
            peer = _Peer(each.sock, each.who.rank, each.keys)
            self._selector.register(peer.sock, selectors.EVENT_READ, peer)
            with self._lock:
                self._peers[peer.rank] = peer
        if len(self._peers) == self.size - 1:
            with self._lock:
                for peer in self._peers.values():
                    self._send(peer, READY)
            self._stop_listening()
            self._opened.set()

    def _read(self, peer: _Peer) -> None:
        try:
            data = peer.sock.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(peer)
        else:
            self._take(peer, data)

    def _secret_of(self, who: Claim) -> bytes | None:
        expected = who.size == self.size and 0 < who.rank < who.size and who.rank not in self._peers
        return self._secret if expected else None

    def _take(self, peer: _Peer, data: bytes) -> None:
        try:
            frames = [(kind, [*unpack(body)]) for kind, body in peer.incoming.feed(data)]
        except ProtocolError as error:
            peer.why = peer.why or str(error)
            return self._drop(peer)
        for kind, messages in frames:
            for message in messages:
                self._coordinator.message(peer.rank, message)
            if kind == GOODBYE:
                peer.polite = True
                return self._drop(peer)
        return None

    def _drop(self, peer: _Peer) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.sock)
        with self._lock:
            self._peers.pop(peer.rank, None)
            peer.sock.close()
        if not self._opened.is_set():
            self._leave_early(peer.rank, peer.why)
        elif peer.polite:
            self._coordinator.goodbye(peer.rank)
        else:
            self._coordinator.lost(peer.rank, peer.why)

    def _leave_early(self, rank: int, why: str | None) -> None:
        """Note that a rank was lost before all had joined: ``wait_open`` raises."""
        self._left_early = self._left_early or (rank, why)
        self._opened.set()

    def _stop_listening(self) -> None:
        self._selector.unregister(self._admission)
        self._admission.close()

    def _part(self) -> None:
        with self._lock:
            for peer in self._peers.values():
                self._send(peer, GOODBYE)
        deadline = time.monotonic() + LINGER
        while time.monotonic() < deadline and any(p.queue for p in self._peers.values()):
            with self._lock:
                for peer in self._peers.values():
                    self._flush(peer)
            self._selector.select(0.01)

    # Any thread that holds the lock.

    def _deliver(self, messages: list[bytes]) -> None:
        data = pack(messages)
        for peer in self._peers.values():
            self._send(peer, MESSAGES, data)
        self._inbox.put(messages)  # last: it may be told to leave, and would take the others' word

    def _send(self, peer: _Peer, kind: int, body: bytes = b"") -> None:
        self._write(peer, peer.outgoing.frame(kind, body))

    def _write(self, peer: _Peer, data: bytes) -> None:
        sent = 0
        if not peer.queue:
            try:
                sent = peer.sock.send(data)
            except BlockingIOError:
                sent = 0
            except OSError:
                return  # the hub thread sees the end of this connection and reports it
        if sent < len(data):
            peer.queue += memoryview(data)[sent:]
            if len(peer.queue) > BACKLOG:
                shut(peer.sock)
            self._poke()

    def _flush(self, peer: _Peer) -> None:
        try:
            while peer.queue:
                del peer.queue[: peer.sock.send(memoryview(peer.queue)[: 1 << 20].tobytes())]
        except BlockingIOError:
            pass
        except OSError:
            peer.queue.clear()
        if bool(peer.queue) != peer.writing:
            peer.writing = bool(peer.queue)
            events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.writing else 0)
            self._selector.modify(peer.sock, events, peer)

    def _poke(self) -> None:
        with contextlib.suppress(OSError):
            self._waker.send(b"\0")

    def _fail(self, error: BaseException) -> None:
        self._inbox.fail(error)
        for peer in self._peers.values():
            shut(peer.sock)

    def _abandon(self) -> None:
        self._admission.close()
        release([self._waker, self._woken, *(peer.sock for peer in self._peers.values())])
        self._selector.close()
