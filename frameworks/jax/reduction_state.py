"""What ``reduce_gradients`` knows between steps, as a pytree of each rank's own."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ringlet.jax.held_state import Held
from ringlet.ring.callers import public
from ringlet.ring.dtypes import Array

log = logging.getLogger("ringlet")

RESIDUAL = "residual"  # a key in ``held``
DIVIDED = 2  # in ``present``


class ReduceGradientsState(NamedTuple):
    """What ``reduce_gradients`` knows between steps: a pytree of this rank's own.

    ``step`` (int32) counts reductions. ``held`` has what compressors remember, arrays by the
    gradient's path and a key, such as ``held["dense/kernel"]["residual"]``; ``present`` (uint8)
    says of each whether its compressor has made it yet: 1, or 2 where it compresses gradients
    divided by the number of ranks. ``owner`` (int32) is whose they are: a rank, and of how many.
    """

    step: Any
    present: Any
    held: Held
    owner: Any


def is_state(value: Any) -> bool:
    """Whether ``value`` is what ``reduce_gradients`` knows."""
    return isinstance(value, ReduceGradientsState)


def reductions(tree: Any) -> list[ReduceGradientsState]:
    """Return the states of ``reduce_gradients`` in ``tree``, in its order."""
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=is_state) if is_state(leaf)]


def made_by_path(
    held: Mapping[str, Mapping[str, Any]], present: Array
) -> dict[str, dict[str, Any]]:
    """Return by path the arrays that compressors have made."""
    there = iter(present)
    return {
        path: {key: arrays[key] for key in sorted(arrays) if next(there)}
        for path, arrays in sorted(held.items())
    }


def warn_of_owner(given: Sequence[int], own: Sequence[int]) -> None:
    """Warn that a state is another's: ``given`` and ``own`` are a rank, and of how many."""
    if given[0] == own[0]:  # among other ranks: most likely this rank's, of an earlier job
        log.warning(
            "the state of reduce_gradients is that of rank %d of %d, and rank %d of %d goes on "
            "with it: what ranks held back that are no more is lost. To begin without it, call "
            "init(params) anew on every rank",
            *given,
            *own,
        )
        return
    log.warning(
        "the state of reduce_gradients is that of rank %d of %d, and rank %d of %d goes on with "
        "it: what this rank held back is lost, and what the other did may count twice. Every rank "
        "saves and restores its own, and nobody broadcasts it; among other ranks call init(params) "
        "anew",
        *given,
        *own,
    )


@public
def residual_norm(state: Any) -> Any:
    """Return the Euclidean norm (float32) of what this rank holds back, inside ``jax.jit`` too.

    ``state`` is any pytree that holds ``ReduceGradientsState``, such as that of ``optax.chain``.
    That are residuals, but not those that are kept in fewer bits than float32, and what momentum
    correction keeps of what it has not sent.
    """
    residuals = [
        array
        for one in reductions(state)
        for arrays in one.held.values()
        for key, array in arrays.items()
        if key.rpartition("/")[2] == ("v" if _is_of_momentum(arrays) else RESIDUAL)
    ]
    return jnp.sqrt(sum((jnp.vdot(array, array) for array in residuals), jnp.zeros(())))


def _is_of_momentum(arrays: Mapping[str, Any]) -> bool:
    """Whether momentum correction has made a tensor's arrays; matrices so called are factors."""
    return all(key in arrays and arrays[key].ndim == 1 for key in ("u", "v"))
