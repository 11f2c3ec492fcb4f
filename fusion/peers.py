"""The ranks of one process set, as an engine knows them."""

from __future__ import annotations

from dataclasses import dataclass

from ringlet.fusion.observe.hops import Note, unwatched, watched
from ringlet.ring.communicator import Communicator


@dataclass
class Peers:
    """Process set ``number``: its global ``ranks``, ascending, and a communicator of them."""

    number: int
    ranks: tuple[int, ...]
    comm: Communicator

    def watch(self, note: Note | None) -> None:
        """Let ``note`` be told of every collective from now on, or nobody."""
        self.comm = unwatched(self.comm) if note is None else watched(self.comm, note)

    @property
    def rank(self) -> int:
        """This rank's place in the set."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """How many ranks the set has."""
        return self.comm.size
