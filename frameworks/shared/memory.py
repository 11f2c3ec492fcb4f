"""What this rank's compressors remember of named tensors, and what is done to it between steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from ringlet.compressors import Compressor
from ringlet.compressors.core.context import State
from ringlet.compressors.modifiers.residuals import forget, wide
from ringlet.compressors.states import (
    forget_shared,
    owed,
    rescale,
    residual_to_rows,
    resize,
    rows_to_residual,
    shared,
    take_over,
)
from ringlet.fusion.devices.cuda import CudaPlace
from ringlet.fusion.devices.host import Place
from ringlet.job.session import current, is_initialized
from ringlet.ring.dtypes import Array
from ringlet.shared.residual_store import norm

_COUNTERS = frozenset({"step"})


class Memory:
    """``states`` of compressors, by name of tensor.

    ``compressor_of`` returns a tensor's compressor, None where it has none yet. ``averages`` tells
    whether gradients are averaged, and not added up; they are divided by ``predivide`` before they
    are compressed, and the result is multiplied by it. ``among`` is the number of ranks whose
    gradients were reduced last; with ``owes``, what is owed to a mean stays that where ranks come
    or go. ``lock`` is for frameworks that call from several threads.
    """

    def __init__(
        self,
        compressor_of: Callable[[str], Compressor | None],
        averages: bool,
        predivide: float = 1.0,
    ) -> None:
        self.states: dict[str, State] = {}
        self.compressor_of, self.averages = compressor_of, averages
        self.predivide = predivide
        self.among, self.owes = 0, False
        self.lock = threading.RLock()
        self._given: dict[str, list[tuple[Mapping[str, Any], int]]] = {}  # of tensors to come
        self._undo: Undo | None = None
        self.reduced = 0  # steps, since somebody has set it to 0
        self._unfinished = False  # whether a step has begun, and was not reduced

    # -- a step -----------------------------------------------------------------------------------

    def keep_steps(self) -> None:
        """From now on copy what is remembered before each step, for ``take_back`` and ``undo``."""
        self._undo = self._undo or Undo()

    @property
    def keeps_steps(self) -> bool:
        """Whether a step can be taken back."""
        return self._undo is not None

    def began(self, fresh: bool = True) -> None:
        """Note that a step is being reduced; it begins now if it is ``fresh``."""
        self._unfinished = True
        if fresh and self._undo is not None:
            with self.lock, at_work():
                self._undo.remember(self.states)

    def ended(self) -> None:
        """Note that all of the step is reduced."""
        self.reduced += self._unfinished
        self._unfinished = False

    def reopen(self) -> None:
        """Let ``take_back`` forget the last step after all."""
        self.reduced -= not self._unfinished
        self._unfinished = True

    @property
    def unfinished(self) -> bool:
        """Whether a step has begun, and was not reduced."""
        return self._unfinished

    def take_back(self) -> None:
        """Forget the step at hand, which has failed: all is as it was before it."""
        with self.lock:
            if self._unfinished and self._undo is not None:
                with at_work():
                    self._undo.restore(self.states, counters=True)
            self._unfinished = False

    def undo(self) -> None:
        """Forget the last step, which is skipped; counters of steps go on."""
        if self._undo is not None:
            with self.lock, at_work():
                self._undo.restore(self.states)

    # -- other ranks ------------------------------------------------------------------------------

    @property
    def steps(self) -> dict[str, int]:
        """How often each tensor was compressed that was so at all."""
        return {n: int(state["step"]) for n, state in self.states.items() if "step" in state}

    def align(self, steps: Mapping[str, int]) -> None:
        """Count as another rank does: shared random numbers and schedules depend on it."""
        for name in self.steps.keys() - steps.keys():
            self.states[name]["step"] = 0
        for name, step in steps.items():
            self.states.setdefault(name, {})["step"] = int(step)

    def resize(self, size: int) -> None:
        """Go on among ``size`` ranks."""
        before, self.among = self.among, size
        if before:
            how = before, size, self.averages, self.owes, self.predivide
            with self.lock, at_work():
                for _, state, compressor in self._compressed():
                    resize(state, compressor, *how)

    def own(self) -> dict[str, State]:
        """Return what is held back on this rank alone, by tensor, in host memory."""
        with self.lock, at_work():
            return {
                name: {key: in_host_memory(value) for key, value in state.items()}
                for name, state in self._owed().items()
            }

    def owed_norm(self) -> float:
        """Return the Euclidean norm of the residuals that ``own`` returns, in their units."""
        with self.lock, at_work():
            return norm(self._owed())

    def take_over(self, given: Mapping[str, Mapping[str, Any]], among: int) -> None:
        """Add what was another rank's ``own``, of so many, to what is this one's.

        What is of a tensor that is not known yet waits for ``adopt``.
        """
        with self.lock, at_work():
            for name, held in given.items():
                self._given.setdefault(name, []).append((held, among))
            for name, state, compressor in self._compressed():
                self._take_given(name, state, compressor)

    def adopt(self, name: str) -> State:
        """Return the state of a tensor whose compressor is known, new if it has none so far."""
        state, compressor = self.states.setdefault(name, {}), self.compressor_of(name)
        assert compressor is not None
        with self.lock, at_work():
            self._take_given(name, state, compressor)
        return state

    def in_common(self) -> list[str]:
        """Return the tensors of which ranks remember something in common, by name in order."""
        with self.lock, at_work():
            return sorted(name for name, state, by in self._compressed() if shared(state, by))

    def forget_in_common(self, names: Container[str]) -> None:
        """Forget what ranks remember in common of tensors; residuals stay."""
        with self.lock, at_work():
            for name, state, compressor in self._compressed():
                if name in names:
                    forget_shared(state, compressor)

    # -- residuals --------------------------------------------------------------------------------

    def norm(self) -> float:
        """Return the Euclidean norm of what is held back on this rank, in units of each array."""
        with self.lock, at_work():
            return norm(self.states)

    def take_residuals(self, names: Container[str]) -> dict[str, Array]:
        """Return the residuals (flat float32) of these tensors, and hold them back no more.

        Of each one whose compressor keeps it in units of the gradient.
        """
        taken = {}
        with self.lock, at_work():
            for name, state, compressor in self._compressed():
                residual = wide(state) if name in names else None
                if residual is not None and "residual" in compressor.traits().gradient_units:
                    taken[name] = residual
                    forget(state)
        return taken

    def holds_rows(self, name: str, shape: tuple[int, ...]) -> bool:
        """Whether anything may be held back by row of a table of that shape."""
        return getattr(self.states.get(name, {}).get("rows"), "shape", None) == shape

    def take_rows(self, name: str, places: Array) -> Array:
        """Return what is held back of a table's rows, each named once, and hold it back no more."""
        with self.lock, at_work():
            table = self.states[name]["rows"]
            taken: Array = table[places]
            table[places] = 0
            return taken

    def move(self, name: str, shape: tuple[int, ...], by_row: bool, size: int) -> None:
        """Keep what is held back of a tensor where its next gradient, among ``size`` ranks, looks.

        That is by row of a table, or in the residual.
        """
        state, compressor = self.states.get(name), self.compressor_of(name)
        if state is None or compressor is None or not (by_row or "rows" in state):
            return
        how = size, self.averages, self.predivide
        with self.lock, at_work():
            if by_row:
                residual_to_rows(state, compressor, shape, *how)
            else:
                rows_to_residual(state, compressor, *how)

    def forget(self) -> bool:
        """Forget all that is remembered but how often each tensor was compressed.

        Return whether something was held back.
        """
        with self.lock, at_work():
            held = norm(self.states) > 0
            for state in self.states.values():
                _put_back(state, {}, _COUNTERS)
        return held

    def rescale(self, factor: float) -> None:
        """Multiply residuals, which are in units of a loss scale that has changed."""
        if factor != 1.0:
            with self.lock, at_work():
                for _, state, compressor in self._compressed():
                    rescale(state, compressor, factor)

    # -- inside -----------------------------------------------------------------------------------

    def _compressed(self) -> Iterator[tuple[str, State, Compressor]]:
        for name, state in self.states.items():
            if (compressor := self.compressor_of(name)) is not None:
                yield name, state, compressor

    def _owed(self) -> dict[str, State]:
        how = max(self.among, 1), self.averages, self.predivide
        held = {name: owed(state, by, *how) for name, state, by in self._compressed()}
        return {name: state for name, state in held.items() if state}

    def _take_given(self, name: str, state: State, compressor: Compressor) -> None:
        given = self._given.pop(name, ())
        on_gpu = any(is_on_gpu(value) for value in state.values())
        if given and on_gpu:  # what is given is in host memory
            current().engine.bring(state, Place.name)
        for held, among in given:
            take_over(state, compressor, held, among, self.among, self.averages)
        if given and on_gpu and current().engine.place(CudaPlace.name) is not None:
            current().engine.bring(state, CudaPlace.name)


