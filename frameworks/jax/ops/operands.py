"""What collectives take: arrays of JAX's whose dtypes can travel, and names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from ringlet.job.session import current
from ringlet.shared.arrays import DTYPES


def operand(value: Any, what: str = "array") -> Any:
    """Return an array, a number or what JAX makes an array of; TypeError if it cannot travel."""
    array = jnp.asarray(value)
    dtype_of(array, what)
    return array


def dtype_of(array: Any, what: str = "array") -> str:
    """Return the name of the array's dtype; TypeError for one that cannot travel."""
    name = str(array.dtype.name)
    if name not in DTYPES:
        raise TypeError(f"{what} is of dtype {name}, which cannot travel; use {', '.join(DTYPES)}")
    return name


def name_when_run(kind: str, name: str | None, process_set: int) -> Callable[[], str]:
    """Return what tells an operation's name at the time it runs.

    Without a name it is a number, counted in the order in which operations run.
    """
    if name is not None:
        return lambda: name
    kind = kind if process_set == 0 else f"{kind}.{process_set}"
    return lambda: current().unnamed(f"jax.{kind}")
