"""Copies of vectors, without what Numba compiles to describe shapes that differ."""

from __future__ import annotations

from typing import Any

from numba import njit


@njit(nogil=True)
def copy(x: Any, out: Any) -> None:
    """Fill ``out`` with as many values of ``x``; nothing is to be done where they are one.

    ``out[:] = x`` does that too. But for the error where shapes differ Numba compiles Python's
    formatting of texts first, which takes seconds.
    """
    if x.ctypes.data != out.ctypes.data:
        for i in range(out.size):
            out[i] = x[i]
