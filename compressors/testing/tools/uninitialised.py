"""Memory as it is on a bad day: what nobody cleared holds something else every time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from ringlet.compressors.core.context import Array, Workspace
from ringlet.compressors.testing.tools.replaced import replaced


@contextmanager
def uninitialised_as(mark: int) -> Iterator[None]:
    """Let every byte of fresh and of borrowed memory be ``mark`` until the with-block ends.

    That is what ``np.empty``, ``np.empty_like`` and a ``Workspace`` give. For one thread at a time.
    """
    empty, empty_like = np.empty, np.empty_like
    array, lend = Workspace.array, Workspace.lend

    def filled(new: Array) -> Array:
        if new.dtype.kind != "O" and new.flags.c_contiguous:
            new.reshape(-1).view(np.uint8).fill(mark)
        return new

    def borrowed(self: Workspace, name: str, n: int, dtype: npt.DTypeLike = np.float32) -> Array:
        return filled(array(self, name, n, dtype))

    def lent(self: Workspace, n: int, dtype: npt.DTypeLike = np.float32) -> Array:
        return filled(lend(self, n, dtype))

    def fresh(*args: Any, **kwargs: Any) -> Array:
        return filled(empty(*args, **kwargs))

    def fresh_like(*args: Any, **kwargs: Any) -> Array:
        return filled(empty_like(*args, **kwargs))

    with (
        replaced(np, empty=fresh, empty_like=fresh_like),
        replaced(Workspace, array=borrowed, lend=lent),
    ):
        yield
