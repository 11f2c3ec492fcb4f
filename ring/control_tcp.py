"""The control plane over TCP: a star with rank 0 as its hub.

Both ends prove that they know the job's secret (HMAC-SHA256 over fresh nonces and the rank) before
anything else is read; who cannot, or takes over 5 s, is dropped. A frame is a header (length, kind)
and that many bytes; a length over 64 MiB ends the connection before memory is taken for it.
Rank 0 writes without blocking: what a slow reader leaves in its way waits in a queue of its own.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import select
import selectors
import socket
import struct
import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any

from ringlet.ring.control import ControlPlane, Handler
from ringlet.ring.control_local import Coordinator, Inbox, usable
from ringlet.ring.errors import PeerLost, ProtocolError, RingError

LIMIT = 64 << 20  # bytes of one message
BACKLOG = 256 << 20  # bytes that may wait for a slow reader before it counts as lost
HANDSHAKE = 5.0  # seconds a stranger has to prove that it belongs to the job
PENDING = 64  # strangers at a time; the oldest makes room
LINGER = 2.0  # seconds that closing waits for the other end
MESSAGE, GOODBYE, READY = 0, 1, 2
MAGIC = b"RINGLET1"
NONCE = 32
_HEADER = struct.Struct("<QB")
_HELLO = struct.Struct(f"<II{NONCE}s32s")  # rank, size, nonce, proof


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


class _Peer:
    """One connection as the hub sees it; ``rank`` is None until it has proved who it is."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.rank: int | None = None
        self.hello = b""
        self.nonce = secrets.token_bytes(NONCE)
        self.deadline = time.monotonic() + HANDSHAKE
        self.frames = Frames()
        self.queue = bytearray()
        self.polite = False  # it said goodbye
        self.writing = False  # the selector watches for room to write


