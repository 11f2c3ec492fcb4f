"""The nodes of an elastic job that come by themselves, and come back: ``ringlet node --min-np``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from ringlet.ring.hosts.hosts import Host
from ringlet.ring.placed.node_rendezvous import NodeRendezvous
from ringlet.ring.wire.launch_link import Channel

PERIOD = 0.2  # seconds between two looks at who has come


class ArrivingNodes(NodeRendezvous):
    """A rendezvous that stays open while the job runs: each node that has come is a host.

    A node that goes takes its ranks along. Where it comes again, under its number, it counts as
    another host: what failed on it before says nothing of it now.
    """

    def __init__(self, nodes: int, address: str, port: int, secret: bytes, slots: int) -> None:
        super().__init__(nodes, address, port, secret, slots)
        self._given: dict[int, tuple[Channel | None, str]] = {}  # names, for who is here now
        self._count: Counter[str] = Counter()  # of those that a host's name was given to
        self.here: str | None = self._name(0)
        self._next = 0.0
        self._known: list[Host] | None = None

    def _name(self, node: int) -> str:
        """Return what a node is called: its host's name, with a number where that was given."""
        channel, known = self.channels.get(node), self._given.get(node)
        if known is None or known[0] is not channel:
            host, _ = self.names[node]
            before, self._count[host] = self._count[host], self._count[host] + 1
            known = self._given[node] = channel, f"{host}/{before}" if before else host
        return known[1]

    def look(self, now: float) -> tuple[list[Host] | None, str]:
        """Return the nodes that are here where they are others than before, else None."""
        if now < self._next:
            return None, ""
        self._next = now + PERIOD
        self.serve(0.0)
        said = self._changes()
        found = [Host(self._name(node), self.names[node][1]) for node in sorted(self.names)]
        if found == self._known:
            return None, said
        self._known = found
        return found, said

    def _changes(self) -> str:
        """Say, once, which nodes have gone, and which took another's place."""
        said = []
        if self.gone:
            said.append(f"node {_numbers(self.gone)} has gone, and takes its ranks along")
        if self.replaced:
            numbers = _numbers(self.replaced)
            said.append(
                f"node {numbers} has come once more, and takes the place of the earlier one"
            )
        self.gone.clear()
        self.replaced.clear()
        return "; ".join(said)

    def patience(self, now: float) -> float | None:
        """Return the seconds until the next look."""
        return max(0.0, self._next - now)

    def start(self, host: str, order: Mapping[str, Any]) -> StartedThere:
        """Have a node start what ``order`` says."""
        node = next((number for number, known in self._given.items() if known[1] == host), None)
        channel = None if node is None else self._given[node][0]
        if node is None or channel is None or channel is not self.channels.get(node):
            return StartedThere(None)
        self.order(node, {**order, "elastic": True})
        return StartedThere(channel)


def _numbers(nodes: list[int]) -> str:
    return ", ".join(map(str, nodes))


class StartedThere:
    """What a node has been told to start: it is over when the node has gone."""

    def __init__(self, channel: Channel | None) -> None:
        self._channel = channel

    def poll(self) -> int | None:
        """Return 1 where the node has gone, else None: it reports of its ranks itself."""
        return 1 if self._channel is None or self._channel.closed else None

    def part(self) -> None:
        """Do nothing: the node hears how the job has ended."""

    def end(self, seconds: float) -> None:
        """Do nothing: the node hears how the job has ended."""
