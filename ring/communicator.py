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
import json
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from operator import index
from typing import ClassVar

import numpy as np

from ringlet.ring.arguments import alike, divided, flat, same
from ringlet.ring.dtypes import Array, dtype_name
from ringlet.ring.errors import Mismatch, ProtocolError, RingError, again


class ReduceOp(enum.IntEnum):
    """How elements of different ranks combine. The values are the ones Horovod uses."""

    AVERAGE = 0
    SUM = 1
    ADASUM = 2
    MIN = 3
    MAX = 4
    PRODUCT = 5


_MOST = 1 << 28  # bytes of control data from one rank
FAR = 2e-3  # seconds that a message takes from which the number of messages matters most

_COMBINING: dict[int, ReduceOp] = {
    op: op for op in (ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT)
}


def reducing(op: ReduceOp | int) -> ReduceOp:
    """Return ``op``, which may be given by value, if it combines two elements into one."""
    found = _COMBINING.get(op)
    if found is None:
        raise ValueError(f"op must be SUM, MIN, MAX or PRODUCT, not {op!r}")
    return found


@dataclass(frozen=True)
class Topology:
    """Where a rank stands: among the ranks of its host (local) and across hosts (cross).

    A host is what the launcher or engine calls a node: there may be several on one machine.
    ``machine_rank`` counts the ranks before this one on what has the same host name.
    """

    local_rank: int
    local_size: int
    cross_rank: int
    cross_size: int
    hosts: tuple[str, ...]  # name of every rank's host, by rank
    machine_rank: int

    @classmethod
    def from_hosts(
        cls, rank: int, hosts: Sequence[str], machines: Sequence[str] | None = None
    ) -> Topology:
        """Derive the topology of ``rank`` from the host of every rank; ``machines`` are its names.

        Those are the same as ``hosts`` if they are not given.
        """
        machines = hosts if machines is None else machines
        before = list(machines[:rank]).count(machines[rank])
        names = list(dict.fromkeys(hosts))
        local = [r for r, host in enumerate(hosts) if host == hosts[rank]]
        local_rank = local.index(rank)
        peers = [h for h in names if list(hosts).count(h) > local_rank]
        cross_rank = peers.index(hosts[rank])
        return cls(local_rank, len(local), cross_rank, len(peers), tuple(hosts), before)