def at_work() -> AbstractContextManager[None]:
    """Return a context for what is done to states, which may lie on a GPU."""
    return current().engine.at_work() if is_initialized() else nullcontext()


def is_on_gpu(value: Any) -> bool:
    """Whether it is an array on a GPU."""
    return hasattr(value, "__cuda_array_interface__")


def in_host_memory(value: Any) -> Any:
    """Return an array on a GPU as one in host memory, and anything else as it is."""
    return value.get() if is_on_gpu(value) else value


class Undo:
    """A copy of states from before a step.

    A step that overflowed on one rank is skipped on all, after the gradients were compressed: what
    residuals then lack was sent, and never applied. So too where a rank was lost in a step.
    """

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


@contextmanager
def unchanged_on_error(states: Mapping[str, State]) -> Iterator[None]:
    """Return a context after which, if it raises, ``states`` hold what they held before it.

    Arrays are put back, and not what was written into them; dicts stay the same objects.
    """
    before = {name: _listed(state) for name, state in states.items()}
    try:
        yield
    except BaseException:
        with at_work():
            for name, state in states.items():
                _put_back(state, before[name], frozenset())
        raise


def _listed(state: State) -> State:
    """Return a copy of ``state``, and of the dicts in it, with the same arrays."""
    return {key: _listed(v) if isinstance(v, dict) else v for key, v in state.items()}


def _copied(state: State, room: State) -> State:
    copy: State = {}
    for key, value in state.items():
        if isinstance(value, dict):
            copy[key] = _copied(value, room.get(key, {}))
        else:
            copy[key] = _filled(room.get(key), value) if _is_array(value) else value
    return copy


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
            state[key] = _filled(state.get(key), value) if _is_array(value) else value


def _is_array(value: Any) -> bool:
    """Whether ``value`` can be written to, as NumPy's numbers cannot, which have a shape too."""
    return hasattr(value, "shape") and not isinstance(value, np.generic)


def _filled(array: Any, values: Any) -> Any:
    """Return ``values`` in ``array``, or in a copy where that is none or another kind."""
    if getattr(array, "shape", None) != values.shape or array.dtype != values.dtype:
        return values.copy()
    array[...] = values
    return array
