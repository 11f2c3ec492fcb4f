"""Calls without names: ranks count them alike, in series, so that their names need not travel.

The name of a call is its series' prefix with its number. Calls of one series that differ in nothing
but their number share a *prototype*: the request whose name is the prefix alone.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import replace

from ringlet.fusion.requests.request import Request

MARK = ".noname."
_DIGITS = 18  # of the largest number that is one
# What Ringlet does by itself for somebody without a name; a gradient is a caller's operation.
_OWN = re.compile(rf"(.+?){re.escape(MARK)}(join[0-9]+\.)?([0-9]{{1,{_DIGITS}}})\.(?!grad)(.+)")


class Series:
    """Numbers the calls of one kind in the order in which a rank makes them."""

    def __init__(self, operation: str, since: str = "") -> None:
        self.prefix = f"{operation}{MARK}{since}"
        self._numbers = itertools.count()

    def next(self) -> int:
        """Return the number of the next call."""
        return next(self._numbers)

    def name(self) -> str:
        """Return the name of the next call."""
        return f"{self.prefix}{next(self._numbers)}"


def prototype_of(request: Request) -> Request:
    """Return what calls like ``request``, which has an automatic name, have in common.

    ValueError for one that has not, or that is a member of a group.
    """
    place = place_of(request.name)
    if place is None or request.group:
        raise ValueError(f"{request.name!r} is not the name of a call in a series")
    found = replace(request, name=place[0])
    found.__dict__["key"] = object()  # it never travels; others of this series differ from it
    return found


def called(name: str) -> str:
    """Return ``name`` as messages tell it, where Ringlet does something for whoever has no name.

    Of "DistributedOptimizer.noname.1.alike16" that is "DistributedOptimizer 2 (alike16)".
    """
    own = _OWN.fullmatch(name)
    if own is None:
        return name
    whose, since, number, what = own.groups("")
    which = f" {since}{int(number) + 1}" if since or int(number) else ""
    return f"{whose}{which} ({what})"


def place_of(name: str) -> tuple[str, int] | None:
    """Return prefix and number of an automatic name; None for any other."""
    if MARK not in name:
        return None
    head, dot, tail = name.rpartition(".")
    prefix = head + dot
    plain = tail.isascii() and tail.isdigit() and len(tail) <= _DIGITS
    if not plain or MARK not in prefix or (tail[0] == "0" and tail != "0"):
        return None
    return prefix, int(tail)
