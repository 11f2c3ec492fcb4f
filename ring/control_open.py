"""Opening a control plane: which kind, on which address, and how a rank joins its hub."""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
import socket
import struct
import time
from pathlib import Path

from ringlet.ring.communicator import Communicator
from ringlet.ring.control import ControlPlane, Handler
from ringlet.ring.control_frames import HANDSHAKE, MAGIC, NONCE, READY, frame, prepare, proof
from ringlet.ring.control_hub import TcpHub
from ringlet.ring.control_local import LocalControl, LocalHub
from ringlet.ring.control_pulse import Pulse, Register, seconds_from
from ringlet.ring.control_tcp import TcpControl
from ringlet.ring.errors import PeerLost, ProtocolError, RingError
from ringlet.ring.interrupt import interrupter
from ringlet.ring.local import LocalCommunicator
from ringlet.ring.network import listen, own_address

TIMEOUT = 60.0  # seconds until all ranks must have joined
_SECRET = 32


def open_control(
    comm: Communicator, handler: Handler | None = None, timeout: float = TIMEOUT
) -> ControlPlane:
    """Open the control plane of ``comm``'s ranks; collective.

    ``handler`` is rank 0's; what other ranks pass is ignored. Ranks of different hosts meet at the
    address of the network interface that RINGLET_IFACE names on rank 0, else at the one that the
    launcher found, else at rank 0's own.
    Ranks that are silent for RINGLET_HEARTBEAT seconds (default 60, rank 0's counts; 0: for ever)
    are lost. Raises PeerLost when a rank has not joined after ``timeout`` seconds.
    """
    comm = comm.base
    if isinstance(comm, LocalCommunicator) or comm.size == 1:
        return _open_local(comm, handler)
    hosts = comm.allgather_bytes(_host())
    if comm.rank != 0:
        meeting = comm.broadcast_bytes(None)
        if not meeting:
            raise RingError("rank 0 could not open the control plane; its own error says why")
        address, port, pulse, seconds = meeting[_SECRET:].decode().split(" ")
        secret = meeting[:_SECRET]
        control = join((address, int(port)), secret, comm.rank, comm.size, timeout)
        if float(seconds):
            try:
                beats = join((address, int(pulse)), secret, comm.rank, comm.size, timeout)
            except BaseException:
                control.close()
                raise
            _watch(control, beats, float(seconds), comm)
        return control
    listeners: list[socket.socket] = []
    try:
        if handler is None:
            raise ValueError("rank 0 needs a handler")
        heartbeat = seconds_from(os.environ)
        address = "127.0.0.1" if len(set(hosts)) == 1 else own_address()
        listeners.extend(listen(address) for _ in range(2))
    except Exception:
        comm.broadcast_bytes(b"")
        raise
    ports = " ".join(str(listener.getsockname()[1]) for listener in listeners)
    secret = secrets.token_bytes(_SECRET)
    hub = TcpHub(handler, comm.size, secret, listeners[0])
    register = Register(comm.size)
    beats_hub = TcpHub(register, comm.size, secret, listeners[1])
    try:
        comm.broadcast_bytes(secret + f"{address} {ports} {heartbeat!r}".encode())
        hub.wait_open(timeout)
        if heartbeat:
            beats_hub.wait_open(timeout)
    except BaseException:
        beats_hub.close()
        hub.close()
        raise
    if heartbeat:
        register.forgive()
        _watch(hub, beats_hub, heartbeat, comm, register)
    else:
        beats_hub.close()
    return hub


def _watch(
    control: TcpHub | TcpControl,
    beats: TcpHub | TcpControl,
    seconds: float,
    comm: Communicator,
    register: Register | None = None,
) -> None:
    """Listen, on ``beats``, for signs of life of the ranks that ``control`` connects."""
    control.pulse = Pulse(
        beats, seconds, control.lose, lambda: control.turns, interrupter(comm), register
    )


def join(
    where: tuple[str, int], secret: bytes, rank: int, size: int, timeout: float = TIMEOUT
) -> TcpControl:
    """Connect rank ``rank`` to the hub at ``where`` and wait until all ranks have joined."""
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        sock: socket.socket | None = None
        try:
            sock = socket.create_connection(where, timeout=max(0.001, min(left, HANDSHAKE)))
            prepare(sock)
            _prove(sock, secret, rank, size)
            if _receive(sock, len(frame(READY)), deadline) != frame(READY):
                raise ProtocolError("the control plane's hub did not keep to the protocol")
            sock.settimeout(None)
            return TcpControl(sock, rank, size)
        except (OSError, ProtocolError) as error:
            if sock is not None:
                sock.close()
            if isinstance(error, ProtocolError) or time.monotonic() + 0.05 >= deadline:
                text = f"rank {rank} could not join the control plane at {where[0]}:{where[1]}"
                raise PeerLost(f"{text}: {error}", [0]) from error
        time.sleep(0.05)


def _prove(sock: socket.socket, secret: bytes, rank: int, size: int) -> None:
    deadline = time.monotonic() + HANDSHAKE
    greeting = _receive(sock, len(MAGIC) + NONCE, deadline)
    if not greeting.startswith(MAGIC):
        raise ProtocolError("what listens there is not a Ringlet control plane of this version")
    challenge = greeting[len(MAGIC) :]
    facts = struct.pack("<II", rank, size) + secrets.token_bytes(NONCE)
    sock.sendall(facts + proof(secret, b"client", challenge, facts))
    answer = _receive(sock, 32, deadline)
    if not hmac.compare_digest(answer, proof(secret, b"server", challenge, facts)):
        raise ProtocolError("what listens there does not know this job's secret")


def _receive(sock: socket.socket, nbytes: int, deadline: float) -> bytes:
    data = b""
    while len(data) < nbytes:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        piece = sock.recv(nbytes - len(data))
        if not piece:
            raise ConnectionResetError("the hub closed the connection")
        data += piece
    return data


def _host() -> bytes:
    # Two containers may have one name, and one host may have several network namespaces.
    identity = [socket.gethostname()]
    with contextlib.suppress(OSError):
        identity.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        identity.append(os.readlink("/proc/self/ns/net"))
    return "|".join(identity).encode()


def _open_local(comm: Communicator, handler: Handler | None) -> ControlPlane:
    hub: LocalHub | None = None
    if comm.rank == 0:
        if handler is None:
            raise ValueError("rank 0 needs a handler")
        hub = LocalHub(handler, comm.size)
    if isinstance(comm, LocalCommunicator):
        if hub is not None:
            comm.world.watch(hub.leave)
        hub = comm.share(hub)
    assert hub is not None  # rank 0's, which every rank has now
    return LocalControl(hub, comm.rank)
