"""Functions that make replicas start alike, and objects between ranks."""

from __future__ import annotations

from typing import Any

import jax

from ringlet.jax.ops.movements import broadcast_all
from ringlet.jax.ops.operands import operand
from ringlet.jax.ops.ordered_calls import refuse_trace, to_array
from ringlet.jax.tree_paths import paths_and_leaves
from ringlet.job.process_sets import ProcessSet, global_process_set
from ringlet.shared.model_agreement import common_names, equal_on_all_ranks


def broadcast_pytree(
    tree: Any, root_rank: int = 0, process_set: ProcessSet = global_process_set
) -> Any:
    """Return rank ``root_rank``'s leaves on every rank, in one exchange. Not inside ``jax.jit``.

    Leaves are arrays or numbers; parameters and optimizer states of optax, flax and equinox are
    such trees. Raises Mismatch, the same on every rank, when paths, shapes or dtypes differ, and
    TypeError for leaves that cannot travel. What ``reduce_gradients`` remembers is each rank's own:
    leave its state out.
    """
    refuse_trace("broadcast_pytree")
    paths, leaves = paths_and_leaves(tree)
    arrays = [operand(leaf, f"leaf {path!r}") for path, leaf in zip(paths, leaves, strict=True)]
    items = [(p, f"{a.dtype.name}{list(a.shape)}") for p, a in zip(paths, arrays, strict=True)]
    what = "broadcast_pytree"
    names = common_names(what, f"jax.{what}", items, process_set)
    if not arrays:
        return tree
    moved = broadcast_all(arrays, root_rank, [f"jax.{what}.{n}" for n in names], process_set)
    return jax.tree_util.tree_unflatten(jax.tree_util.tree_structure(tree), moved)


def replicas_equal(tree: Any) -> bool:
    """Whether a pytree is bit-equal on all ranks. Collective, the same answer on every rank."""
    refuse_trace("replicas_equal")
    paths, leaves = paths_and_leaves(tree)
    arrays = [to_array(operand(leaf)) for leaf in leaves]
    return equal_on_all_ranks(
        (f"{path} {array.dtype}{array.shape}", array)
        for path, array in zip(paths, arrays, strict=True)
    )
