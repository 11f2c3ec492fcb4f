"""What Ringlet warns of while a part of a test runs, in the ranks of a job too."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def warned(texts: list[str]) -> Iterator[None]:
    """Add to ``texts`` the warnings that are logged meanwhile."""
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ringlet").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("ringlet").removeHandler(handler)
