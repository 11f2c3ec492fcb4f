"""What the network between the hosts of a job can do: latency and bandwidth of each link."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import statistics
import struct
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise

from ringlet.ring.communicator import Communicator
from ringlet.ring.errors import ProtocolError
from ringlet.ring.wire.addresses import listen, own_address, split_port, with_port
from ringlet.ring.wire.framing import OVERHEAD, Incoming, Outgoing
from ringlet.ring.wire.handshake import CLAIM, Claim, Listening, connect_as, receive
from ringlet.ring.wire.keys import agreed_key

PATIENCE = 15.0  # seconds that the other end may take for a step
STRANGER = 3.0  # seconds in which it has to prove itself
PINGS = 31
CHUNK = 1 << 18
PIECES = 32  # of what arrives, each timed by itself
_TOLD = struct.Struct("!Qd")


@dataclass(frozen=True)
class MeasuredLink:
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
) -> list[MeasuredLink]:
    """Measure, pair after pair, the links between the hosts; collective, the same on every rank.

    ``hosts`` is the host of every rank; the first rank of each takes part. ``pairs`` are the hosts
    to measure from and to; by default up to four hosts are measured each with each, more in a ring.
    A link is filled for ``seconds``.
    """
    leaders = {host: list(hosts).index(host) for host in dict.fromkeys(hosts)}
    names = list(leaders)
    if len(names) == 1:
        return []
    shared, where = agreed_key(comm, "links", os.environ), ""
    listener: socket.socket | None = None
    problem = ""
    if comm.rank in leaders.values():
        try:
            listener = listen(own_address(), backlog=8)
            where = with_port(*listener.getsockname()[:2])
        except (OSError, RuntimeError) as error:
            problem = str(error)
    told = comm.allgather_bytes(json.dumps([where, problem]).encode())
    places = {host: json.loads(told[rank]) for host, rank in leaders.items()}
    if pairs is None and len(names) <= 4:
        pairs = [(a, b) for a in names for b in names if a != b]
    elif pairs is None:
        pairs = list(zip(names, names[1:] + names[:1], strict=True))
    measured: list[MeasuredLink] = []
    try:
        for source, target in pairs:
            link: MeasuredLink | None = None
            address, why_not = places[target]
            try:
                if why_not:
                    raise OSError(why_not)
                if comm.rank == leaders[source]:
                    link = _drive(source, target, address, shared, seconds)
                elif comm.rank == leaders[target]:
                    assert listener is not None
                    _answer(listener, shared)
            except (OSError, ProtocolError) as failure:
                if comm.rank == leaders[source]:
                    link = MeasuredLink(source, target, error=f"{address or target}: {failure}")
            said = comm.broadcast_bytes(
                None if link is None else json.dumps(asdict(link)).encode(), leaders[source]
            )
            measured.append(MeasuredLink(**json.loads(said)))
    finally:
        if listener is not None:
            listener.close()
    return measured


def _drive(source: str, target: str, address: str, key: bytes, seconds: float) -> MeasuredLink:
    with socket.create_connection(split_port(address), timeout=PATIENCE) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        keys = connect_as(sock, key, Claim(0, 0, 0), time.monotonic() + PATIENCE)
        sock.settimeout(PATIENCE)
        trips = []
        for _ in range(PINGS):
            begin = time.perf_counter()
            sock.sendall(b"?")
            receive(sock, 1, time.monotonic() + PATIENCE)
            trips.append(time.perf_counter() - begin)
        # What waits in buffers here when the time is over would have to be waited for.
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, CHUNK)
        data = bytes(CHUNK)
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        frame = receive(sock, OVERHEAD + _TOLD.size, time.monotonic() + PATIENCE)
        ((_, told),) = Incoming(keys.receiving, {0}, _TOLD.size).feed(frame)
        received, spent = _TOLD.unpack(told)
    return MeasuredLink(source, target, statistics.median(trips) / 2, received / max(spent, 1e-9))


def _answer(listener: socket.socket, key: bytes) -> None:
    limit = time.monotonic() + PATIENCE
    while (left := limit - time.monotonic()) > 0:  # strangers may come without end
        listener.settimeout(left)
        sock, _ = listener.accept()
        with sock, contextlib.suppress(OSError, ProtocolError):  # of a stranger
            handshake = Listening()
            sock.sendall(handshake.greeting)
            claim = receive(sock, CLAIM, min(limit, time.monotonic() + STRANGER))
            _, welcome, keys = handshake.answer(claim, lambda _: key)
            sock.sendall(welcome)
            sock.settimeout(PATIENCE)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for _ in range(PINGS):
                sock.sendall(receive(sock, 1, time.monotonic() + PATIENCE))
            # What arrives in the beginning fills buffers on the way: it is not counted.
            marks, last = [(0, 0.0)], 0.0  # bytes that are counted, and when they were there
            first = len(sock.recv(CHUNK))
            warm, opened = first, time.perf_counter()
            while data := sock.recv(CHUNK):
                last = time.perf_counter()
                if warm < 4 * CHUNK:
                    warm, marks = warm + len(data), [(0, last)]
                else:
                    marks.append((marks[-1][0] + len(data), last))
            if len(marks) == 1:  # a link so slow that no more came
                marks = [(0, opened), (warm - first, last)]
            sock.sendall(Outgoing(keys.sending).frame(0, _TOLD.pack(*_steady(marks))))
            return
    raise TimeoutError("timed out")


def _steady(marks: Sequence[tuple[int, float]]) -> tuple[int, float]:
    """Return how many bytes came, and in how many seconds they do as fast as most of them did.

    One of the two processes may have stood still for a part of the time, on a machine that is busy.
    """
    (_, begin), (received, end) = marks[0], marks[-1]
    edges = marks[:: max(1, len(marks) // PIECES)]
    if len(edges) <= PIECES // 2:
        return received, end - begin
    rates = [(b - a) / max(till - since, 1e-9) for (a, since), (b, till) in pairwise(edges)]
    return received, received / statistics.median(rates)
