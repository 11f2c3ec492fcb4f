"""Comparing arrays of a compiled program between ranks, in the few steps in which that is due."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax

from ringlet.jax.ops.ordered_calls import call, has_values
from ringlet.ring.dtypes import Array
from ringlet.shared.drift import Drift, sums_of_bits

FLAG = ("uint8", ())  # an output: whether it is due


def raise_flag(flag: Array) -> list[tuple[str, Array]]:
    """Say that a comparison is due; the program has the arrays, and not the caller."""
    flag[...] = 1
    return []


def compare_where(due: Any, drift: Callable[[], Drift], arrays: Mapping[str, Any]) -> None:
    """Compare ``arrays`` with other ranks', by name, where ``due`` says so.

    It is of a step that has been counted; ``arrays`` are those before it.
    """
    names, given = list(arrays), list(arrays.values())

    def compare(values: list[Any]) -> None:
        def begin(held: Any, _: Any) -> None:
            drift().compare(names, sums_of_bits(held), drift().steps - 1)

        call(begin, values, [])

    if not given:
        return
    if has_values([due, *given]):
        if due:
            compare(given)
        return
    jax.lax.cond(due > 0, compare, lambda _: None, given)
