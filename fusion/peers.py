"""The ranks of one process set, as an engine knows them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ringlet.fusion.observe.hops import Note, unwatched, watched
from ringlet.ring.communicator import Communicator


@dataclass
class Peers:
    """Process set ``number``: its global ``ranks``, ascending, and a communicator of them.

    ``later`` is for the second collective of an exchange: a sibling of ``comm``, so that first and
    second ones overlap; or ``comm``, where the transport has none.
    """

    number: int
    ranks: tuple[int, ...]
    comm: Communicator
    later: Communicator = field(init=False)

    def __post_init__(self) -> None:
        self.later = (self.comm.sibling(1) if self.comm.size > 1 else None) or self.comm

    @property
    def overlaps(self) -> bool:
        """Whether collectives of two exchanges can be under way at once."""
        return self.later is not self.comm

    def watch(self, note: Note | None) -> None:
        """Let ``note`` be told of every collective from now on, or nobody."""
        self.comm, later = unwatched(self.comm), unwatched(self.later)
        overlaps = later is not self.comm
        if note is not None:
            self.comm, later = watched(self.comm, note), watched(later, note)
        self.later = later if overlaps else self.comm

    @property
    def rank(self) -> int:
        """This rank's place in the set."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """How many ranks the set has."""
        return self.comm.size
