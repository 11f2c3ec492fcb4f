"""The ranks of one process set, as an engine knows them, and the tracks they exchange on."""

from __future__ import annotations

from ringlet.fusion.recording.watched_communicator import Note, unwatched, watched
from ringlet.ring.communicator import Communicator
from ringlet.ring.transports.hierarchical import HierarchicalCommunicator

LANES = 4  # communicators of a track, as many as an exchange makes collectives one after the other
MOST_LANES = 8  # over two levels
TRACKS = 4  # exchanges that do not wait for each other where all messages take long


class Track:
    """What exchanges of the global ``ranks`` move bytes over: ``comm``, and ``siblings`` of it.

    The siblings are for the second and later collectives of exchanges, so that those of several
    overlap; there are none where the transport has none. ``number`` is the track's among several.
    """

    def __init__(self, ranks: tuple[int, ...], comm: Communicator, number: int = 0) -> None:
        self.ranks, self.comm, self.number = ranks, comm, number
        lanes = LANES if levels_of(comm) is None else MOST_LANES
        found = [comm.sibling(i) for i in range(1, lanes) if comm.size > 1]
        self.siblings = tuple(sibling for sibling in found if sibling is not None)

    @property
    def first_lane(self) -> int:
        """The number of the first of its lanes, each of which is a thread of the pipeline's."""
        return MOST_LANES * self.number

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


class Peers:
    """Process set ``number``: its global ``ranks``, ascending, with a communicator of them.

    Its exchanges take turns on ``tracks``. Those are several where messages between all ranks take
    long: there even the first collectives of exchanges do not wait for each other. ``flat`` are the
    same ranks on one level: themselves where there is no other.
    """

    def __init__(self, number: int, ranks: tuple[int, ...], comm: Communicator) -> None:
        self.number, self.ranks = number, ranks
        first = Track(ranks, comm)
        self.tracks: tuple[Track, ...] = (first,)
        if first.all_far and first.overlaps:
            beside = ((comm.sibling(MOST_LANES * i), i) for i in range(1, TRACKS))
            self.tracks += tuple(Track(ranks, each, i) for each, i in beside if each is not None)
        self._launched = 0
        levels = levels_of(comm)
        self.flat = self if levels is None else Peers(number, ranks, levels.flat)

    def next_track(self) -> Track:
        """Return the track for the next exchange; called in one order on all ranks."""
        self._launched += 1
        return self.tracks[self._launched % len(self.tracks)]

    def watch(self, note: Note | None) -> None:
        """Let ``note`` be told of every collective from now on, or nobody."""
        for track in self.tracks:
            track.watch(note)
        if self.flat is not self:
            self.flat.watch(note)

    @property
    def comm(self) -> Communicator:
        """The communicator of what is not exchanged in turns."""
        return self.tracks[0].comm

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
