"""Functions that make replicas start alike, and objects between ranks."""

from __future__ import annotations

from typing import Any

import jax

from ringlet.jax.ops.any_dtype import carried
from ringlet.jax.ops.movements import broadcast_all
from ringlet.jax.ops.ordered_calls import refuse_trace, to_array
from ringlet.jax.tree_paths import paths_and_leaves
from ringlet.job.process_sets import ProcessSet, global_process_set
from ringlet.ring.callers import public
from ringlet.shared.model_agreement import common_names, equal_on_all_ranks


@public
def broadcast_pytree(
    tree: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """Return rank ``root_rank``'s leaves on every rank, in one exchange. Not inside ``jax.jit``.

    Leaves are arrays, numbers or keys of ``jax.random``; parameters and optimizer states of optax,
    flax and equinox are such trees. Raises Mismatch, the same on every rank, when paths, shapes or
    dtypes differ, TypeError for leaves that cannot travel, and OverflowError for NumPy's numbers of
    64 bits that JAX cannot hold. What ``reduce_gradients`` remembers is each rank's own: leave its
    state out.
    """
    refuse_trace("broadcast_pytree")
    paths, leaves = paths_and_leaves(tree)
    pairs = list(zip(paths, leaves, strict=True))
    moving = [carried(leaf, f"leaf {path!r}") for path, leaf in pairs]
    items = [(path, each.kind) for path, each in zip(paths, moving, strict=True)]
    what = "broadcast_pytree"
    names = common_names(what, f"jax.{what}", items, process_set)
    if not moving:
        return tree
    labels, arrays = [f"jax.{what}.{name}" for name in names], [each.array for each in moving]
    moved = broadcast_all(arrays, root_rank, labels, process_set)
    found = [each.back(array) for each, array in zip(moving, moved, strict=True)]
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(tree), found)


@public
def replicas_equal(tree: Any) -> bool:
    """Whether a pytree is bit-equal on all ranks. Collective, the same answer on every rank."""
    refuse_trace("replicas_equal")
    paths, leaves = paths_and_leaves(tree)
    held = [carried(leaf, f"leaf {path!r}") for path, leaf in zip(paths, leaves, strict=True)]
    return equal_on_all_ranks(
        (f"{path} {each.kind}", to_array(each.array))
        for path, each in zip(paths, held, strict=True)
    )
