"""The ranks of one process set, as an engine knows them."""

from __future__ import annotations

from dataclasses import dataclass

from ringlet.ring.communicator import Communicator


@dataclass(frozen=True)
class Peers:
    """Process set ``number``: its global ``ranks``, ascending, and a communicator of them."""

    number: int
    ranks: tuple[int, ...]
    comm: Communicator

    @property
    def rank(self) -> int:
        """This rank's place in the set."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """How many ranks the set has."""
        return self.comm.size