class TcpHub(ControlPlane):
    """Rank 0's end: listens on ``listener``, runs the handler, and serves ranks 1 to size - 1."""

    def __init__(self, handler: Handler, size: int, secret: bytes, listener: socket.socket) -> None:
        self.rank = 0
        self.size = size
        self._secret = secret
        self._listener = listener
        self._inbox = Inbox()
        self._coordinator = Coordinator(handler, self._deliver, self._fail)
        self._lock = self._coordinator.lock
        self._pending: list[_Peer] = []
        self._peers: dict[int, _Peer] = {}
        self._opened = threading.Event()
        self._left_early: int | None = None
        self._closed = False
        self._pid = os.getpid()
        self._selector = selectors.DefaultSelector()
        self._waker, self._woken = socket.socketpair()
        for sock in (listener, self._waker, self._woken):
            sock.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, listener)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        _live.add(self)
        self._thread = threading.Thread(target=self._run, name="ringlet control", daemon=True)
        self._thread.start()

    def wait_open(self, timeout: float) -> None:
        """Return once all ranks have joined; raise PeerLost naming those that have not."""
        if self._opened.wait(timeout) and self._left_early is None:
            return
        if self._left_early is not None:
            missing = [self._left_early]
        else:
            missing = [r for r in range(1, self.size) if r not in self._peers]
        names = ", ".join(map(str, missing))
        raise PeerLost(f"ranks {names} did not join the control plane", missing)

    def send(self, message: bytes) -> None:
        """Call the handler from this thread."""
        usable(self._closed, self._pid)
        self._coordinator.message(0, message)

    def receive(self, timeout: float | None = None) -> list[bytes]:
        """Return the broadcasts since the last call; see ``ControlPlane``."""
        usable(self._closed, self._pid)
        return self._inbox.take(timeout)

    def wake(self) -> None:
        """Make ``receive`` return."""
        usable(self._closed, self._pid)
        self._inbox.wake()

    def close(self) -> None:
        """Say goodbye to everybody and stop serving."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        self._inbox.fail(RingError("this control plane is closed"))
        self._poke()
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * LINGER)

    # The hub thread.

    def _run(self) -> None:
        try:
            while not self._closed:
                soonest = min((peer.deadline for peer in self._pending), default=None)
                self._step(None if soonest is None else max(0.0, soonest - time.monotonic()))
                for peer in [p for p in self._pending if p.deadline <= time.monotonic()]:
                    self._drop(peer)
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
            elif key.data is self._listener:
                self._accept()
            elif key.data.sock.fileno() >= 0:  # not dropped on behalf of another event
                if mask & selectors.EVENT_WRITE:
                    with self._lock:
                        self._flush(key.data)
                if mask & selectors.EVENT_READ:
                    self._read(key.data)

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
        except OSError:
            return  # it gave up before we came to it
        prepare(sock)
        sock.setblocking(False)
        peer = _Peer(sock)
        self._selector.register(sock, selectors.EVENT_READ, peer)
        self._pending.append(peer)
        if len(self._pending) > PENDING + self.size:
            self._drop(self._pending[0])
        with contextlib.suppress(OSError):
            sock.send(MAGIC + peer.nonce)

    def _read(self, peer: _Peer) -> None:
        try:
            if peer.rank is None:
                data = peer.sock.recv(_HELLO.size + 1 - len(peer.hello))
            else:
                data = peer.sock.recv(1 << 18)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._drop(peer)
        elif peer.rank is None:
            self._greet(peer, data)
        else:
            self._take(peer, peer.rank, data)

    def _greet(self, peer: _Peer, data: bytes) -> None:
        peer.hello += data
        if len(peer.hello) < _HELLO.size:
            return None
        if len(peer.hello) > _HELLO.size:
            return self._drop(peer)
        rank, size, _, said = _HELLO.unpack(peer.hello)
        facts = peer.hello[: 8 + NONCE]
        genuine = hmac.compare_digest(said, proof(self._secret, b"client", peer.nonce, facts))
        if not genuine or size != self.size or not 0 < rank < size or rank in self._peers:
            return self._drop(peer)
        self._pending.remove(peer)
        peer.rank = rank
        with self._lock:
            self._peers[rank] = peer
            self._write(peer, proof(self._secret, b"server", peer.nonce, facts))
            if len(self._peers) == self.size - 1:
                for member in self._peers.values():
                    self._write(member, frame(READY))
        if len(self._peers) == self.size - 1:
            self._stop_listening()
            self._opened.set()
        return None

    def _take(self, peer: _Peer, rank: int, data: bytes) -> None:
        try:
            frames = peer.frames.feed(data)
        except ProtocolError:
            return self._drop(peer)
        for kind, message in frames:
            if kind == MESSAGE:
                self._coordinator.message(rank, message)
            elif kind == GOODBYE:
                peer.polite = True
                return self._drop(peer)
        return None

    def _drop(self, peer: _Peer) -> None:
        with contextlib.suppress(KeyError, ValueError):
            self._selector.unregister(peer.sock)
        if peer.rank is None:
            peer.sock.close()
            self._pending.remove(peer)
            return
        with self._lock:
            self._peers.pop(peer.rank, None)
            peer.sock.close()
        if not self._opened.is_set():
            self._left_early = self._left_early or peer.rank
            self._opened.set()
        elif peer.polite:
            self._coordinator.goodbye(peer.rank)
        else:
            self._coordinator.lost(peer.rank)

    def _stop_listening(self) -> None:
        self._selector.unregister(self._listener)
        self._listener.close()
        for stranger in list(self._pending):
            self._drop(stranger)

    def _part(self) -> None:
        with self._lock:
            for peer in self._peers.values():
                self._write(peer, frame(GOODBYE))
        deadline = time.monotonic() + LINGER
        while time.monotonic() < deadline and any(p.queue for p in self._peers.values()):
            with self._lock:
                for peer in self._peers.values():
                    self._flush(peer)
            self._selector.select(0.01)

    # Any thread that holds the lock.

    def _deliver(self, messages: list[bytes]) -> None:
        self._inbox.put(messages)
        data = b"".join([frame(MESSAGE, message) for message in messages])
        for peer in self._peers.values():
            self._write(peer, data)

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
        peers = [peer.sock for peer in [*self._pending, *self._peers.values()]]
        release([self._listener, self._waker, self._woken, *peers])
        self._selector.close()


class TcpControl(ControlPlane):
    """The end of a rank other than 0, over ``sock``, whose handshake is done."""

    def __init__(self, sock: socket.socket, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._sock = sock
        self._frames = Frames()
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._gone: str | None = None
        self._closed = False
        self._pid = os.getpid()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._wake_pending = False
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)
        _live.add(self)

    def send(self, message: bytes) -> None:
        """Send ``message`` to rank 0."""
        usable(self._closed, self._pid)
        data = frame(MESSAGE, message)
        try:
            with self._sending:
                self._sock.sendall(data)
        except OSError as error:
            usable(self._closed, self._pid)
            why = self._gone or f"rank 0, the coordinator, is gone: {error}"
            raise PeerLost(why, [0]) from error

    def receive(self, timeout: float | None = None) -> list[bytes]:
        """Return the broadcasts since the last call; see ``ControlPlane``."""
        usable(self._closed, self._pid)
        deadline = None if timeout is None else time.monotonic() + timeout
        with self._receiving:
            while True:
                usable(self._closed, self._pid)
                if self._gone is not None:
                    raise PeerLost(self._gone, [0])
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                ready = {fd for fd, _ in self._poll.poll(None if left is None else left * 1e3)}
                woken = self._woken.fileno() in ready
                if woken:
                    self._wake_pending = False  # first: a wake-up from here on ends this call
                    self._woken.recv(4096)
                    usable(self._closed, self._pid)
                messages = self._read() if self._sock.fileno() in ready else []
                if messages or woken or not ready:
                    return messages

    def wake(self) -> None:
        """Make ``receive`` return."""
        usable(self._closed, self._pid)
        self._wake()

    def close(self) -> None:
        """Say goodbye, and wait a moment until rank 0 has read it."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        self._wake()
        polite = self._sending.acquire(timeout=LINGER)
        try:
            if polite and self._gone is None:
                self._sock.settimeout(LINGER)
                self._sock.sendall(frame(GOODBYE))
                self._sock.shutdown(socket.SHUT_WR)
                deadline = time.monotonic() + LINGER
                while time.monotonic() < deadline and self._sock.recv(1 << 16):
                    pass
        except OSError:
            pass  # rank 0 went first
        finally:
            shut(self._sock)
            idle = self._receiving.acquire(timeout=LINGER)
            self._abandon()
            for lock, held in ((self._sending, polite), (self._receiving, idle)):
                if held:
                    lock.release()

    def _read(self) -> list[bytes]:
        try:
            data = self._sock.recv(1 << 18, socket.MSG_DONTWAIT)
            frames = self._frames.feed(data)
        except BlockingIOError:
            return []
        except (OSError, ProtocolError) as error:
            self._gone = f"rank 0, the coordinator, is gone: {error}"
            return []
        if not data:
            self._gone = "rank 0, the coordinator, is gone: it closed the connection"
        elif any(kind == GOODBYE for kind, _ in frames):
            self._gone = "rank 0, the coordinator, closed the control plane"
        return [message for kind, message in frames if kind == MESSAGE]

    def _wake(self) -> None:
        if not self._wake_pending:
            self._wake_pending = True
            with contextlib.suppress(OSError):
                self._waker.send(b"\0")

    def _abandon(self) -> None:
        release([self._sock, self._waker, self._woken])


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


_live: weakref.WeakSet[Any] = weakref.WeakSet()


def _forget() -> None:
    # A child that kept these sockets open would hide the death of its parent from the others.
    for control in list(_live):
        control._abandon()


os.register_at_fork(after_in_child=_forget)
