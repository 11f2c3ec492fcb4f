"""Entries put at their places among others, added there, and read from there."""

from __future__ import annotations

from typing import Any

from ringlet.ring.jit import jit


@jit
def scatter(indices: Any, values: Any, out: Any) -> bool:
    """Overwrite ``out`` with zeros and the given entries; False if an index lies outside."""
    out[:] = 0
    for j in range(indices.size):
        if indices[j] >= out.size:
            return False
        out[indices[j]] = values[j]
    return True


@jit
def scatter_add(indices: Any, values: Any, out: Any) -> bool:
    """Add the given entries to ``out``; False if an index lies outside."""
    for j in range(indices.size):
        if indices[j] >= out.size:
            return False
        out[indices[j]] += values[j]
    return True


@jit
def gather(x: Any, indices: Any, values: Any) -> None:
    """Copy the entries of ``x`` at ``indices`` to ``values``."""
    for j in range(indices.size):
        values[j] = x[indices[j]]
