"""The compressed allreduce over two levels, as a sequence of operations on the wire.

1. a reduce-scatter inside the host: local rank l holds shard l of the host's sum;
2. encoding that shard, and an exchange of payloads between the hosts' ranks of local rank l;
3. an all-gather of the decoded shards inside the host.

Encoding comes after bytes have moved, so a codec that fails on one rank does so when others wait
for it. Ranks therefore agree twice. Before payloads travel, those that exchange them tell each
other their sizes, or that there is none: then none of them sends. And before the output is written
all ranks agree, inside the host and between hosts, that every shard is there; otherwise all raise
the same error, and no output is touched.

Each collective has a communicator of its own (a lane), so that those of several exchanges can be
under way at once. Which one is the same on all ranks, whether they send payloads or not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from ringlet.ring.collectives.codec import Codec
from ringlet.ring.collectives.compressed import (
    AllgatherReduce,
    Allocate,
    Encoded,
    Exchange,
    ScatterReduce,
    encode,
    new_bytes,
)
from ringlet.ring.collectives.seal import SEAL
from ringlet.ring.dtypes import Array
from ringlet.ring.errors import ExchangeFailed, Mismatch, PeerLost, ProtocolError
from ringlet.ring.pipeline import Steps, Wire
from ringlet.ring.transports.hierarchical import HierarchicalCommunicator


def _nothing() -> None:
    pass


def _aligned(nbytes: int) -> int:
    return -(-nbytes // 64) * 64


@dataclass(frozen=True)
class HostShard:
    """What this rank compresses: its part of the host's sum.

    ``codec`` encodes ``values`` (flat float32), which the exchange fills beforehand, and decodes
    into ``result`` (as many float32). Its parts are 1, then payloads are gathered, or as many as
    there are hosts, then they are reduced part by part and are of fixed size.
    """

    codec: Codec
    values: Array
    result: Array


def room_of(codec: Codec, hosts: int, mine: int) -> int:
    """Return the bytes that ``two_level`` allocates on host ``mine``, where capacities are known.

    Those that ``prepare`` tells are not.
    """
    sizes = [codec.capacity(part) + SEAL for part in range(codec.parts)]
    taken = [sum(sizes)]
    if codec.parts == 1:
        taken += [hosts * sizes[0]]
    else:
        taken += [hosts * sizes[mine], sizes[mine], sum(sizes)]
    return sum(map(_aligned, taken))


def within(buffer: Array) -> Allocate:
    """Return what allocates one piece of ``buffer`` (uint8) after the other."""
    used = 0

    def allocate(nbytes: int) -> Array:
        nonlocal used
        start, used = used, used + _aligned(nbytes)
        if used > buffer.size:
            raise MemoryError(f"{used} bytes were to be taken of {buffer.size}")
        return buffer[start : start + nbytes]

    return allocate


def two_level(
    lane: Callable[[int], HierarchicalCommunicator],
    send: Array,
    receive: Array,
    counts: Sequence[int],
    shard: HostShard,
    allocate: Allocate = new_bytes,
    plan: int = 0,
) -> Steps:
    """Sum ``send`` (flat float32) over all ranks into ``receive``; collective.

    A generator that yields what communicates, for a pipeline or for ``run``, and encodes and
    decodes in between. ``lane(i)`` makes collective i, counted from 0: one communicator, or
    siblings of it. Only what leaves the host counts as sent. ``counts`` are the elements of each
    local rank's shard, the same on every host; ``send`` and ``receive`` may be one array. All ranks
    end with the same bits.

    Raises ValueError for a codec of another number of parts. When a codec fails on any rank, or a
    payload arrives damaged, raises ExchangeFailed on all ranks, with one text, and leaves
    ``receive`` as it was.
    """
    codec, hosts = shard.codec, lane(0).cross.size
    if codec.parts not in (1, hosts):
        raise ValueError(f"a shard's codec has 1 part or {hosts}, one per host, not {codec.parts}")
    yield Wire(partial(lane(0).reduce_within, send, shard.values, counts))
    failure: Exception | None = None
    encoded = Encoded(np.empty(0, np.uint8), [])
    try:
        encoded = _encode(codec, allocate)
    except Exception as error:
        failure = error
    sizes = np.empty(hosts, np.int64)
    own = np.array([-1 if failure else encoded.nbytes], np.int64)
    yield Wire(partial(lane(1).cross.allgather, own, sizes))
    exchange: Exchange
    moves = 2 if codec.parts == 1 else 3  # collectives of the exchange of payloads
    if (sizes >= 0).all():
        comm, later = lane(2).cross, [lane(3).cross, lane(4).cross]
        if codec.parts == 1:
            known = [int(n) for n in sizes]
            exchange = AllgatherReduce(comm, codec, encoded, known, allocate, plan, later)
        else:
            exchange = ScatterReduce(comm, codec, encoded, allocate, plan, later)
        yield Wire(exchange.start, exchange.sent)
        exchange.reduce()
        for collective in (*exchange.rest, exchange.agree):
            kept = _Kept(collective)
            yield Wire(kept)
            failure = failure or kept.failure
        if failure is None:
            try:
                exchange.decode()
            except Exception as error:
                failure = error
    else:  # of other shards payloads may travel
        yield from [Wire(_nothing)] * moves
    yield from _agree(lane, 2 + moves, failure)
    yield Wire(partial(lane(4 + moves).gather_within, shard.result, receive, counts))


def run(steps: Steps) -> int:
    """Take every step of ``two_level``; return the bytes that this rank sent to other hosts."""
    sent = 0
    for wire in steps:
        wire.call()
        sent += round(wire.nbytes)
    return sent


class _Kept:
    """A call whose failure waits until all ranks can hear of it, unless the transport's own."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self.failure: Exception | None = None

    def __call__(self) -> None:
        try:
            self._call()
        except (PeerLost, Mismatch):
            raise
        except Exception as error:
            self.failure = error