class Communicator(ABC):
    """A group of ``size`` ranks that move arrays between each other; this one is ``rank``.

    ``origin`` holds, by rank, the ranks of the communicator that everything began with: they
    differ from 0, 1, ... in a ``subset``, and are what errors name.

    The public methods check their arguments and whether the communicator can still be used, and
    serve a single rank; what a transport implements is called with valid arguments, by more than
    one rank.
    """

    name: ClassVar[str]

    def __init__(self, rank: int, size: int, origin: Sequence[int] | None = None) -> None:
        self.rank = rank
        self.size = size
        self.origin = tuple(range(size) if origin is None else origin)
        self.closed = False
        self.exchanges = 0  # compressed collectives so far, which payloads carry
        self.before_close: Callable[[], None] = lambda: None  # such as shutting an engine down
        self._error: RingError | None = None  # why no further call can be made
        self._subsets: list[Communicator] = []
        self._siblings: dict[int, Communicator] = {}

    @property
    def base(self) -> Communicator:
        """The communicator of the transport that moves the bytes: itself, unless made of another.

        It has the same ranks.
        """
        return self

    def allreduce(
        self, buffer: Array, op: ReduceOp = ReduceOp.SUM, dtype: str | None = None
    ) -> None:
        """Combine ``buffer`` (n elements) over all ranks, in place.

        ``op`` is SUM, MIN, MAX or PRODUCT; averaging is the caller's. ``dtype`` is
        ``"bfloat16"`` for bfloat16 held as uint16, else it is taken from the array. float16 and
        bfloat16 may be accumulated in float32 by the transport.
        """
        flat(buffer)
        op = reducing(op)
        name = dtype_name(buffer, dtype)
        self._usable()
        if self.size > 1:
            self._allreduce(buffer, op, name)

    def allgather(self, send: Array, receive: Array, counts: Sequence[int] | None = None) -> None:
        """Concatenate every rank's ``send`` into ``receive``, in rank order.

        ``counts`` gives the elements each rank sends; None means all send ``send.size``.
        ``receive`` has room for exactly their sum.
        """
        alike(send, receive)
        pieces = divided(counts, self.size, receive.size)
        same(pieces[self.rank], send, "send")
        self._usable()
        if self.size > 1:
            self._allgather(send, receive, pieces)
        else:
            receive[:] = send

    def expect(self, receive: Array) -> Callable[[Array], None]:
        """Get ready for an ``allgather`` of equal pieces into ``receive``; return what makes it.

        Collective, but waits for nobody: where messages take long, other ranks' pieces may arrive
        from now on, while other calls are made. What it returns is called once, with this rank's
        piece, and in the order of the calls of ``expect``. ``receive`` is not touched till then.
        """
        flat(receive)
        if receive.size % self.size:
            raise ValueError(f"{self.size} ranks cannot send equal pieces of {receive.size}")
        self._usable()
        gather = self._expect(receive) if self.size > 1 else partial(np.copyto, receive)

        def checked(send: Array) -> None:
            alike(send, receive)
            same(receive.size // self.size, send, "send")
            self._usable()
            gather(send)

        return checked

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
        alike(send, receive)
        sends = divided(send_counts, self.size, send.size)
        receives = divided(receive_counts, self.size, receive.size)
        self._usable()
        if self.size > 1:
            self._alltoall(send, receive, sends, receives)
        else:
            same(sends[0], receive, "receive")
            receive[:] = send

    def reduce_scatter(
        self,
        send: Array,
        receive: Array,
        counts: Sequence[int],
        op: ReduceOp = ReduceOp.SUM,
        dtype: str | None = None,
    ) -> None:
        """Combine ``send`` over all ranks; rank r receives the r-th piece of ``counts[r]``."""
        alike(send, receive)
        op = reducing(op)
        name = dtype_name(send, dtype)
        pieces = divided(counts, self.size, send.size)
        same(pieces[self.rank], receive, "receive")
        self._usable()
        if self.size > 1:
            self._reduce_scatter(send, receive, pieces, op, name)
        else:
            receive[:] = send

    def broadcast(self, buffer: Array, root: int = 0) -> None:
        """Overwrite ``buffer`` with the one of rank ``root``."""
        flat(buffer)
        if not 0 <= root < self.size:
            raise ValueError(f"root must be a rank below {self.size}, not {root}")
        self._usable()
        if self.size > 1:
            self._broadcast(buffer, root)

    def barrier(self) -> None:
        """Return once every rank has called it."""
        self._usable()
        if self.size > 1:
            self._barrier()

    def subset(self, ranks: Sequence[int]) -> Communicator | None:
        """Return a communicator of ``ranks`` only, whose rank r is ``ranks[r]`` of this one.

        Collective over all ranks of this communicator, whether they are members or not, with the
        same ``ranks``, which ascend. Returns None on ranks that are not among them. Subsets may
        overlap, and disjoint ones be used at the same time; a member that uses two overlapping
        ones does so in the same order as the others. Closing this communicator closes its subsets.

        Raises ValueError when ``ranks`` is empty, does not ascend, or names a rank that does not
        exist; Mismatch, with one text on all ranks, when they do not pass the same.
        """
        asked = json.dumps([r if isinstance(r, int) else index(r) for r in ranks])
        said = [json.loads(text) for text in self.allgather_bytes(asked.encode())]
        for rank, theirs in enumerate(said):
            if theirs != said[0]:
                raise Mismatch(f"rank 0 asked for the subset {said[0]}, rank {rank} for {theirs}")
        chosen = self._subset(_members(said[0], self.size))
        self._subsets = [subset for subset in self._subsets if not subset.closed]
        if chosen is not None:
            self._subsets.append(chosen)
        return chosen

    def sibling(self, number: int) -> Communicator | None:
        """Return sibling ``number`` (from 1) of this communicator; not collective.

        It has the same ranks, and its calls do not mix with this one's: another thread may make
        them at the same time. Closing this communicator closes it. None where the transport cannot
        wait for two calls at once, or keeps a core busy while it waits.
        """
        found = self._siblings.get(number)
        if found is None:
            self._usable()
            found = self._sibling(number)
            if found is not None:
                self._siblings[number] = found
        return found

    def reduce_on(self, number: int) -> None:
        """Let sibling ``number`` (0: this one) reduce by the transport's own ``allreduce``.

        The others' consist of messages, where a transport takes allreduces of two threads for each
        other. Not collective; before there are siblings, and the same on all ranks.
        """
        return

    def interrupt(self) -> None:
        """End calls that wait, made by any thread, with an error; from any thread.

        Afterwards the communicator is broken, on all ranks. Does nothing where a transport cannot.
        """
        return

    def reduces(self, op: ReduceOp, dtype: str) -> bool:
        """Whether ``allreduce`` is one operation of the transport's.

        Otherwise it consists of an all-to-all, sums, and an all-gather, which a pipeline overlaps.
        """
        return True

    def splits(self, buffer: Array) -> bool:
        """Whether ``allreduce`` of ``buffer`` goes through two levels, which a pipeline overlaps.

        Those are the attributes ``local`` and ``cross`` then. The same on all ranks.
        """
        return False

    @property
    def far(self) -> bool:
        """Whether messages are known to take ``FAR`` or longer, so that their number matters most.

        The same on all ranks.
        """
        return False

    @property
    def gathered(self) -> int:
        """Bytes over all ranks up to which ``allreduce`` gathers everything: one message, not two.

        The same on all ranks.
        """
        return 0

    @property
    def all_far(self) -> bool:
        """Whether ``far`` holds between any two ranks, not just the farthest; the same on all."""
        return False

    def severed(self) -> list[int]:
        """Return ``origin`` of the ranks to which a connection has ended, as far as is known."""
        return []

    def sums_in_float32(self, dtype: str) -> bool:
        """Whether sums of ``dtype``, a 16-bit float, are formed in float32 and rounded once.

        Otherwise they may be rounded at every hop. The same on all ranks.
        """
        return False

    def close(self) -> None:
        """Release the transport's resources and close subsets. Idempotent; safe after an error."""
        if self.closed:
            return
        self.closed = True
        self.before_close()  # whose user may have promised a last collective
        self._error = self._error or RingError("this communicator is closed")
        for other in (*self._subsets, *self._siblings.values()):
            other.close()
        self._subsets.clear()
        self._close()

    # What a transport implements.

    @abstractmethod
    def _allreduce(self, buffer: Array, op: ReduceOp, name: str) -> None:
        """Combine in place; ``name`` is the dtype's."""

    @abstractmethod
    def _allgather(self, send: Array, receive: Array, counts: list[int]) -> None:
        """Concatenate."""

    @abstractmethod
    def _alltoall(
        self, send: Array, receive: Array, send_counts: list[int], receive_counts: list[int]
    ) -> None:
        """Exchange pieces."""

    @abstractmethod
    def _reduce_scatter(
        self, send: Array, receive: Array, counts: list[int], op: ReduceOp, name: str
    ) -> None:
        """Combine; keep this rank's piece."""

    @abstractmethod
    def _broadcast(self, buffer: Array, root: int) -> None:
        """Copy the buffer of rank ``root``."""

    @abstractmethod
    def _barrier(self) -> None:
        """Wait for all ranks."""

    @abstractmethod
    def _subset(self, ranks: list[int]) -> Communicator | None:
        """Make a communicator of ``ranks``, which are the same on every rank; called by all."""

    @abstractmethod
    def _close(self) -> None:
        """Release what the transport holds; called once."""

    def _sibling(self, number: int) -> Communicator | None:
        return None

    def _expect(self, receive: Array) -> Callable[[Array], None]:
        counts = [receive.size // self.size] * self.size
        return lambda send: self._allgather(send, receive, counts)

    def _usable(self) -> None:
        if self._error is not None:
            raise again(self._error)

    # What follows is made of the collectives above.

    def allgather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's ``data``, by rank. For small control data, not for tensors.

        Raises ProtocolError, on every rank, if one announces more than 256 MiB.
        """
        sizes = np.zeros(self.size, np.int64)
        self.allgather(np.array([len(data)], np.int64), sizes)
        counts = [self._announced(int(n), rank) for rank, n in enumerate(sizes)]
        received = np.zeros(sum(counts), np.uint8)
        self.allgather(np.frombuffer(data, np.uint8), received, counts)
        ends = np.cumsum(counts)
        return [received[e - n : e].tobytes() for n, e in zip(counts, ends, strict=True)]

    def broadcast_bytes(self, data: bytes | None, root: int = 0) -> bytes:
        """Return rank ``root``'s ``data`` on every rank; others may pass None.

        Raises ProtocolError, on every rank, if the root announces more than 256 MiB.
        """
        length = np.array([len(data or b"")], np.int64)
        self.broadcast(length, root)
        buffer = np.zeros(self._announced(int(length[0]), root), np.uint8)
        if self.rank == root:
            buffer[:] = np.frombuffer(data or b"", np.uint8)
        self.broadcast(buffer, root)
        return buffer.tobytes()

    def _announced(self, size: int, rank: int) -> int:
        """Return ``size``, if that much may come from ``rank``: memory is taken for it."""
        if not 0 <= size <= _MOST:
            raise ProtocolError(
                f"rank {self.origin[rank]} announces {size} bytes of control data, and at most "
                f"{_MOST} are expected; do all ranks run the same version of Ringlet?"
            )
        return size


def _members(ranks: object, size: int) -> list[int]:
    """Return ``ranks`` if they make a subset of ``size`` ranks."""
    if not isinstance(ranks, list) or not ranks:
        raise ValueError(f"a subset has at least one rank, not {ranks!r}")
    for rank in ranks:
        if type(rank) is not int or not 0 <= rank < size:
            raise ValueError(f"ranks of a subset are integers from 0 to {size - 1}, not {rank!r}")
    for rank, following in pairwise(ranks):
        if following <= rank:
            raise ValueError(f"ranks of a subset ascend: {following} comes after {rank} in {ranks}")
    return ranks


def owner_offset(name: str, size: int) -> int:
    """Rank that owns the first shard of tensor ``name``: spreads small tensors over ``size``."""
    return zlib.crc32(name.encode()) % size
