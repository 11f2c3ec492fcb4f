"""Whether this process is a rank's own, or a worker that Ray, Spark or Dask has lent.

Such a worker is used again when the rank has left, so a rank in it may neither end nor change it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_loans: list[None] = []  # of this process, one within the other


def is_lent() -> bool:
    """Whether this process is lent: a rank in it may neither end nor change it."""
    return bool(_loans)


@contextmanager
def lent() -> Iterator[None]:
    """Let the block run in a process that is lent."""
    _loans.append(None)
    try:
        yield
    finally:
        _loans.pop()
