"""Read-only arrays as kernels take them.

Numba compiles a kernel a second time for arrays that cannot be written to, and a first step waits
for it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ringlet.compressors.core.context import Array


def unlocked(x: Array) -> Array:
    """Return ``x``, or if it is read-only the same memory as an array that is not.

    ``x`` is a NumPy array of any shape, of a dtype that is NumPy's own; it is for kernels that only
    read it. Nothing is copied.
    """
    return x if x.flags.writeable else np.asarray(_Memory(x))


class _Memory:
    """What NumPy takes for memory that may be written to; it keeps ``x`` alive."""

    def __init__(self, x: Array) -> None:
        self._x = x
        found: dict[str, Any] = dict(x.__array_interface__)
        found["data"] = (found["data"][0], False)
        self.__array_interface__ = found
