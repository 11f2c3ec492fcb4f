"""Two levels: dense inside a host, where bytes are cheap, and one shard a rank between hosts.

With L ranks on each of H hosts an allreduce of n bytes is

1. a reduce-scatter inside the host: local rank l holds shard l of the host's sum;
2. an allreduce of that shard, plain or compressed, among the ranks of all hosts with local rank l;
3. an all-gather inside the host.

A host sends 2(H-1)/H n bytes to others, compressed r times that. When all H L ranks exchange
compressed shards with each other instead, it sends L times as much.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np

from ringlet.ring.communicator import Communicator, ReduceOp, Topology
from ringlet.ring.dtypes import Array, storage
from ringlet.ring.rank_order import Scratch, even_counts

LEAST = 1 << 16  # bytes from which two levels pay: they take two more rounds of messages
BETWEEN = 1  # the sibling by which a pipeline reduces between hosts


class HierarchicalCommunicator(Communicator):
    """The ranks of ``flat``, whose large allreduces go through two levels.

    ``local`` holds the ranks of this host and ``cross`` those of other hosts with the same local
    rank; both are subsets of ``flat``. What is not an allreduce is ``flat``'s business, and subsets
    have two levels where that makes sense (``two_levels``). Every result is bit-identical on all
    ranks, as the contract demands; 16-bit floats are rounded once in each level.

    Collective. ``close`` closes ``flat`` too. Raises ValueError when hosts have different numbers
    of ranks, or when ``topology`` is of other ranks.
    """

    name = "hierarchical"

    def __init__(self, flat: Communicator, topology: Topology) -> None:
        super().__init__(flat.rank, flat.size, flat.origin)
        if len(topology.hosts) != flat.size:
            given = len(topology.hosts)
            raise ValueError(f"the topology is of {given} ranks, the communicator of {flat.size}")
        places = by_host(topology.hosts)
        if len({len(ranks) for ranks in places}) > 1:
            found = ", ".join(f"{len(ranks)} on {topology.hosts[ranks[0]]}" for ranks in places)
            raise ValueError(f"two levels need as many ranks on every host; there are {found}")
        self.flat, self.hosts = flat, topology.hosts
        self.local = _join(flat, places)
        self.cross = _join(flat, [list(ranks) for ranks in zip(*places, strict=True)])
        self._scratch = Scratch()

    @property
    def base(self) -> Communicator:
        """The communicator of the transport."""
        return self.flat.base

    def reduce_within(
        self, send: Array, shard: Array, counts: Sequence[int], dtype: str | None = None
    ) -> None:
        """Sum ``send`` over this host; local rank l receives the l-th piece, of ``counts[l]``.

        The first of the three steps, for callers that compress the second: they encode ``shard``,
        run a compressed collective on ``cross``, and hand the decoded shard to ``gather_within``.
        Counts are the same on every host. ``dtype`` is as in ``allreduce``.
        """
        self._usable()
        self.local.reduce_scatter(send, shard, counts, ReduceOp.SUM, dtype)

    def gather_within(self, shard: Array, receive: Array, counts: Sequence[int]) -> None:
        """Gather the shards of this host's ranks, in local rank order."""
        self._usable()
        self.local.allgather(shard, receive, counts)

    def splits(self, buffer: Array) -> bool:
        """Whether an allreduce of ``buffer`` goes through both levels, in host memory."""
        return self._divides(buffer) and not _on_gpu(buffer)

    def _divides(self, buffer: Array) -> bool:
        trivial = self.local.size == 1 or self.cross.size == 1
        return not trivial and buffer.nbytes >= LEAST

    def _allreduce(self, buffer: Array, op: ReduceOp, name: str) -> None:
        if not self._divides(buffer):
            self.flat.allreduce(buffer, op, name)
            return
        if _on_gpu(buffer):
            self._allreduce_on_gpu(buffer, op, name)
            return
        counts = even_counts(buffer.size, self.local.size)
        shard = self._scratch.take(counts[self.local.rank], storage(name))
        self._through(buffer, shard, counts, op, name)

    def _allreduce_on_gpu(self, buffer: Array, op: ReduceOp, name: str) -> None:
        # NCCL moves equal shards in one operation, others in one for each rank; so what is left
        # over, fewer elements than a host has ranks, stays on one level.
        share = buffer.size // self.local.size
        even = share * self.local.size
        shard = np.empty_like(buffer, shape=share)  # of CuPy's, in the order of the stream
        self._through(buffer[:even], shard, [share] * self.local.size, op, name)
        if even < buffer.size:
            self.flat.allreduce(buffer[even:], op, name)

    def _through(
        self, buffer: Array, shard: Array, counts: list[int], op: ReduceOp, name: str
    ) -> None:
        self.local.reduce_scatter(buffer, shard, counts, op, name)
        self.cross.allreduce(shard, op, name)
        self.local.allgather(shard, buffer, counts)

    def _allgather(self, send: Array, receive: Array, counts: list[int]) -> None:
        self.flat.allgather(send, receive, counts)

    def _alltoall(
        self, send: Array, receive: Array, send_counts: list[int], receive_counts: list[int]
    ) -> None:
        self.flat.alltoall(send, receive, send_counts, receive_counts)

    def _reduce_scatter(
        self, send: Array, receive: Array, counts: list[int], op: ReduceOp, name: str
    ) -> None:
        self.flat.reduce_scatter(send, receive, counts, op, name)

    def _broadcast(self, buffer: Array, root: int) -> None:
        self.flat.broadcast(buffer, root)

    def _barrier(self) -> None:
        self.flat.barrier()

    def _subset(self, ranks: list[int]) -> Communicator | None:
        subset = self.flat.subset(ranks)
        if subset is None:
            return None
        hosts = [self.hosts[rank] for rank in ranks]
        return two_levels(subset, Topology.from_hosts(subset.rank, hosts))

    def _sibling(self, number: int) -> HierarchicalCommunicator | None:
        if not self._siblings:
            self.cross.reduce_on(BETWEEN)
        flat, local, cross = (x.sibling(number) for x in (self.flat, self.local, self.cross))
        if flat is None or local is None or cross is None:
            return None
        sibling = copy.copy(self)
        sibling.flat, sibling.local, sibling.cross = flat, local, cross
        sibling._scratch, sibling._subsets, sibling._siblings = Scratch(), [], {}
        sibling.before_close = lambda: None
        return sibling

    def severed(self) -> list[int]:
        """Return ``origin`` of the ranks to which a connection has ended, on any level."""
        levels = self.flat, self.local, self.cross
        return sorted({rank for level in levels for rank in level.severed()})

    def interrupt(self) -> None:
        """End what waits on any level."""
        for level in (self.flat, self.local, self.cross):  # NCCL's have connections of their own
            level.interrupt()

    def _close(self) -> None:
        self.flat.close()


def _on_gpu(buffer: Array) -> bool:
    return hasattr(buffer, "__cuda_array_interface__")


def by_host(hosts: Sequence[str]) -> list[list[int]]:
    """Return the ranks of each host, in the order of their first ranks; ``hosts`` is by rank."""
    names = dict.fromkeys(hosts)
    return [[rank for rank, host in enumerate(hosts) if host == name] for name in names]


def two_levels(flat: Communicator, topology: Topology) -> Communicator:
    """Return ``flat`` with two levels if it spans several hosts of equally many ranks, but not one.

    Otherwise ``flat`` itself. Collective.
    """
    places = by_host(topology.hosts)
    sizes = {len(ranks) for ranks in places}
    suits = len(places) > 1 and len(sizes) == 1 and sizes != {1}
    return HierarchicalCommunicator(flat, topology) if suits else flat


def _join(flat: Communicator, sets: Sequence[Sequence[int]]) -> Communicator:
    """Make a subset of each of ``sets``, which hold every rank once; return this rank's."""
    made = (flat.subset(ranks) for ranks in sets)
    (own,) = [subset for subset in made if subset is not None]
    return own
