"""Calls without names that wait for other ranks: part of the coordinator, on rank 0."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from operator import attrgetter

from ringlet.fusion.negotiation.messages import Run
from ringlet.fusion.requests.request import Request

Common = tuple[int, int, dict[int, Request]]  # first, stop, prototypes by rank

_first = attrgetter("first")


class SeriesRuns:
    """The calls of one series that some of ``ranks`` have made and others have not, as runs."""

    def __init__(self, ranks: Sequence[int]) -> None:
        self._of: dict[int, list[Run]] = {rank: [] for rank in ranks}  # ascending, apart
        self._idle = len(self._of)  # ranks that wait for no call

    def add(self, rank: int, run: Run) -> None:
        """Note calls. ValueError where ``rank`` has made one of them already, or for none."""
        runs = self._of[rank]
        if not 0 <= run.first < run.stop:
            raise ValueError(f"calls {run.first} to {run.stop} are none")
        # Threads of one rank may take numbers in one order and submit in another.
        at = bisect_left(runs, run.first, key=_first) if runs else 0
        if (at and runs[at - 1].stop > run.first) or (at < len(runs) and runs[at].first < run.stop):
            raise ValueError(f"made the calls {run.request.name}{run.first} to {run.stop} twice")
        if not runs:
            self._idle -= 1
        before = runs[at - 1] if at else None
        if before is not None and before.stop == run.first and before.request is run.request:
            runs[at - 1] = Run(before.first, run.stop, run.request)
        else:
            runs.insert(at, run)

    def take(self) -> list[Common]:
        """Return, and forget, the calls that all ranks have made."""
        if self._idle:
            return []
        common: list[Common] = []
        ranks, left = list(self._of), [iter(runs) for runs in self._of.values()]
        heads = [next(runs) for runs in left]
        kept: list[list[Run]] = [[] for _ in ranks]
        ended: set[int] = set()
        while not ended:
            first, stop = max(run.first for run in heads), min(run.stop for run in heads)
            if first < stop:
                asked = {rank: run.request for rank, run in zip(ranks, heads, strict=True)}
                common.append((first, stop, asked))
            through = max(first, stop)
            for i, run in enumerate(heads):
                if run.first < first:  # what some rank has not made: its calls begin behind
                    kept[i].append(run._replace(stop=min(run.stop, first)))
                if run.stop <= through:
                    following = next(left[i], None)
                    if following is None:
                        ended.add(i)
                    else:
                        heads[i] = following
                elif run.first < through:
                    heads[i] = run._replace(first=through)
        for i, rank in enumerate(ranks):
            self._of[rank] = [*kept[i], *([] if i in ended else [heads[i]]), *left[i]]
        self._idle = sum(not runs for runs in self._of.values())
        return common

    def each(self) -> Iterator[tuple[int, Run]]:
        """Go through everything that waits, rank by rank."""
        for rank, runs in self._of.items():
            for run in runs:
                yield rank, run
