"""Horovod's elastic interface for JAX: programs that go on when ranks are lost, or come."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from ringlet.jax.carried_states import carrying_over, merged, shared
from ringlet.jax.functions import broadcast_pytree
from ringlet.jax.ops.any_dtype import carried, is_key
from ringlet.jax.reduction_state import reductions, residual_norm
from ringlet.jax.tree_paths import paths_and_leaves
from ringlet.job.elastic import HostsUpdatedInterrupt, ObjectState, State, run
from ringlet.job.objects import broadcast_object
from ringlet.job.process_sets import global_process_set
from ringlet.ring.rendezvous.epochs import is_elastic
from ringlet.shared.arrays import DTYPES
from ringlet.shared.rank_comparison import same_digest

__all__ = ["HostsUpdatedInterrupt", "JaxState", "ObjectState", "State", "run"]

_JAXS = ("params", "opt_state")  # trees whatever dtype they begin with


class JaxState(ObjectState):
    """Parameters, an optimizer's state and, as ``kwargs``, anything else, all as attributes.

    ``params`` is a pytree, and ``opt_state`` is ``optimizer.init(params)``, made by the first
    ``sync``: newcomers do so together with those that were there. Pytrees of arrays, or of keys of
    ``jax.random``, among ``kwargs`` travel as arrays, other objects pickled; these are also NumPy's
    arrays of dtypes that JAX does not keep, such as int64. What ``reduce_gradients`` remembers is
    each rank's own: it is saved, restored, and carried over by the gradients' paths to another
    number of ranks, but not synchronised. Raises TypeError for what is no optimizer, such as its
    state.
    """

    params: Any
    opt_state: Any

    def __init__(self, params: Any, optimizer: optax.GradientTransformation, **kwargs: Any) -> None:
        if not callable(getattr(optimizer, "init", None)):
            raise TypeError(
                f"the second argument is optax's optimizer, whose state JaxState makes, not a "
                f"{type(optimizer).__name__}: write JaxState(params, optimizer), and find the "
                "state in its opt_state"
            )
        self.optimizer = optimizer
        super().__init__(params=params, opt_state=None, **kwargs)

    def save(self) -> None:
        """Keep copies of all trees, this rank's residuals among them, and of all objects."""
        trees = {name: getattr(self, name) for name in self._trees()}
        self._kept = {name: jax.tree.map(_made_again, tree) for name, tree in trees.items()}
        super().save()
        for name in self._kept:
            del self._saved[name]

    def restore(self) -> None:
        """Go back to what was saved last."""
        for name, tree in self._kept.items():
            setattr(self, name, jax.tree.map(lambda make: make(), tree))
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
            paths, leaves = paths_and_leaves(shared(getattr(self, name)))
            moving = [carried(leaf, f"leaf {p!r}") for p, leaf in zip(paths, leaves, strict=True)]
            arrays = [np.asarray(each.array) for each in moving]
            found[name] = dict(zip(paths, arrays, strict=True))
        return {"": [int(state.step) for state in reductions(self.opt_state)], **found}

    def sync(self) -> None:
        """Take over rank 0's trees and objects, and save them. Collective.

        Raises Mismatch, the same on every rank, where trees differ.
        """
        if self.opt_state is None or is_elastic():
            with carrying_over(reductions(self.opt_state)):
                made = self.optimizer.init(self.params)
            before = made if self.opt_state is None else self.opt_state
            self.opt_state = merged(before, shared(before), reductions(made))
        own = reductions(self.opt_state)
        steps = broadcast_object([int(state.step) for state in own])
        numbered = [s._replace(step=jnp.int32(n)) for s, n in zip(own, steps, strict=True)]
        trees = {name: getattr(self, name) for name in self._agreed_trees()}
        common = broadcast_pytree({name: shared(tree) for name, tree in trees.items()})
        for name, tree in trees.items():
            setattr(self, name, merged(tree, common[name], numbered))
        super().sync()

    def forget_held(self) -> bool:
        """Forget what compressors remember, in ``opt_state``."""
        own = reductions(self.opt_state)
        there = any(bool(state.present.any()) for state in own)
        emptied = [
            state._replace(
                present=jnp.zeros_like(state.present),
                held=jax.tree.map(jnp.zeros_like, state.held),
            )
            for state in own
        ]
        self.opt_state = merged(self.opt_state, shared(self.opt_state), emptied)
        return there

    def _agreed_trees(self) -> list[str]:
        """Return the names of rank 0's trees, and let those of ``kwargs`` be like them. Collective.

        A rank that comes has what they were when the program began, such as None.
        """
        own = self._trees()
        outlines = {
            name: jax.tree.map(_outline, getattr(self, name)) for name in own if name not in _JAXS
        }
        told = {name: _described(tree) for name, tree in outlines.items()}
        digest = hashlib.blake2b(repr(sorted(told.items())).encode(), digest_size=16).digest()
        if same_digest(digest, "jax.elastic.trees", global_process_set):
            return own
        outlines = broadcast_object(outlines)
        for name, tree in outlines.items():
            if told.get(name) != _described(tree):
                setattr(self, name, jax.tree.map(_empty, tree))
        return [name for name in self._names if name in _JAXS or name in outlines]

    def _trees(self) -> list[str]:
        return [name for name in self._names if _is_tree(getattr(self, name), name in _JAXS)]

    def _plain(self) -> list[str]:
        trees = self._trees()
        return [name for name in self._names if name not in trees]


def _is_array(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | np.ndarray)


def _is_tree(value: Any, jaxs: bool) -> bool:
    """Whether ``value`` holds arrays, and JAX keeps them as they are if they are not ``jaxs``."""
    arrays = list(filter(_is_array, jax.tree.leaves(value)))
    if jaxs or any(isinstance(array, jax.Array) for array in arrays):
        return bool(arrays)
    return bool(arrays) and all(array.dtype.name in DTYPES and _keeps(array) for array in arrays)


def _keeps(array: np.ndarray[Any, Any]) -> bool:
    return bool(jax.dtypes.canonicalize_dtype(array.dtype) == array.dtype)


def _made_again(leaf: Any) -> Callable[[], Any]:
    """Return what makes an array as it is now once more; other leaves stay what they are."""
    if is_key(leaf):
        impl, data = jax.random.key_impl(leaf), np.array(jax.random.key_data(leaf))
        return lambda: jax.random.wrap_key_data(jnp.array(data), impl=impl)
    if not _is_array(leaf):
        return lambda: leaf
    copy = np.array(leaf)
    return lambda: jnp.array(copy)


@dataclass(frozen=True)
class _Outline:
    """The shape and dtype of an array, or of keys, whose way to make random numbers is named."""

    shape: tuple[int, ...]
    dtype: str
    keys: Any = None

    def empty(self) -> Any:
        if self.keys is None:
            return jnp.zeros(self.shape, self.dtype)
        return jax.random.split(jax.random.key(0, impl=self.keys), self.shape)


def _outline(leaf: Any) -> Any:
    if not _is_array(leaf):
        return leaf
    keys = jax.random.key_impl(leaf) if is_key(leaf) else None
    return _Outline(tuple(leaf.shape), leaf.dtype.name, keys)


def _empty(leaf: Any) -> Any:
    return leaf.empty() if isinstance(leaf, _Outline) else leaf


def _described(outline: Any) -> str:
    paths, leaves = paths_and_leaves(outline)
    kinds = [str(leaf) if isinstance(leaf, _Outline) else "" for leaf in leaves]
    return repr(list(zip(paths, kinds, strict=True)))
