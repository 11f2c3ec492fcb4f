"""What the network between the hosts of a job can do: latency and bandwidth of each link."""

from __future__ import annotations

import contextlib
import hmac
import json
import secrets
import socket
import statistics
import struct
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from ringlet.ring.communicator import Communicator
from ringlet.ring.network import listen, own_address, split_port, with_port

PATIENCE = 15.0  # seconds that the other end may take for a step
PINGS = 31
CHUNK = 1 << 18
_TOKEN = 32
_TOLD = struct.Struct("!Qd")


@dataclass(frozen=True)
class Link:
    """One direction between two hosts: ``latency`` in seconds one way, ``rate`` in bytes/s.

    ``error`` says why nothing could be measured.
    """

    source: str
    target: str
    latency: float = 0.0
    rate: float = 0.0
    error: str = ""


def measure_links(
    comm: Communicator,
    hosts: Sequence[str],
    seconds: float = 1.0,
    pairs: Sequence[tuple[str, str]] | None = None,
) -> list[Link]:
    """Measure, pair after pair, the links between the hosts; collective, the same on every rank.

    ``hosts`` is the host of every rank; the first rank of each takes part. ``pairs`` are the hosts
    to measure from and to; by default up to four hosts are measured each with each, more in a ring.
    A link is filled for ``seconds``.
    """
    leaders = {host: list(hosts).index(host) for host in dict.fromkeys(hosts)}
    names = list(leaders)
    if len(names) == 1:
        return []
    token, where = secrets.token_bytes(_TOKEN), ""
    listener: socket.socket | None = None
    problem = ""
    if comm.rank in leaders.values():
        try:
            listener = listen(own_address(), backlog=8)
            where = with_port(*listener.getsockname()[:2])
        except (OSError, RuntimeError) as error:
            problem = str(error)
    told = comm.allgather_bytes(token + json.dumps([where, problem]).encode())
    places = {host: json.loads(told[rank][_TOKEN:]) for host, rank in leaders.items()}
    shared = told[0][:_TOKEN]
    if pairs is None and len(names) <= 4:
        pairs = [(a, b) for a in names for b in names if a != b]
    elif pairs is None:
        pairs = list(zip(names, names[1:] + names[:1], strict=True))
    measured: list[Link] = []
    try:
        for source, target in pairs:
            link: Link | None = None
            address, why_not = places[target]
            try:
                if why_not:
                    raise OSError(why_not)
                if comm.rank == leaders[source]:
                    link = _drive(source, target, address, shared, seconds)
                elif comm.rank == leaders[target]:
                    assert listener is not None
                    _answer(listener, shared)
            except OSError as failure:
                if comm.rank == leaders[source]:
                    link = Link(source, target, error=f"{address or target}: {failure}")
            said = comm.broadcast_bytes(
                None if link is None else json.dumps(asdict(link)).encode(), leaders[source]
            )
            measured.append(Link(**json.loads(said)))
    finally:
        if listener is not None:
            listener.close()
    return measured


def _drive(source: str, target: str, address: str, token: bytes, seconds: float) -> Link:
    with socket.create_connection(split_port(address), timeout=PATIENCE) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sock.sendall(token)
        trips = []
        for _ in range(PINGS):
            begin = time.perf_counter()
            sock.sendall(b"?")
            _receive(sock, 1)
            trips.append(time.perf_counter() - begin)
        # What waits in buffers here when the time is over would have to be waited for.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, CHUNK)
        data = bytes(CHUNK)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        received, spent = _TOLD.unpack(_receive(sock, _TOLD.size))
    return Link(source, target, statistics.median(trips) / 2, received / max(spent, 1e-9))


def _answer(listener: socket.socket, token: bytes) -> None:
    limit = time.monotonic() + PATIENCE
    while True:
        listener.settimeout(max(0.001, limit - time.monotonic()))
        sock, _ = listener.accept()
        with sock:
            sock.settimeout(PATIENCE)
            with contextlib.suppress(OSError):
                if not hmac.compare_digest(_receive(sock, _TOKEN), token):
                    continue  # a stranger
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                for _ in range(PINGS):
                    sock.sendall(_receive(sock, 1))
                # What arrives in the beginning fills buffers on the way: it is not counted.
                received, begin, last = 0, 0.0, 0.0
                warm = len(sock.recv(CHUNK))
                while data := sock.recv(CHUNK):
                    last = time.perf_counter()
                    if warm < 4 * CHUNK:
                        warm, begin = warm + len(data), last
                    else:
                        received += len(data)
                sock.sendall(_TOLD.pack(received, last - begin))
                return


def _receive(sock: socket.socket, nbytes: int) -> bytes:
    data = b""
    while len(data) < nbytes:
        piece = sock.recv(nbytes - len(data))
        if not piece:
            raise ConnectionResetError("the other end closed the connection")
        data += piece
    return data
