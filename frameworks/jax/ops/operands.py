"""What collectives take: arrays of JAX's whose dtypes can travel, and names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np

from ringlet.job.session import current
from ringlet.shared.arrays import DTYPES

GROUP = "jax.tree.leaves(tree)", "arrays"  # what grouped operations take


def operand(value: Any, what: str = "array") -> Any:
    """Return an array, a number or what JAX makes an array of; TypeError if it cannot travel."""
    array = array_of(value, what)
    dtype_of(array, what)
    return array


def array_of(value: Any, what: str = "array") -> Any:
    """Return what JAX makes of ``value``, in 32 bits where it has no more.

    Raises TypeError or ValueError where that is nothing, OverflowError for whole numbers that need
    64 bits: of NumPy's JAX would keep the lower 32.
    """
    if isinstance(value, dict):
        raise TypeError(
            f"{what} is a dict, and not one array: pass jax.tree.leaves(tree) to a grouped_ "
            "operation, broadcast_pytree(tree), or reduce_gradients(...).update(tree, state)"
        )
    if callable(value):
        raise TypeError(
            f"{what} is a function, {getattr(value, '__name__', value)!r}, which cannot travel: "
            "leave it out, as equinox.filter(model, equinox.is_array) does"
        )
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise type(error)(f"{what}: {error}") from None
    if isinstance(value, np.ndarray | np.generic) and array.dtype != value.dtype:
        _refuse_wrapping(value, array.dtype, what)
    return array


def _refuse_wrapping(value: Any, dtype: Any, what: str) -> None:
    if value.dtype.kind not in "iu" or not value.size:
        return
    ends, least, most = np.iinfo(dtype), int(value.min()), int(value.max())
    if least < ends.min or most > ends.max:
        odd = most if most > ends.max else least
        raise OverflowError(
            f"{what} holds {odd}, which {dtype.name} cannot: JAX has 64 bits only with "
            'jax.config.update("jax_enable_x64", True)'
        )


def dtype_of(array: Any, what: str = "array") -> str:
    """Return the name of the array's dtype; TypeError for one that cannot travel."""
    name = str(array.dtype.name)
    if name.startswith("complex"):
        raise TypeError(
            f"{what} is of dtype {name}, which no collective combines: pass its .real and .imag. "
            "For gradients: optax.contrib.split_real_and_imaginary("
            "optax.chain(reduce_gradients(...), optimizer))"
        )
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
