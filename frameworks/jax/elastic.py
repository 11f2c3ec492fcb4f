"""Horovod's elastic interface for JAX: programs that go on when ranks are lost, or come."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ringlet.jax.functions import broadcast_pytree
from ringlet.jax.gradient_transformation import (
    ReduceGradientsState,
    carrying_over,
    residual_norm,
)
from ringlet.jax.tree_paths import paths_and_leaves
from ringlet.job.elastic import HostsUpdatedInterrupt, ObjectState, State, run
from ringlet.job.objects import broadcast_object
from ringlet.ring.rendezvous.epochs import is_elastic

__all__ = ["HostsUpdatedInterrupt", "JaxState", "ObjectState", "State", "run"]


class JaxState(ObjectState):
    """Parameters, an optimizer's state and, as ``kwargs``, anything else, all as attributes.

    ``params`` is a pytree, and ``opt_state`` is ``optimizer.init(params)``, made by the first
    ``sync``: newcomers do so together with those that were there. Pytrees of arrays among
    ``kwargs`` travel as arrays, other objects pickled. What ``reduce_gradients`` remembers is each
    rank's own: it is saved, restored, and carried over by the gradients' paths to another number of
    ranks, but not synchronised.
    """

    params: Any
    opt_state: Any

    def __init__(self, params: Any, optimizer: optax.GradientTransformation, **kwargs: Any) -> None:
        self.optimizer = optimizer
        super().__init__(params=params, opt_state=None, **kwargs)

    def save(self) -> None:
        """Keep copies of all trees, this rank's residuals among them, and of all objects."""
        self._kept = {name: _mapped(np.array, getattr(self, name)) for name in self._trees()}
        super().save()
        for name in self._kept:
            del self._saved[name]

    def restore(self) -> None:
        """Go back to what was saved last."""
        for name, tree in self._kept.items():
            setattr(self, name, _mapped(jnp.array, tree))
        super().restore()

    def reset(self) -> None:
        """Have programs compiled anew: how many ranks there are is part of them."""
        jax.clear_caches()

    def held_back(self) -> float:
        """Return the norm of what compression holds back on this rank alone."""
        return float(residual_norm(self.opt_state))

    def take_back(self) -> None:
        """Nothing, for a step is a function of its arguments; the commit's, where it took them.

        That is so in programs that arrays were donated to.
        """
        leaves = [leaf for name in self._trees() for leaf in jax.tree.leaves(getattr(self, name))]
        if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in leaves):
            self.restore()

    def content(self) -> dict[str, Any]:
        """Return trees, as arrays by path, and objects, without what is each rank's own."""
        found: dict[str, Any] = {
            name: value for name, value in super().content().items() if name not in self._trees()
        }
        for name in self._trees():
            paths, leaves = paths_and_leaves(_shared(getattr(self, name)))
            found[name] = dict(zip(paths, map(np.asarray, leaves), strict=True))
        return {"": [int(state.step) for state in _reductions(self.opt_state)], **found}

    def sync(self) -> None:
        """Take over rank 0's trees and objects, and save them. Collective.

        Raises Mismatch, the same on every rank, where trees differ.
        """
        if self.opt_state is None or is_elastic():
            with carrying_over(_reductions(self.opt_state)):
                made = self.optimizer.init(self.params)
            before = made if self.opt_state is None else self.opt_state
            self.opt_state = _merged(before, _shared(before), _reductions(made))
        own = _reductions(self.opt_state)
        steps = broadcast_object([int(state.step) for state in own])
        numbered = [s._replace(step=jnp.int32(n)) for s, n in zip(own, steps, strict=True)]
        trees = {name: getattr(self, name) for name in self._trees()}
        common = broadcast_pytree({name: _shared(tree) for name, tree in trees.items()})
        for name, tree in trees.items():
            setattr(self, name, _merged(tree, common[name], numbered))
        super().sync()

    def _trees(self) -> list[str]:
        return [name for name in self._names if _is_tree(getattr(self, name))]

    def _plain(self) -> list[str]:
        return [name for name in self._names if not _is_tree(getattr(self, name))]


def _is_tree(value: Any) -> bool:
    leaves = jax.tree.leaves(value)
    return any(isinstance(leaf, jax.Array | np.ndarray) for leaf in leaves)


def _mapped(function: Any, tree: Any) -> Any:
    return jax.tree.map(
        lambda leaf: function(leaf) if isinstance(leaf, jax.Array | np.ndarray) else leaf, tree
    )


def _is_own(value: Any) -> bool:
    return isinstance(value, ReduceGradientsState)


def _reductions(tree: Any) -> list[ReduceGradientsState]:
    return [leaf for leaf in jax.tree.leaves(tree, is_leaf=_is_own) if _is_own(leaf)]


def _shared(tree: Any) -> Any:
    """Return a tree without what is each rank's own."""
    return jax.tree.map(lambda leaf: None if _is_own(leaf) else leaf, tree, is_leaf=_is_own)


def _merged(tree: Any, shared: Any, own: Sequence[ReduceGradientsState]) -> Any:
    """Return a tree like ``tree`` with the leaves of ``shared``, and ``own`` states."""
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_own)
    common, states = iter(jax.tree.leaves(shared)), iter(own)
    filled = [next(states) if _is_own(leaf) else next(common) for leaf in leaves]
    return jax.tree.unflatten(structure, filled)
