"""Names of a pytree's leaves: compressors are chosen by them, and what these remember is filed."""

from __future__ import annotations

from typing import Any

import jax

from ringlet.shared.model_agreement import unique


def paths_and_leaves(tree: Any) -> tuple[list[str], list[Any]]:
    """Return the paths of all leaves, such as "dense/kernel", no two alike, and the leaves.

    A leaf that is the whole tree is called "leaf".
    """
    pairs, _ = jax.tree_util.tree_flatten_with_path(tree)
    names = [jax.tree_util.keystr(path, simple=True, separator="/") or "leaf" for path, _ in pairs]
    return unique(names), [leaf for _, leaf in pairs]
