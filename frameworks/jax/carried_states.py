"""What ``reduce_gradients`` remembers in an optimizer's state, and how another spec goes on."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import optax

from ringlet.jax.gradient_transformation import ReduceGradientsState, carrying_over
from ringlet.jax.ops.ordered_calls import refuse_trace
from ringlet.job.session import current
from ringlet.ring.callers import public

log = logging.getLogger("ringlet")


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


def reductions(tree: Any) -> list[ReduceGradientsState]:
    """Return the states of ``reduce_gradients`` in ``tree``, in its order."""
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=_is_own) if _is_own(leaf)]


def shared(tree: Any) -> Any:
    """Return a tree without what is each rank's own."""
    return jax.tree.map(lambda leaf: None if _is_own(leaf) else leaf, tree, is_leaf=_is_own)


def merged(tree: Any, common: Any, own: Sequence[ReduceGradientsState]) -> Any:
    """Return a tree like ``tree`` with the leaves of ``common``, and ``own`` states."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_own)
    others, states = iter(jax.tree.leaves(common)), iter(own)
    filled = [next(states) if _is_own(leaf) else next(others) for leaf in leaves]
    return jax.tree.unflatten(structure, filled)


def _is_own(value: Any) -> bool:
    return isinstance(value, ReduceGradientsState)


def _remembered(states: Sequence[ReduceGradientsState]) -> dict[str, list[str]]:
    """Return by path what compressors have made, in all ``states``."""
    found: dict[str, list[str]] = {}
    for state in states:
        there = iter(np.asarray(state.present))
        for path in sorted(state.held):
            made = [key for key in sorted(state.held[path]) if next(there)]
            found.setdefault(path, []).extend(made)
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
