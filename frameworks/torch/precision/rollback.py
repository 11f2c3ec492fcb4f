"""Taking back what compressors remembered of a step that is skipped.

A step that overflowed on one rank is skipped on all, after the gradients were compressed: what
residuals then lack was sent, and never applied.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ringlet.compressors.core.context import State


class Undo:
    """A copy of states from before a step. Counters of steps are no part of it: they go on."""

    def __init__(self) -> None:
        self._before: dict[str, State] = {}

    def remember(self, states: Mapping[str, State]) -> None:
        """Copy ``states``, into the arrays of the last copy where they fit."""
        self._before = {
            name: _copied(state, self._before.get(name, {})) for name, state in states.items()
        }

    def restore(self, states: Mapping[str, State]) -> None:
        """Make ``states`` what they were; dicts in them stay the same objects."""
        for name, before in self._before.items():
            _put_back(states[name], before)


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


def _put_back(state: State, before: State) -> None:
    for key in [key for key in state if key not in before and key != "step"]:
        if isinstance(state[key], dict):
            _put_back(state[key], {})
        else:
            del state[key]
    for key, value in before.items():
        if isinstance(value, dict):
            _put_back(state.setdefault(key, {}), value)
        elif key != "step":
            state[key] = _filled(state.get(key), value) if hasattr(value, "shape") else value


def _filled(array: Any, values: Any) -> Any:
    """Return ``values`` in ``array``, or in a copy where that is none or another kind."""
    if getattr(array, "shape", None) != values.shape or array.dtype != values.dtype:
        return values.copy()
    array[...] = values
    return array
