"""Names of a pytree's leaves: compressors are chosen by them, and what these remember is filed."""

from __future__ import annotations

from typing import Any

import jax

from ringlet.shared.model_agreement import unique

_HELD = jax.tree_util.GetAttrKey("value")  # of a variable of flax.nnx


def paths_and_leaves(tree: Any) -> tuple[list[str], list[Any]]:
    """Return the paths of all leaves, such as "dense/kernel", no two alike, and the leaves.

    A leaf that is the whole tree is called "leaf". Variables of flax.nnx are called as what they
    hold: its optimizer shows parameters as the former and gradients as the latter.
    """
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    return unique([_name(path) for path, _ in pairs]), [leaf for _, leaf in pairs]


def _name(path: tuple[Any, ...]) -> str:
    if len(path) > 1 and path[-1] == _HELD:
        path = path[:-1]
    return jax.tree_util.keystr(path, simple=True, separator="/") or "leaf"
