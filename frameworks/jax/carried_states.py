"""What ``reduce_gradients`` remembers in an optimizer's state, and how another spec goes on."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
import optax

from ringlet.compressors.states import prescale, resize
from ringlet.jax.held_state import flattened, nested
from ringlet.jax.ops.ordered_calls import refuse_trace
from ringlet.jax.reduction_state import (
    DIVIDED,
    RESIDUAL,
    ReduceGradientsState,
    is_state,
    made_by_path,
    reductions,
)
from ringlet.job.session import current
from ringlet.ring.callers import public
from ringlet.ring.dtypes import Array
from ringlet.shared.gradients.gradient_settings import Settings, Slot

log = logging.getLogger("ringlet")

_carried: ContextVar[CarriedOver | None] = ContextVar("carried over", default=None)


@public
def carry_over(state: Any, transformation: optax.GradientTransformation, params: Any) -> Any:
    """Return ``state`` for a ``transformation`` that compresses differently. Not in ``jax.jit``.

    ``state`` is that of ``reduce_gradients``, or of an optimizer with it in, such as
    ``optax.chain``; ``transformation`` is the new one, alike but for the compression. Residuals go
    on with it, in its units, and so does the number of the step; all else in ``state`` stays. What
    else compressors remembered is forgotten; rank 0 warns where that is all that a gradient had.
    Collective, as ``transformation.init(params)`` is. Raises ValueError where ``state`` is not of
    such a transformation.
    """
    refuse_trace("carry_over")
    before = reductions(state)
    if not before:
        raise ValueError(
            "the state holds nothing of reduce_gradients: pass what transformation.init(params) "
            "or transformation.update(...) has returned"
        )
    with carrying_over(before):
        made = transformation.init(params)
    after = reductions(made)
    old, new = (jax.tree.structure(shared(each)) for each in (state, made))
    if old != new or len(before) != len(after):
        raise ValueError(
            "the state is of another optimizer than the transformation, not of one that differs in "
            f"its compression only: {old} and {new}"
        )
    _warn_of_forgotten(before, after)
    return merged(state, shared(state), after)


def shared(tree: Any) -> Any:
    """Return a tree without what is each rank's own."""
    return jax.tree.map(lambda leaf: None if is_state(leaf) else leaf, tree, is_leaf=is_state)


def merged(tree: Any, common: Any, own: Sequence[ReduceGradientsState]) -> Any:
    """Return a tree like ``tree`` with the leaves of ``common``, and ``own`` states."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_state)
    others, states = iter(jax.tree.leaves(common)), iter(own)
    filled = [next(states) if is_state(leaf) else next(others) for leaf in leaves]
    return jax.tree.unflatten(structure, filled)


def _remembered(states: Sequence[ReduceGradientsState]) -> dict[str, list[str]]:
    """Return by path what compressors have made, in all ``states``."""
    found: dict[str, list[str]] = {}
    for state in states:
        for path, arrays in made_by_path(state.held, np.asarray(state.present)).items():
            found.setdefault(path, []).extend(arrays)
    return found


def _warn_of_forgotten(
    before: Sequence[ReduceGradientsState], after: Sequence[ReduceGradientsState]
) -> None:
    left = _remembered(after)
    lost = [
        (path, keys) for path, keys in _remembered(before).items() if keys and not left.get(path)
    ]
    if lost and current().rank == 0:
        (path, keys), more = lost[0], len(lost) - 1
        log.warning(
            "carry_over forgets %s of %r, of which the new compression makes nothing%s",
            keys,
            path,
            f"; and so on of {more} more" if more else "",
        )


@contextmanager
def carrying_over(states: Sequence[ReduceGradientsState]) -> Iterator[None]:
    """Let ``init`` go on, inside, from ``states`` of the same gradients.

    They are those of other specs, or among other ranks.
    """
    token = _carried.set(CarriedOver(states) if states else None)
    try:
        yield
    finally:
        _carried.reset(token)


def to_carry_over() -> CarriedOver | None:
    """Return the states from which ``init`` goes on; None where it begins anew."""
    return _carried.get()


class CarriedOver:
    """States of reductions by other specs, or among other ranks, from which new ones go on."""

    def __init__(self, states: Sequence[ReduceGradientsState]) -> None:
        self._states = list(states)

    def over_to(
        self, held: dict[str, dict[str, Array]], slots: Sequence[Slot], settings: Settings
    ) -> tuple[int, set[tuple[str, str]], list[int] | None]:
        """Fill ``held`` from the state of such gradients that is left.

        A residual gets room where it has none: of shards that are no more, in however few bits new
        ones are kept, on a rank that is left alone and gives it back, and on one that is not in the
        process set now. Returns that state's step, the paths and keys that are filled, and whose
        they are.
        """
        filled: set[tuple[str, str]] = set()
        place = self._place(slots, settings)
        if place is None:
            return 0, filled, None
        old = self._states.pop(place)
        owner = np.asarray(old.owner).tolist()
        before = max(owner[1], 1)
        ranks = settings.process_set
        among = ranks.size() if ranks.included() else before
        present = np.asarray(old.present)
        divided = made_by_path(old.held, present == DIVIDED)
        for path, arrays in made_by_path(old.held, present).items():
            compressor = settings.router(path)
            units = compressor.traits().gradient_units
            state = jax.tree.map(np.array, nested(arrays))
            divides = settings.averages and compressor.traits().predivide
            if divides != bool(divided[path]):  # of another spec
                prescale(state, compressor, 1 / before if divides else before)
            resize(state, compressor, before, among, settings.averages, False, settings.predivide)
            for key, given in flattened(state).items():
                room = held.get(path, {}).get(key)
                if room is None and key == RESIDUAL and key in units:
                    room = held.setdefault(path, {})[key] = np.zeros_like(given)
                if room is not None and (room.shape, room.dtype) == (given.shape, given.dtype):
                    room[...] = given
                    filled.add((path, key))
        return int(old.step), filled, owner

    def _place(self, slots: Sequence[Slot], settings: Settings) -> int | None:
        """Return the place of the state that goes on for these gradients; None if there is none.

        Of several it is that of which most goes on, and of those the first. A state in which
        nothing is held fits everywhere; trees list states in another order than ``init`` is called.
        """
        paths = {slot.name for slot in slots}
        fitting = [i for i, state in enumerate(self._states) if state.held.keys() <= paths]

        def goes_on(place: int) -> int:
            held = self._states[place].held
            return sum(bool(settings.router(path).traits().gradient_units) for path in held)

        return max(fitting, key=goes_on, default=None)
