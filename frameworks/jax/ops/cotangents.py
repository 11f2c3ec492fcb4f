"""Gradients of collectives: they are collectives too, so ranks have to run backward together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

STOP = "jax.lax.stop_gradient"  # what keeps gradients from an input


def differentiable(
    arrays: Sequence[Any],
    forward: Callable[[list[Any]], list[Any]],
    backward: Callable[[list[Any]], Sequence[Any]],
) -> list[Any]:
    """Return ``forward(arrays)``, with ``backward(gradients of the results)`` behind it.

    Integers have no gradient.
    """
    given = [jnp.asarray(array) for array in arrays]

    @jax.custom_vjp
    def operation(*inputs: Any) -> list[Any]:
        return forward(list(inputs))

    def forth(*inputs: Any) -> tuple[list[Any], None]:
        return operation(*inputs), None  # not ``forward``: derivatives around this one go through

    def back(_: None, upstream: Sequence[Any]) -> tuple[Any, ...]:
        grads = [
            jnp.zeros(grad.shape, jnp.float32) if grad.dtype == jax.dtypes.float0 else grad
            for grad in upstream
        ]
        results = backward(grads)
        return tuple(
            grad if jnp.issubdtype(array.dtype, jnp.inexact) else _none(array)
            for grad, array in zip(results, given, strict=True)
        )

    operation.defvjp(forth, back)
    return list(operation(*given))


def _none(array: Any) -> Any:
    return np.zeros(array.shape, jax.dtypes.float0)
