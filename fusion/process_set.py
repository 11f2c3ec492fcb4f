"""The ranks of one process set, as an engine knows them."""

from __future__ import annotations

from dataclasses import dataclass, field

from ringlet.fusion.recording.watched_communicator import Note, unwatched, watched
from ringlet.ring.communicator import Communicator
from ringlet.ring.transports.hierarchical import HierarchicalCommunicator

LANES = 4  # communicators of an exchange, as many as it makes collectives one after the other
TRACKS = 4  # exchanges that do not wait for each other where all messages take long


@dataclass
class Peers:
    """Process set ``number``: its global ``ranks``, ascending, and a communicator of them.

    ``siblings`` of ``comm`` are for the second and later collectives of exchanges, so that those of
    several overlap; there are none where the transport has none. ``flat`` are the same ranks on one
    level: themselves where there is no other.

    Where messages between all of them take long, even the first collectives of exchanges do not
    wait for each other: they take turns on ``tracks``, these peers and others with communicators of
    their own.
    """

    number: int
    ranks: tuple[int, ...]
    comm: Communicator
    track: int = 0
    siblings: tuple[Communicator, ...] = field(init=False)
    tracks: tuple[Peers, ...] = field(init=False)
    flat: Peers = field(init=False)

    def __post_init__(self) -> None:
        found = [self.comm.sibling(i) for i in range(1, LANES) if self.comm.size > 1]
        self.siblings = tuple(sibling for sibling in found if sibling is not None)
        self.tracks = (self,)
        if self.all_far and self.siblings and not self.track:
            self.tracks += tuple(self._beside(number) for number in range(1, TRACKS))
        self._launched = 0
        levels = levels_of(self.comm)
        self.flat = self if levels is None else Peers(self.number, self.ranks, levels.flat)

    def _beside(self, number: int) -> Peers:
        comm = self.comm.sibling(LANES * number)
        assert comm is not None
        return Peers(self.number, self.ranks, comm, number)

    def next_track(self) -> Peers:
        """Return the peers for the next exchange; called in one order on all ranks."""
        self._launched += 1
        return self.tracks[self._launched % len(self.tracks)]

    @property
    def overlaps(self) -> bool:
        """Whether collectives of several exchanges can be under way at once."""
        return bool(self.siblings)

    @property
    def all_far(self) -> bool:
        """Whether messages between any two are known to take long; the same on all ranks."""
        return unwatched(self.comm).all_far

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
        for other in (*self.tracks[1:], self.flat):
            if other is not self:
                other.watch(note)

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
