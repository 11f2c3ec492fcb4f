"""Whether this process is a rank's own, or a worker that an engine has lent and will use again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_loans: list[None] = []  # of this process, one within the other


def is_lent() -> bool:
    """Whether an engine owns this process: a rank in it may neither end nor change it."""
    return bool(_loans)


@contextmanager
def lent() -> Iterator[None]:
    """Let the block run in a process that belongs to an engine."""
    _loans.append(None)
    try:
        yield
    finally:
        _loans.pop()
