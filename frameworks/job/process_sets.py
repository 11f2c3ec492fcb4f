"""Process sets: subsets of the ranks that collectives can be restricted to."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any
from weakref import WeakSet

from ringlet.job.session import Runtime, current, is_initialized
from ringlet.ring.callers import public
from ringlet.ring.errors import RingError
from ringlet.ring.rendezvous.epochs import is_elastic


class InvalidArgument(RingError, ValueError):
    """An argument that no rank could have meant, such as splits that do not add up."""


class ProcessSet:
    """Some of the ranks, listed ascending in ``ranks``; of use once ``add_process_set`` took it.

    ``ranks_or_comm`` is a list of ranks, or an mpi4py communicator of them.
    """

    def __init__(self, ranks_or_comm: Iterable[int] | Any) -> None:
        self.process_set_id: int | None = None
        self.mpi_comm: Any = None
        self._ranks: list[int] | None = None
        if hasattr(ranks_or_comm, "Get_group"):
            self.mpi_comm = ranks_or_comm
        elif isinstance(ranks_or_comm, Iterable):
            self._ranks = sorted(int(rank) for rank in ranks_or_comm)
        else:
            raise TypeError(
                f"a process set is a list of ranks such as [0, 1], not {ranks_or_comm!r}"
            )

    @property
    def ranks(self) -> list[int] | None:
        """The ranks, ascending; None as long as they are not known."""
        return self._ranks

    def size(self) -> int:
        """Return how many ranks the set has."""
        return len(self._known())

    def rank(self) -> int:
        """Return this rank's place in the set; InvalidArgument if it is not in it."""
        ranks, own = self._known(), current().rank
        if own not in ranks:
            raise InvalidArgument(f"rank {own} is not part of {self}")
        return ranks.index(own)

    def included(self) -> bool:
        """Whether this rank is part of the set, be that registered or not."""
        own, ranks = current().rank, self.ranks
        return own in (self._known() if ranks is None else ranks)

    def rank_of(self, global_rank: int, what: str = "rank") -> int:
        """Return the place of ``global_rank`` in the set; InvalidArgument if it is not in it."""
        ranks = self._known()
        if global_rank not in ranks:
            raise InvalidArgument(f"{what} must be one of the ranks {ranks}; got {global_rank!r}")
        return ranks.index(global_rank)

    def number(self) -> int:
        """Return the set's number; InvalidArgument if this rank cannot use it."""
        self.rank()
        assert self.process_set_id is not None
        if self.process_set_id not in process_set_ranks():
            raise InvalidArgument(f"there is no process set {self.process_set_id}")
        return self.process_set_id

    def adopt(self, number: int) -> None:
        """Stand for the registered set ``number`` until the job is over."""
        self.process_set_id = number
        _adopted(current()).add(self)

    def forget(self) -> None:
        """Be a set that is not registered: the job that knew it is over."""
        self.process_set_id = None

    def find_ranks(self) -> list[int]:
        """Return the ranks; of a communicator, this is collective over those."""
        if self._ranks is None:
            own = current().rank
            self._ranks = sorted(int(rank) for rank in self.mpi_comm.allgather(own))
        return self._ranks

    def _known(self) -> list[int]:
        if self.process_set_id is None or self.ranks is None:
            current()
            raise InvalidArgument(f"{self} is not registered; pass it to add_process_set first")
        return self.ranks

    def __repr__(self) -> str:
        number, ranks, comm = self.process_set_id, self.ranks, self.mpi_comm
        return f"ProcessSet(process_set_id={number}, ranks={ranks}, mpi_comm={comm})"


class _Global(ProcessSet):
    """All ranks, of whatever job this thread or process belongs to."""

    def __init__(self) -> None:
        super().__init__([])
        self.process_set_id = 0

    @property
    def ranks(self) -> list[int] | None:
        return self._known() if is_initialized() else None

    def number(self) -> int:
        current()
        return 0

    def _known(self) -> list[int]:
        return list(range(current().size))


global_process_set: ProcessSet = _Global()


@public
def add_process_set(process_set: ProcessSet | Iterable[int]) -> ProcessSet:
    """Make a process set usable, and return it. All ranks call it, with the same ranks.

    In an elastic job it may be of all the ranks that are left, and then stands for the global one.

    Raises InvalidArgument for ranks that do not exist or a set that does already, Mismatch when
    ranks ask for different sets.
    """
    runtime = current()
    made = process_set if isinstance(process_set, ProcessSet) else ProcessSet(process_set)
    ranks = made.find_ranks()
    if not ranks or len(set(ranks)) < len(ranks) or not 0 <= ranks[0] <= ranks[-1] < runtime.size:
        now = f"; there are {runtime.size} ranks now, so make sets of these" if is_elastic() else ""
        raise InvalidArgument(
            f"a process set has distinct ranks between 0 and {runtime.size - 1}, not {ranks}{now}"
        )
    same = find_process_set(ranks)
    if same is global_process_set and is_elastic():
        made.adopt(0)
        return made
    if same is not None:
        raise InvalidArgument(f"there is a process set of the same ranks already: {same}")
    made.adopt(runtime.engine.add_process_set(ranks))
    _of(runtime).append(made)
    return made


def find_process_set(ranks: Sequence[int]) -> ProcessSet | None:
    """Return the registered process set of these ranks, listed ascending."""
    runtime = current()
    if len(ranks) == runtime.size:
        return global_process_set
    return next((known for known in _of(runtime) if known.ranks == list(ranks)), None)


@public
def remove_process_set(process_set: ProcessSet) -> bool:
    """Remove a process set that is not in use any more. All ranks call it.

    Returns False, and does nothing, for one that is not registered, and the global one.
    """
    runtime = current()
    number = process_set.process_set_id
    known = next((s for s in _of(runtime) if number and s.process_set_id == number), None)
    if known is None or number is None:
        return False
    runtime.engine.remove_process_set(number)
    _of(runtime).remove(known)
    known.forget()
    process_set.forget()
    return True


def process_set_ranks() -> dict[int, list[int]]:
    """Return the ranks of every process set, by its number."""
    runtime = current()
    made = {s.process_set_id or 0: list(s.ranks or ()) for s in _of(runtime)}
    return {0: list(range(runtime.size))} | made


def _of(runtime: Runtime) -> list[ProcessSet]:
    made: list[ProcessSet] = runtime.extras.setdefault("process sets", [])
    return made


def _adopted(runtime: Runtime) -> WeakSet[ProcessSet]:
    """Return the sets that stand for one of this job's, which they forget when it is over.

    Those that the program has dropped leave it: it may make and remove a set in every step.
    """
    known: WeakSet[ProcessSet] | None = runtime.extras.get("adopted process sets")
    if known is not None:
        return known
    adopted: WeakSet[ProcessSet] = WeakSet()

    def forget_all() -> None:
        for each in list(adopted):
            each.forget()

    runtime.at_close.append(forget_all)
    runtime.extras["adopted process sets"] = adopted
    return adopted
