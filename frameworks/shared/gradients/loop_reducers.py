"""The reducers of tapes, which are new in every step: found again by the tapes' variables."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ringlet.job.process_sets import ProcessSet
from ringlet.job.session import current, is_initialized
from ringlet.shared.gradients.gradient_reducer import GradientReducer
from ringlet.shared.gradients.gradient_settings import Settings
from ringlet.shared.variable_names import identity


class LoopReducers:
    """Those of this rank's loops, for as long as their variables live.

    By what tells them apart among the same ranks, their ``kind``, and by their process set, whose
    number may be that of another one once it is added again.
    """

    def __init__(self) -> None:
        self._entries: dict[tuple[Hashable, int], _Entry] = {}
        self._keeps = False

    def find(self, kind: Hashable, process_set: ProcessSet) -> GradientReducer | None:
        """Return what was added for a process set, unless one of its variables is gone."""
        entry = self._entries.get((kind, id(process_set)))
        return None if entry is None or entry.is_stale() else entry.reducer

    def inherit(self, kind: Hashable, settings: Settings) -> GradientReducer | None:
        """Return one whose process set is there no more, to go on under ``settings`` with theirs.

        If there are several, one of the same ranks. What it holds back is owed to its variables,
        and no tape would come to it any more.
        """
        gone = {
            key: entry.reducer
            for key, entry in self._entries.items()
            if key[0] == kind and not entry.is_stale() and entry.is_left()
        }
        ranks = settings.process_set.ranks
        for key in sorted(gone, key=lambda key: gone[key].settings.process_set.ranks != ranks)[:1]:
            del self._entries[key]
            gone[key].settings = settings
            return gone[key]
        return None

    def add(self, kind: Hashable, reducer: GradientReducer, variables: Iterable[Any]) -> None:
        """Add one for ``variables``, and forget those whose variables are gone."""
        for old in [known for known, entry in self._entries.items() if entry.is_stale()]:
            del self._entries[old]
        if self._keeps:
            reducer.memory.keep_steps()
        key = kind, id(reducer.settings.process_set)  # which the reducer keeps alive
        self._entries[key] = _Entry(reducer, [weakref.ref(variable) for variable in variables])

    def where(
        self, chosen: Callable[[Any], bool], process_set: ProcessSet
    ) -> list[GradientReducer]:
        """Return those of a process set whose kind is ``chosen``."""
        return [
            entry.reducer
            for (kind, among), entry in self._entries.items()
            if among == id(process_set) and not entry.is_stale() and chosen(kind)
        ]

    def of(self, variables: Iterable[Any]) -> list[GradientReducer]:
        """Return those for some of ``variables``, in the order of their first steps."""
        own = set(map(identity, variables))
        return [entry.reducer for entry in self._entries.values() if entry.holds(own)]

    def keep_steps(self) -> None:
        """Let all, and those to come, copy what is remembered before each step."""
        self._keeps = True
        for entry in self._entries.values():
            entry.reducer.memory.keep_steps()


def loop_reducers() -> LoopReducers:
    """Return those of this rank, which outlive the epochs of an elastic job."""
    found: LoopReducers = current().lasting.setdefault("loop reducers", LoopReducers())
    return found


def reducers_of(variables: Iterable[Any]) -> list[GradientReducer]:
    """Return the reducers of this rank's loops for some of ``variables``; none before ``init``."""
    return loop_reducers().of(variables) if is_initialized() else []


def owed_norm(reducers: Sequence[GradientReducer]) -> float | None:
    """Return the norm of what this rank alone holds back in all of them; None of none."""
    return math.hypot(*(each.memory.owed_norm() for each in reducers)) if reducers else None


class Commit:
    """What reducers remember now, to go back to."""

    def __init__(self, reducers: Sequence[GradientReducer]) -> None:
        self._kept = [(reducer, reducer.remembered()) for reducer in reducers]

    def restore(self, reducers: Sequence[GradientReducer]) -> None:
        """Let ``reducers`` go back; those that have come since remember nothing."""
        for reducer in reducers:
            found = [remembered for kept, remembered in self._kept if kept is reducer]
            reducer.go_back(found[0] if found else None)


@dataclass
class _Entry:
    reducer: GradientReducer
    variables: Sequence[weakref.ref[Any]]

    def is_stale(self) -> bool:
        return any(reference() is None for reference in self.variables)

    def is_left(self) -> bool:
        """Whether its process set was removed, or is gone with its ranks, and not added again."""
        return self.reducer.settings.process_set.process_set_id is None

    def holds(self, identities: set[int]) -> bool:
        """Whether it is for one of the variables that ``identity`` tells so apart."""
        return any(id(reference()) in identities for reference in self.variables)
