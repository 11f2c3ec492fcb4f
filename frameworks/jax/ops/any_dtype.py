"""Arrays of any dtype on their way to other ranks: as bytes where collectives do not take them.

No collective combines keys of random numbers, unsigned integers, complex numbers or those of 8 bits
and fewer, but parameters, and states of optimizers and programs, hold them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ringlet.jax.ops.operands import array_of, dtype_of
from ringlet.shared.arrays import DTYPES


class Carried(NamedTuple):
    """An ``array`` that can travel; ``kind`` is what it stands for, which ``back`` makes of it."""

    array: Any
    kind: str
    back: Callable[[Any], Any]


def carried(leaf: Any, what: str = "array") -> Carried:
    """Return an array, a number or keys of random numbers as what can travel.

    Raises TypeError, naming ``what``, for what cannot, such as texts.
    """
    if is_key(leaf):
        impl, data = jax.random.key_impl(leaf), carried(jax.random.key_data(leaf), what)
        kind = f"{leaf.dtype.name}{list(leaf.shape)}"
        return Carried(
            data.array, kind, lambda array: jax.random.wrap_key_data(data.back(array), impl=impl)
        )
    given = array_of(leaf, what)
    dtype, shape = given.dtype, given.shape
    kind = f"{dtype.name}{list(shape)}"
    if dtype.name in DTYPES:
        return Carried(given, kind, lambda array: array)
    if not as_bytes(dtype):
        dtype_of(given, what)  # an error
    bits = np.ascontiguousarray(np.asarray(given)).reshape(-1).view(np.uint8)
    return Carried(bits, kind, lambda array: jnp.asarray(_typed(array, dtype, shape)))


def as_bytes(dtype: Any) -> bool:
    """Whether numbers of this dtype, which no collective combines, travel as bytes."""
    return jnp.issubdtype(dtype, np.integer) or jnp.issubdtype(dtype, np.inexact)


def is_key(leaf: Any) -> bool:
    """Whether ``leaf`` is keys of random numbers, as ``jax.random.key`` makes them."""
    return isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _typed(array: Any, dtype: Any, shape: tuple[int, ...]) -> Any:
    return np.asarray(array).view(dtype).reshape(shape)
