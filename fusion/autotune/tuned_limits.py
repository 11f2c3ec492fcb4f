"""Which limits are tuned: what the user named, or all that make a difference here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ringlet.fusion.autotune.space import BOUNDS
from ringlet.fusion.limits import Limits
from ringlet.fusion.peers import levels_of
from ringlet.ring.communicator import Communicator
from ringlet.ring.variables import ALL


def names(text: str, absent: Mapping[str, str] | None = None) -> list[str]:
    """Return what ``text`` names, in the order of ``BOUNDS``.

    Commas divide names; "all" stands for every one, and "-" takes one away, as in
    "all,-cycle_time". ``absent`` says why some make no difference here: "all" leaves those out.
    ValueError for one that is not tunable, or is named though it is absent.
    """
    absent = absent or {}
    found: set[str] = set()
    dropped: set[str] = set()
    for name in filter(None, (part.strip() for part in text.split(","))):
        bare = name.removeprefix("-")
        if name == ALL:
            found |= BOUNDS.keys() - absent.keys()
        elif bare not in BOUNDS:
            raise ValueError(f"autotune: {bare!r} is not one of {', '.join([*BOUNDS, ALL])}")
        elif bare != name:
            dropped.add(bare)
        elif name in absent:
            raise ValueError(f"autotune: {name!r} cannot be tuned here: {absent[name]}")
        else:
            found.add(name)
    return [name for name in BOUNDS if name in found - dropped]


def settled(limits: Limits, comm: Communicator) -> Limits:
    """Return ``limits`` as they apply to an engine on ``comm``; the same on every rank.

    ``autotune`` holds the names of what is tuned, and ``hierarchical`` is false where there are no
    two levels. Raises ValueError for a name of what cannot be tuned here.
    """
    tuned = names(limits.autotune, _absent(limits, comm)) if limits.autotune else []
    two = limits.hierarchical and levels_of(comm) is not None
    return replace(limits, autotune=",".join(tuned), hierarchical=two)


def _absent(limits: Limits, comm: Communicator) -> dict[str, str]:
    levels = levels_of(comm)
    found: dict[str, str] = {}
    flat = comm if levels is None else levels.flat
    if comm.size == 1 or flat.sibling(1) is None:
        found["streams"] = (
            f"{comm.size} rank(s) over transport {comm.base.name!r} make one exchange at a time; "
            "leave it out, or use transport 'gloo'"
        )
    if limits.cache_capacity == 0:
        found["cache"] = "the cache has no room; leave it out, or raise RINGLET_CACHE_CAPACITY"
    if levels is None:
        found["hierarchical"] = (
            "all ranks are on one level; leave it out, or set RINGLET_HIERARCHICAL_ALLREDUCE=1 "
            "where several hosts have equally many ranks, but more than one"
        )
    return found
