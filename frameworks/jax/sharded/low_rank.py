"""PowerSGD in pure array code: factors of matrices, averaged over a mesh's axis.

Sums of products with the whole matrix are in XLA's order, so results are those of the reference to
within rounding, and the same on all devices.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ringlet.compressors.core.context import Context
from ringlet.compressors.lowrank.factors import draw
from ringlet.compressors.lowrank.powersgd import PowerSGD

_SMALL = 1e-9  # as in ``compressors.lowrank.factors``

Mean = Callable[[Any], Any]  # over the axis, the same bits on every device


class Factors:
    """``powersgd`` for a tensor of one shape."""

    def __init__(self, like: PowerSGD, shape: tuple[int, ...]) -> None:
        self._like, self._shape = like, shape
        matrix = like.matrix(
            np.broadcast_to(np.float32(0), shape).reshape(-1), Context(shape=shape)
        )
        self.matrix: tuple[int, int] | None = None if matrix is None else matrix.shape

    def drawn(self, name: str, step: Any, seed: int) -> Any:
        """Return the factor (rank x columns, float32) that a first step begins with.

        Raises ValueError for a ``step`` that is not known when a program is traced.
        """
        assert self.matrix is not None
        try:
            number = operator.index(step)
        except TypeError as error:
            raise ValueError(
                f"{str(self._like)!r} draws a factor on the host, for a step that is known when "
                "the program is traced: pass what sharded_state returns as residual, with "
                "warm_start, or an int as step"
            ) from error
        rows = np.empty((self._like.rank, self.matrix[1]), np.float32)
        draw(rows, Context(name=name, shape=self._shape, step=number, seed=seed))
        return jnp.asarray(rows)

    def reduce(self, x: Any, right: Any, mean: Mean) -> tuple[Any, Any, Any]:
        """Return the mean of ``x`` (flat) as approximated, this device's share, and the factor."""
        if self.matrix is None:
            return mean(x), x, right
        matrix = x.reshape(self.matrix)
        left = mean(_times(right, matrix.T))
        poison = jnp.where(jnp.isfinite(left).all(), np.float32(0), np.float32(np.nan))
        basis = _orthonormal(jnp.where(jnp.isfinite(left), left, 0))
        own = _times(basis, matrix)
        both = mean(own)
        top = jnp.abs(both).max(axis=1, keepdims=True)
        usable = jnp.isfinite(top.max() + poison) & (top > 0)
        after = jnp.where(usable, both / jnp.where(usable, top, 1), right)
        poisoned = (basis + poison).T
        return _times(poisoned, both).reshape(-1), _times(poisoned, own).reshape(-1), after


def _times(a: Any, b: Any) -> Any:
    return jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)


def _orthonormal(rows: Any) -> Any:
    """Return an orthonormal basis (float32) of finite rows, made in float64, as the kernels do."""
    nothing = rows.astype("float64") * 0  # made of the rows, so that it is of the same devices

    def length(row: Any) -> Any:
        return jnp.sqrt((row * row).sum())

    def add(k: Any, held: tuple[Any, Any]) -> tuple[Any, Any]:
        basis, unit = held  # rows from k on are zero
        row = rows[k].astype("float64")

        def reduced(row: Any) -> Any:
            for _ in range(2):
                row = row - (basis @ row) @ basis
            return row

        def dependent(trial: tuple[Any, Any, Any]) -> Any:
            row, left, _ = trial
            return length(left) <= _SMALL * length(row)

        def another(trial: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
            _, _, unit = trial
            row = nothing[0].at[unit].set(1)
            return row, reduced(row), unit + 1

        _, left, unit = jax.lax.while_loop(dependent, another, (row, reduced(row), unit))
        return basis.at[k].set(left / length(left)), unit

    start = nothing, nothing[0, 0].astype("int32")
    return jax.lax.fori_loop(0, len(rows), add, start)[0].astype("float32")