def _encode(codec: Codec, allocate: Allocate) -> Encoded:
    encoded = encode(codec, allocate)
    wanted = [codec.capacity(part) + SEAL for part in range(codec.parts)]
    if codec.parts > 1 and encoded.counts != wanted:
        raise ProtocolError(f"parts have {encoded.counts} bytes, but fixed sizes are {wanted}")
    return encoded


def _agree(
    lane: Callable[[int], HierarchicalCommunicator], first: int, failure: Exception | None
) -> Steps:
    """Raise ExchangeFailed on every rank if there was a ``failure`` on any."""
    local, cross = lane(first).local, lane(first + 1).cross
    if isinstance(failure, ExchangeFailed) and isinstance(failure.__cause__, Exception):
        failure = failure.__cause__
    here, everywhere = np.empty(local.size, np.int64), np.empty(cross.size, np.int64)
    own = np.array([failure is not None], np.int64)
    yield Wire(partial(local.allgather, own, here))
    host = np.array([here.any()], np.int64)
    yield Wire(partial(cross.allgather, host, everywhere))
    if not everywhere.any():
        return
    comm, said = lane(first + 2), list[bytes]()
    text = "" if failure is None else _told(comm.origin[comm.rank], failure)
    yield Wire(lambda: said.extend(comm.allgather_bytes(text.encode(errors="backslashreplace"))))
    told = [words.decode() for words in said]
    witness = min(
        (rank for rank, words in enumerate(told) if words), key=lambda rank: told[rank][0]
    )
    raise ExchangeFailed(told[witness][1:], witness) from failure


def _told(rank: int, failure: Exception) -> str:
    """Put ``failure`` in words, behind a digit: causes come before what others saw of them."""
    if isinstance(failure, ProtocolError):
        return f"1{failure}"
    what = f"{type(failure).__name__}: {failure}"
    return f"0the codec of rank {rank} failed on its host's sum: {what}"
