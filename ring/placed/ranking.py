"""Which worker of Ray, Spark or Dask becomes which rank: ranks of a node follow each other."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Standing:
    """A process's place in the job, and among those of its node, which is the ``node``-th.

    ``cross_rank`` is its place among the ``cross_size`` processes of its local rank.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    node: int
    cross_rank: int = 0
    cross_size: int = 1


def standings(nodes: Sequence[Hashable]) -> list[Standing]:
    """Return the standing of each process, in the order of ``nodes``: what tells its node.

    An engine may have several nodes on one host, so this is the engine's id of the node, not the
    host's name. Nodes are in the order in which they appear, and so are the processes of each.
    """
    members: dict[Hashable, list[int]] = {}
    for process, node in enumerate(nodes):
        members.setdefault(node, []).append(process)
    found: dict[int, Standing] = {}
    for number, processes in enumerate(members.values()):
        for local_rank, process in enumerate(processes):
            found[process] = Standing(len(found), len(nodes), local_rank, len(processes), number)
    return across_nodes([found[process] for process in range(len(nodes))])


def across_nodes(found: Sequence[Standing]) -> list[Standing]:
    """Return the standings of all processes with their places among those of their local rank."""
    peers: dict[int, list[int]] = {}
    for each in sorted(found, key=lambda standing: standing.rank):
        peers.setdefault(each.local_rank, []).append(each.rank)
    return [
        replace(each, cross_rank=of.index(each.rank), cross_size=len(of))
        for each in found
        for of in [peers[each.local_rank]]
    ]
