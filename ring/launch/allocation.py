"""Where the ranks of a job run: which of them here, which elsewhere, and on which network."""

from __future__ import annotations

from collections.abc import Sequence

from ringlet.ring.hosts.hosts import Host, Seat, is_here, seat
from ringlet.ring.hosts.interfaces import launcher_address
from ringlet.ring.hosts.remote import Reach
from ringlet.ring.launch.rank_table import Rank


class Allocation:
    """The seats of ``np`` ranks on ``hosts`` (none: this host). Raises LaunchError.

    ``several`` tells whether any of them is elsewhere; ``here`` are the ranks of this host,
    ``elsewhere`` those of each other one, ``by_host`` all of them.
    """

    def __init__(self, hosts: Sequence[Host], np: int, reach: Reach) -> None:
        self.reach = reach
        self.seats: list[Seat] = seat(hosts or [Host("localhost", np)], np)
        self.by_host: dict[str, list[int]] = {}
        for rank, place in enumerate(self.seats):
            self.by_host.setdefault(place.host, []).append(rank)
        # A remote shell of the user's own may know hosts by names that mean nothing here.
        resolve = reach.rsh is None
        arrived = reach.arrived
        self.elsewhere = {
            host: ranks
            for host, ranks in self.by_host.items()
            if (host in arrived.names if arrived else not is_here(host, resolve))
        }
        self.several = bool(self.elsewhere)
        self.here = [r for r, place in enumerate(self.seats) if place.host not in self.elsewhere]
        if not self.several:
            # Several names of this host make one host.
            self.seats = [Seat(place.host, r, np) for r, place in enumerate(self.seats)]
        self._address: str | None = None

    def ranks(self) -> list[Rank]:
        """Return the ranks as the launcher keeps track of them."""
        return [Rank(r, s.host, s.host not in self.elsewhere) for r, s in enumerate(self.seats)]

    def address(self) -> str:
        """Return the address to listen on: loopback unless somebody is elsewhere."""
        if self._address is None:
            others = list(self.elsewhere)
            if self.reach.arrived:
                self._address = self.reach.arrived.address
                return self._address
            self._address = (
                launcher_address(self.reach.interfaces, others) if others else "127.0.0.1"
            )
        return self._address

    def counts(self) -> list[tuple[str, int]]:
        """Return every host with the number of its ranks."""
        return [(host, len(ranks)) for host, ranks in self.by_host.items()]

    def listed(self) -> str:
        """Return hosts and ranks, to be read."""
        return ", ".join(
            f"{host} (rank{'s' if len(ranks) > 1 else ''} {_span(ranks)})"
            for host, ranks in self.by_host.items()
        )


def _span(ranks: Sequence[int]) -> str:
    return f"{ranks[0]}" if len(ranks) == 1 else f"{ranks[0]} to {ranks[-1]}"
