"""Arguments of the wrong kind: errors name what was given; numbers of NumPy count as Python's."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator
from contextlib import suppress
from numbers import Integral
from typing import Any

import numpy as np

from ringlet.job.process_sets import ProcessSet
from ringlet.ring.callers import no_process_set

_GROUPS = "groups is a number, or a list of lists of variables (of parameters in torch)"


def flag(value: Any, name: str) -> bool:
    """Return an argument that is True or False, or 1 or 0; TypeError for what only counts as it."""
    if isinstance(value, bool | np.bool_) or (isinstance(value, Integral) and value in (0, 1)):
        return bool(value)
    raise TypeError(f"{name} is True or False, not {value!r}")


def whole(value: Any, name: str) -> int:
    """Return an argument that is a whole number, of whichever library; TypeError for others."""
    if not isinstance(value, bool | np.bool_):
        with suppress(TypeError):
            return operator.index(value)
    raise TypeError(f"{name} is a whole number, not {value!r}")


def number(value: Any, name: str, what: str = "a number") -> float:
    """Return an argument that is a number, of whichever library; TypeError for others.

    ``what`` it is, in words.
    """
    if not isinstance(value, bool | np.bool_ | str | bytes):
        with suppress(TypeError, ValueError):
            return float(value)
    raise TypeError(f"{name} is {what}, not {value!r}")


def grouping(groups: Any) -> Any:
    """Return ``groups`` as None, a number, or lists that can be gone through again.

    Raises ValueError for what is none of these, and for names in the place of variables.
    """
    if groups is None:
        return None
    if not isinstance(groups, bool | np.bool_):
        with suppress(TypeError):
            count = operator.index(groups)
            if count < 0:
                raise ValueError(f"groups must be at least 0, got {count}")
            return count
    if isinstance(groups, str | bytes) or not isinstance(groups, Iterable):
        raise ValueError(f"{_GROUPS}, not {groups!r}")
    listed = _listed(groups)
    for group in listed if isinstance(listed, list | tuple) else ():
        inside = group if isinstance(group, list | tuple) else [group]
        for each in inside:
            if isinstance(each, str | bytes):
                raise ValueError(f"{_GROUPS}, not of names, such as {each!r}")
    return listed


def process_set_of(given: Any) -> ProcessSet:
    """Return an argument that is a process set; TypeError for others, such as a list of ranks."""
    if not isinstance(given, ProcessSet):
        raise TypeError(no_process_set(given))
    return given


def _listed(groups: Any) -> Any:
    """Return ``groups`` with lists for iterators in it, which would serve once."""
    listed = list(groups) if isinstance(groups, Iterator) else groups
    if not isinstance(listed, list | tuple):
        return listed
    return [list(group) if isinstance(group, Iterator) else group for group in listed]
