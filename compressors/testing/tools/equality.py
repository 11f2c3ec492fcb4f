"""Whether arrays, and payloads, hold the same, and whether they lie in the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringlet.compressors.base.contract import Payload
from ringlet.compressors.core.context import Array


def same(a: Array, b: Array) -> bool:
    """Whether two arrays are equal bit for bit, any NaN being as good as another."""
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    return bool(np.array_equal(a, b, equal_nan=a.dtype.kind == "f"))


def same_payload(a: Payload, b: Payload) -> bool:
    """Whether two payloads hold the same arrays."""
    return a.keys() == b.keys() and all(same(a[name], b[name]) for name in a)


def check_apart(kept: Any, what: str, array: Array, other: str) -> None:
    """Raise AssertionError where ``kept``, an array or a dict of such, lies in ``array`` too."""
    if isinstance(kept, dict):
        for key, value in kept.items():
            check_apart(value, f"{what}[{key!r}]", array, other)
    elif isinstance(kept, np.ndarray) and kept.size and array.size:
        assert not np.shares_memory(kept, array), f"{what} shares memory with {other}; copy it"
