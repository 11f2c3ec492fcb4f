"""Taking back what compressors remembered of a step that is skipped, or failed.

A step that overflowed on one rank is skipped on all, after the gradients were compressed: what
residuals then lack was sent, and never applied. So too where a rank was lost in a step.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringlet.compressors.core.context import State


class Undo:
    """A copy of states from before a step."""

    def __init__(self) -> None:
        self._before: dict[str, State] | None = None

    def remember(self, states: Mapping[str, State]) -> None:
        """Copy ``states``, into the arrays of the last copy where they fit."""
        rooms = self._before or {}
        self._before = {n: _copied(state, rooms.get(n, {})) for n, state in states.items()}

    def restore(self, states: Mapping[str, State], counters: bool = False) -> None:
        """Make ``states`` what they were when copied; dicts in them stay the same objects.

        Counters of steps go on, unless ``counters`` are to go back as well.
        """
        if self._before is None:
            return
        for name, state in states.items():
            before = self._before.get(name, {})
            _put_back(state, before, frozenset() if counters else _COUNTERS)


def _copied(state: State, room: State) -> State:
    copy: State = {}
    for key, value in state.items():
        if isinstance(value, dict):
            copy[key] = _copied(value, room.get(key, {}))
        elif not hasattr(value, "shape"):
            copy[key] = value
        else:
            copy[key] = _filled(room.get(key), value)
    return copy


_COUNTERS = frozenset({"step"})


def _put_back(state: State, before: State, spared: frozenset[str]) -> None:
    for key in [key for key in state if key not in before and key not in spared]:
        if isinstance(state[key], dict):
            _put_back(state[key], {}, spared)
        else:
            del state[key]
    for key, value in before.items():
        if isinstance(value, dict):
            _put_back(state.setdefault(key, {}), value, spared)
        elif key not in spared:
            state[key] = _filled(state.get(key), value) if hasattr(value, "shape") else value


def _filled(array: Any, values: Any) -> Any:
    """Return ``values`` in ``array``, or in a copy where that is none or another kind."""
    if getattr(array, "shape", None) != values.shape or array.dtype != values.dtype:
        return values.copy()
    array[...] = values
    return array
