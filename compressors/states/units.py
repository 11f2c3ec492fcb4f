"""The units of what a tensor's state holds, and what it is multiplied by when they change.

``Traits.gradient_units`` names what is in units of what is compressed: the gradient, prescaled, or
its share of the mean (``average``) among ``size`` ranks where a compressor divides first. What is
held back of the sum of a shard is in units of the result instead: of the sum times ``postscale``,
or of the mean. What is held back of a table's rows is in units of the gradient itself.
"""

from __future__ import annotations

import numpy as np

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.core.context import SECOND_STAGE, State
from ringlet.compressors.modifiers.residuals import rescale as rescale_narrow

OF_RESULT = "server"  # what EF21 remembers in units of the result, and not of the gradient


def rescale(state: State, compressor: Compressor, factor: float) -> None:
    """Multiply what ``state`` holds in units of the gradient by ``factor``, of parts of it too."""
    rescale_named(state, frozenset(compressor.traits().gradient_units), factor)


def prescale(state: State, compressor: Compressor, factor: float) -> None:
    """Multiply what ``state`` holds in units of what is compressed by ``factor``.

    Not what is held back of sums, nor the mean that EF21 adds up, which are in units of the result.
    """
    names = frozenset(compressor.traits().gradient_units) - {OF_RESULT}
    rescale_named(state, names, factor, sums=False)


def share(compressor: Compressor, size: int) -> float:
    """Return the share of a gradient that is compressed in a mean over ``size`` ranks."""
    return 1.0 / size if compressor.traits().predivide else 1.0


def in_gradient(compressor: Compressor, size: int, average: bool, postscale: float) -> float:
    """Return what a residual is multiplied by to be in units of the gradient, as rows are."""
    return postscale / (share(compressor, size) if average else 1.0)


def factor_among(
    name: str, compressor: Compressor, before: int, after: int, average: bool, owed: bool
) -> float:
    """Return what something of ``before`` ranks is multiplied by among ``after``."""
    if not average:
        return 1.0
    # Rows are divided by the number of ranks after they were summed, whatever compresses them.
    shares = 1.0 if name == "rows" else share(compressor, after) / share(compressor, before)
    return shares * (after / before if owed else 1.0)


def rescale_named(state: State, names: frozenset[str], factor: float, sums: bool = True) -> None:
    """Multiply what ``state`` holds under ``names`` by ``factor``, in states of shards too.

    And in those of ``sums``, which are in units of the result, if they are to change as well.
    """
    if "residual" in names:
        rescale_narrow(state, factor)
    for key, value in state.items():
        if isinstance(value, dict):
            if sums or not key.startswith(SECOND_STAGE):
                rescale_named(value, names, factor, sums)
        elif key in names:
            state[key] = _times(value, factor)


def _times(value: object, factor: float) -> object:
    if hasattr(value, "shape"):
        times = value.copy()  # type: ignore[attr-defined]  # who is refused puts the old one back
        times *= np.float32(factor)
        return times
    return value * factor  # type: ignore[operator]  # a number
