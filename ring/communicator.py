"""The communicator contract: what a transport must offer, and nothing more.

Buffers are flat, C-contiguous, writable NumPy arrays owned by the caller. Every call is collective
and blocking: all ranks of the communicator make the same calls in the same order, one call at a
time. Calls may be made from any one thread, not from two at once. A call releases the GIL while it
waits. After an error the communicator is broken: close it.

After ``allreduce``, ``reduce_scatter`` (per rank), ``broadcast`` and the gathers, what ranks hold
in common is bit-identical on all of them.
"""

from __future__ import annotations

import enum
import zlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ringlet.ring.dtypes import Array


class ReduceOp(enum.IntEnum):
    """How elements of different ranks combine. The values are the ones Horovod uses."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


@dataclass(frozen=True)
class Topology:
    """Where a rank stands: among the ranks of its host (local) and across hosts (cross)."""

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hosts: tuple[str, ...]  # host name of every rank, by rank

    @classmethod
    def from_hosts(cls, rank: int, hosts: Sequence[str]) -> Topology:
        """Derive the topology of ``rank`` from the host name of every rank."""
        names = list(dict.fromkeys(hosts))
        local = [r for r, host in enumerate(hosts) if host == hosts[rank]]
        local_rank = local.index(rank)
        peers = [h for h in names if list(hosts).count(h) > local_rank]
        return cls(local_rank, len(local), peers.index(hosts[rank]), len(peers), tuple(hosts))


class Communicator(ABC):
    """A group of ``size`` ranks that move arrays between each other; this one is ``rank``."""

    name: ClassVar[str]
    rank: int
    size: int

    @abstractmethod
    def allreduce(
        self, buffer: Array, op: ReduceOp = ReduceOp.SUM, dtype: str | None = None
    ) -> None:
        """Combine ``buffer`` (n elements) over all ranks, in place.

        ``op`` is SUM, MIN, MAX or PRODUCT; averaging is the caller's. ``dtype`` is
        ``"bfloat16"`` for bfloat16 held as uint16, else it is taken from the array. float16 and
        bfloat16 may be accumulated in float32 by the transport.
        """

    @abstractmethod
    def allgather(self, send: Array, receive: Array, counts: Sequence[int] | None = None) -> None:
        """Concatenate every rank's ``send`` into ``receive``, in rank order.

        ``counts`` gives the elements each rank sends; None means all send ``send.size``.
        ``receive`` has room for exactly their sum.
        """

    @abstractmethod
    def alltoall(
        self,
        send: Array,
        receive: Array,
        send_counts: Sequence[int] | None = None,
        receive_counts: Sequence[int] | None = None,
    ) -> None:
        """Send consecutive pieces of ``send`` to ranks 0, 1, ...; receive theirs in rank order.

        Counts are elements per rank; None means equal pieces (``size`` divides the length).
        """

    @abstractmethod
    def reduce_scatter(
        self,
        send: Array,
        receive: Array,
        counts: Sequence[int],
        op: ReduceOp = ReduceOp.SUM,
        dtype: str | None = None,
    ) -> None:
        """Combine ``send`` over all ranks; rank r receives the r-th piece of ``counts[r]``."""

    @abstractmethod
    def broadcast(self, buffer: Array, root: int = 0) -> None:
        """Overwrite ``buffer`` with the one of rank ``root``."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it."""

    @abstractmethod
    def close(self) -> None:
        """Release the transport's resources. Idempotent, and safe after an error."""

    # What follows is made of the collectives above.

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's ``data``, by rank. For small control data, not for tensors."""
        sizes = np.zeros(self.size, np.int64)
        self.allgather(np.array([len(data)], np.int64), sizes)
        counts = [int(n) for n in sizes]
        received = np.zeros(sum(counts), np.uint8)
        self.allgather(np.frombuffer(data, np.uint8), received, counts)
        ends = np.cumsum(counts)
        return [received[e - n : e].tobytes() for n, e in zip(counts, ends, strict=True)]

    def broadcast_bytes(self, data: bytes | None, root: int = 0) -> bytes:
        """Return rank ``root``'s ``data`` on every rank; others may pass None."""
        length = np.array([len(data or b"")], np.int64)
        self.broadcast(length, root)
        buffer = np.zeros(int(length[0]), np.uint8)
        if self.rank == root:
            buffer[:] = np.frombuffer(data or b"", np.uint8)
        self.broadcast(buffer, root)
        return buffer.tobytes()


def owner_offset(name: str, size: int) -> int:
    """Rank that owns the first shard of tensor ``name``: spreads small tensors over ``size``."""
    return zlib.crc32(name.encode()) % size
