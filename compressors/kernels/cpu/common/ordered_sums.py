"""Sums in double precision in an order that vectors and array code can both follow."""

from __future__ import annotations

from typing import Any

from ringlet.ring.jit import jit

# Element i of a bucket is added to sum i % LANES.
LANES = 32


@jit
def fold(sums: Any) -> Any:
    """Return the sum of ``LANES`` sums, adding the second half to the first until one is left."""
    width = LANES // 2
    while width:
        for i in range(width):
            sums[i] += sums[i + width]
        width //= 2
    return sums[0]
