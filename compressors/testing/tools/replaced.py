"""Something else in the place of what a module, a class or the environment has, for a while.

``unittest.mock`` does the same, and takes as long to import as NumPy does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def replaced(owner: Any, **others: Any) -> Iterator[None]:
    """Let attributes that ``owner`` has itself be ``others`` until the with-block ends."""
    before = {name: vars(owner)[name] for name in others}
    try:
        for name, other in others.items():
            setattr(owner, name, other)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


@contextmanager
def environment(**changes: str) -> Iterator[None]:
    """Set variables of ``os.environ``; at the end of the with-block it is what it was before."""
    before = dict(os.environ)
    try:
        os.environ.update(changes)
        yield
    finally:
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
