"""The ranks of one process set, as an engine knows them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ringlet.fusion.recording.watched_communicator import Note, unwatched, watched
from ringlet.ring.communicator import Communicator
from ringlet.ring.transports.hierarchical import HierarchicalCommunicator


@dataclass
class Peers:
    """Process set ``number``: its global ``ranks``, ascending, and a communicator of them.

    ``siblings`` of ``comm`` are for the second and later collectives of exchanges, so that those of
    several overlap; there are none where the transport has none. ``flat`` are the same ranks on one
    level: themselves where there is no other.
    """

    number: int
    ranks: tuple[int, ...]
    comm: Communicator
    siblings: tuple[Communicator, ...] = field(init=False)
    flat: Peers = field(init=False)

    def __post_init__(self) -> None:
        found = [self.comm.sibling(i) for i in (1, 2, 3) if self.comm.size > 1]
        self.siblings = tuple(sibling for sibling in found if sibling is not None)
        levels = levels_of(self.comm)
        self.flat = self if levels is None else Peers(self.number, self.ranks, levels.flat)

    @property
    def overlaps(self) -> bool:
        """Whether collectives of several exchanges can be under way at once."""
        return bool(self.siblings)

    def lane(self, number: int) -> Communicator:
        """Return the communicator of an exchange's collective ``number``, from 0."""
        return (self.comm, *self.siblings)[number] if self.siblings else self.comm

    def watch(self, note: Note | None) -> None:
        """Let ``note`` be told of every collective from now on, or nobody."""
        self.comm = unwatched(self.comm)
        self.siblings = tuple(unwatched(sibling) for sibling in self.siblings)
        if note is not None:
            self.comm = watched(self.comm, note)
            self.siblings = tuple(watched(sibling, note) for sibling in self.siblings)
        if self.flat is not self:
            self.flat.watch(note)

    @property
    def rank(self) -> int:
        """This rank's place in the set."""
        return self.comm.rank

    @property
    def size(self) -> int:
        """How many ranks the set has."""
        return self.comm.size


def levels_of(comm: Communicator) -> HierarchicalCommunicator | None:
    """Return ``comm`` if its ranks are divided into hosts."""
    inner = unwatched(comm)
    return inner if isinstance(inner, HierarchicalCommunicator) else None
