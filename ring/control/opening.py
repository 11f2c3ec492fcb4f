"""Opening a control plane: which kind, on which address, and how a rank joins its hub."""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import subprocess
import time
from pathlib import Path

from ringlet.ring.communicator import Communicator
from ringlet.ring.control.client import TcpControl
from ringlet.ring.control.frame_kinds import HANDSHAKE, prepare
from ringlet.ring.control.hub import Severed, TcpHub
from ringlet.ring.control.in_process import LocalControl, LocalHub
from ringlet.ring.control.plane import ControlPlane, Handler
from ringlet.ring.control.pulse import Pulse, seconds_from, start
from ringlet.ring.errors import PeerLost, ProtocolError, RingError
from ringlet.ring.interrupt import interrupter
from ringlet.ring.transports.local import LocalCommunicator
from ringlet.ring.wire.addresses import listen, own_address
from ringlet.ring.wire.framing import derive
from ringlet.ring.wire.handshake import Claim, connect_as
from ringlet.ring.wire.keys import agreed_key

TIMEOUT = 60.0  # seconds until all ranks must have joined
_RANK = 0  # the one role that there is
_SALT = 16  # bytes that tell one control plane from the next


def open_control(
    comm: Communicator, handler: Handler | None = None, timeout: float = TIMEOUT
) -> ControlPlane:
    """Open the control plane of ``comm``'s ranks; collective.

    ``handler`` is rank 0's; what other ranks pass is ignored. Ranks of different hosts meet at the
    address of the network interface that RINGLET_IFACE names on rank 0, else at the one that the
    launcher found, else at rank 0's own.
    Ranks that are silent for RINGLET_HEARTBEAT seconds (default 5, rank 0's counts; 0: for ever)
    are lost. Raises PeerLost when a rank has not joined after ``timeout`` seconds.
    """
    comm = comm.base
    if isinstance(comm, LocalCommunicator) or comm.size == 1:
        return _open_local(comm, handler)
    hosts = comm.allgather_bytes(_host())
    key = agreed_key(comm, "control plane", os.environ)
    if comm.rank == 0:
        return _open_as_hub(comm, handler, key, len(set(hosts)) == 1, timeout)
    return _meet_hub(comm, key, timeout)


def _open_as_hub(
    comm: Communicator, handler: Handler | None, key: bytes, one_host: bool, timeout: float
) -> TcpHub:
    """Listen as rank 0, tell the others where and how, and wait until they have joined."""
    listeners: list[socket.socket] = []
    try:
        if handler is None:
            raise ValueError("rank 0 needs a handler")
        heartbeat = seconds_from(os.environ)
        address = "127.0.0.1" if one_host else own_address()
        listeners.extend(listen(address) for _ in range(2))
    except Exception:
        comm.broadcast_bytes(b"")  # the others wait to be told
        raise
    ports = " ".join(str(listener.getsockname()[1]) for listener in listeners)
    salt = secrets.token_bytes(_SALT)
    secret = derive(key, salt.hex())
    hub = TcpHub(handler, comm.size, secret, listeners[0])
    process: subprocess.Popen[bytes] | None = None
    if heartbeat:
        process = start(0, comm.size, heartbeat, secret, (listeners[1].fileno(),))
    listeners[1].close()  # the heartbeat has it
    if process is None:
        heartbeat = 0.0  # on all ranks
    else:
        _watch(hub, process, heartbeat, comm)
    try:
        comm.broadcast_bytes(salt + f"{address} {ports} {heartbeat!r}".encode())
        hub.wait_open(timeout, lambda: _severed(comm))
    except BaseException:
        hub.close()
        raise
    return hub


def _meet_hub(comm: Communicator, key: bytes, timeout: float) -> TcpControl:
    """Join rank 0 where and how it tells, with a heartbeat where it has one."""
    meeting = comm.broadcast_bytes(None)
    if not meeting:
        raise RingError("rank 0 could not open the control plane; its own error says why")
    address, port, pulse, seconds = meeting[_SALT:].decode().split(" ")
    secret = derive(key, meeting[:_SALT].hex())
    beating, limit = None, float(seconds)
    if limit:
        listener = address, int(pulse)
        beating = start(comm.rank, comm.size, limit, secret, listener, timeout)
    try:
        where = address, int(port)
        control = join(where, secret, comm.rank, comm.size, timeout, lambda: _severed(comm))
    except BaseException:
        if beating is not None:
            beating.kill()
            beating.wait()
        raise
    if beating is not None:
        _watch(control, beating, limit, comm).wait_joined(timeout)
    return control


def _watch(
    control: TcpHub | TcpControl,
    process: subprocess.Popen[bytes],
    seconds: float,
    comm: Communicator,
) -> Pulse:
    """Hear of the ranks that ``control`` connects by the heartbeat of this one, ``process``."""
    pulse = control.pulse = Pulse(
        process, control.rank, seconds, control.lose, lambda: control.turns, interrupter(comm)
    )
    return pulse


def join(
    where: tuple[str, int],
    secret: bytes,
    rank: int,
    size: int,
    timeout: float = TIMEOUT,
    severed: Severed = list,
) -> TcpControl:
    """Connect rank ``rank`` to the hub at ``where`` and wait until all ranks have joined.

    Raises PeerLost where that cannot be, as far as it is known at once where ranks are ``severed``.
    """
    deadline = time.monotonic() + timeout
    while True:
        left = deadline - time.monotonic()
        sock: socket.socket | None = None
        control: TcpControl | None = None
        try:
            sock = socket.create_connection(where, timeout=max(0.001, min(left, HANDSHAKE)))
            prepare(sock)
            limit = min(deadline, time.monotonic() + HANDSHAKE)
            keys = connect_as(sock, secret, Claim(_RANK, rank, size), limit, deadline)
            control = TcpControl(sock, keys, rank, size)
            control.wait_open(deadline)
            return control
        except (OSError, ProtocolError, PeerLost) as error:
            if sock is not None:
                sock.close()
            if control is not None:
                control.close()
            text = f"rank {rank} could not join the control plane at {where[0]}:{where[1]}"
            if lost := severed():
                names = ", ".join(map(str, lost))
                raise PeerLost(f"{text}: the connection to {names} has ended", lost) from error
            if isinstance(error, PeerLost):
                raise
            if isinstance(error, ProtocolError) or time.monotonic() + 0.05 >= deadline:
                raise PeerLost(f"{text}: {error}", [0]) from error
        time.sleep(0.05)


def _severed(comm: Communicator) -> list[int]:
    """Return the ranks of ``comm`` to which its own connections have ended."""
    ended = comm.severed()
    return [rank for rank in range(comm.size) if ended and comm.origin[rank] in ended]


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
