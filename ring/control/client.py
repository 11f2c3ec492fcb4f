"""The end of the control plane over TCP that ranks other than 0 hold."""

from __future__ import annotations

import os
import select
import socket
import threading
import time

from ringlet.ring.control.frame_kinds import (
    GOODBYE,
    KINDS,
    LIMIT,
    LINGER,
    MESSAGES,
    READY,
    live,
    pack,
    release,
    shut,
    unpack,
)
from ringlet.ring.control.in_process import usable
from ringlet.ring.control.plane import ControlPlane
from ringlet.ring.control.pulse import Pulse
from ringlet.ring.errors import PeerLost, ProtocolError
from ringlet.ring.wire.framing import OVERHEAD, Incoming, Outgoing
from ringlet.ring.wire.handshake import Keys, receive

# One text, however its end shows: a reset or an end of the stream, in sending or in receiving.
_GIVEN_UP = "not all ranks joined the control plane: rank 0's error says which are missing"
_GONE = "rank 0, the coordinator, is gone: its connection closed without a goodbye"


class TcpControl(ControlPlane):
    """The end of a rank other than 0, over ``sock``, whose handshake has led to ``keys``."""

    def __init__(self, sock: socket.socket, keys: Keys, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self._sock = sock
        self._incoming = Incoming(keys.receiving, KINDS, LIMIT)
        self._outgoing = Outgoing(keys.sending)
        self._sending = threading.Lock()
        self._receiving = threading.Lock()
        self._gone: str | None = None
        self._silence: str | None = None
        self.turns = 0  # calls of receive that have ended
        self.pulse: Pulse | None = None
        self._closed = False
        self._pid = os.getpid()
        self._waker, self._woken = socket.socketpair()
        self._waker.setblocking(False)
        self._wake_pending = False
        self._waking = 0  # the thread that is about to write the byte of that wake-up
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN)
        self._poll.register(self._woken, select.POLLIN)
        live.add(self)

    def wait_open(self, deadline: float) -> None:
        """Return once all ranks have joined; OSError when ``deadline`` (monotonic) comes first.

        Raises PeerLost, which names nobody, where rank 0 has given up.
        """
        told = self._incoming.feed(receive(self._sock, OVERHEAD, deadline))
        if told == [(GOODBYE, b"")]:
            raise PeerLost(_GIVEN_UP)
        if told != [(READY, b"")]:
            raise ProtocolError("the control plane's hub did not keep to the protocol")
        self._sock.settimeout(None)

    def send(self, message: bytes) -> None:
        """Send ``message`` to rank 0; nothing where that is gone, which ``receive`` tells."""
        usable(self._closed, self._pid)
        data = pack([message])
        try:
            with self._sending:
                self._sock.sendall(self._outgoing.frame(MESSAGES, data))
        except OSError:
            usable(self._closed, self._pid)

    def receive(self, timeout: float | None = None) -> list[bytes]:
        """Return the broadcasts since the last call; see ``ControlPlane``."""
        usable(self._closed, self._pid)
        try:
            return self._receive(timeout)
        finally:
            self.turns += 1

    def _receive(self, timeout: float | None) -> list[bytes]:
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
                    # In this order: a wake-up in between writes nothing, but this call returns
                    # anyway. The other way round its byte would be drained, its flag stay set.
                    self._woken.recv(4096)
                    self._wake_pending = False
                    usable(self._closed, self._pid)
                messages = self._read() if self._sock.fileno() in ready else []
                if messages or woken or not ready:
                    return messages

    def wake(self) -> None:
        """Make ``receive`` return."""
        usable(self._closed, self._pid)
        self._wake()

    def lose(self, rank: int, why: str) -> None:
        """Count rank 0 as lost though the connection still stands. From any thread."""
        self._silence = f"rank {rank}, the coordinator, is gone: {why}"
        shut(self._sock)

    def close(self) -> None:
        """Say goodbye, and wait a moment until rank 0 has read it."""
        if self._closed or self._pid != os.getpid():
            return
        if self.pulse is not None:
            self.pulse.close()
        self._closed = True
        self._wake()
        polite = self._sending.acquire(timeout=LINGER)
        try:
            if polite and self._gone is None:
                self._sock.settimeout(LINGER)
                self._sock.sendall(self._outgoing.frame(GOODBYE))
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
        frames: list[tuple[int, bytes]] = []
        messages: list[bytes] = []
        try:
            data = self._sock.recv(1 << 18, socket.MSG_DONTWAIT)
            frames = self._incoming.feed(data)
            messages = [message for _, body in frames for message in unpack(body)]
        except BlockingIOError:
            return []
        except ProtocolError as error:
            self._gone = self._silence or f"rank 0, the coordinator, is gone: {error}"
            return []
        except OSError:
            data = b""
        if not data:
            self._gone = self._silence or _GONE
        elif any(kind == GOODBYE for kind, _ in frames):
            self._gone = "rank 0, the coordinator, closed the control plane"
        return messages

    def _wake(self) -> None:
        # A signal's handler may run in the midst of this: it wakes by itself.
        own = threading.get_ident()
        if not self._wake_pending or self._waking == own:
            self._wake_pending, self._waking = True, own
            try:
                self._waker.send(b"\0")
            except OSError:  # closed, or there are bytes in plenty
                pass
            except BaseException:  # the handler's: nothing may be on its way
                self._wake_pending = False
                raise
            finally:
                self._waking = 0

    def _abandon(self) -> None:
        release([self._sock, self._waker, self._woken])
