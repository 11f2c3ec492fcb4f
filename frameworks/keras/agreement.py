"""What ranks must have in common before they exchange tensors, and who does not."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from ringlet.objects import allgather_object
from ringlet.process_sets import ProcessSet
from ringlet.ring.errors import Mismatch


def agree(what: str, label: str, items: Sequence[tuple[str, str]], process_set: ProcessSet) -> None:
    """Raise Mismatch, the same on every rank, unless all ranks list the same ``items``.

    Each is a name and what else must be equal, in words. Collective; ``label`` names the exchange.
    """
    digest = hashlib.blake2b(repr(list(items)).encode(), digest_size=16).hexdigest()
    if len(set(allgather_object(digest, f"{label}.agreed", process_set))) == 1:
        return
    lists = allgather_object(list(items), f"{label}.lists", process_set)
    ranks = list(process_set.ranks or range(len(lists)))
    tables = [dict(one) for one in lists]
    for name in dict.fromkeys(name for one in tables for name in one):
        having = [rank for rank, table in zip(ranks, tables, strict=True) if name in table]
        if len(having) < len(ranks):
            raise Mismatch(
                f"{what}: {name!r} is there on rank(s) {_listed(having)} but not on rank(s) "
                f"{_listed([rank for rank in ranks if rank not in having])}; every rank needs the "
                "same model, with the same layer names"
            )
        told = {rank: table[name] for rank, table in zip(ranks, tables, strict=True)}
        if len(set(told.values())) > 1:
            shown = "; ".join(f"rank {rank}: {words}" for rank, words in told.items())
            raise Mismatch(f"{what}: {name!r} differs between ranks ({shown})")
    raise Mismatch(f"{what}: ranks list the same tensors in different orders")


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def unique(names: Sequence[str]) -> list[str]:
    """Return ``names`` with a number behind those that were there before."""
    seen: dict[str, int] = {}
    result = []
    for name in names:
        count = seen[name] = seen.get(name, 0) + 1
        result.append(name if count == 1 else f"{name}#{count}")
    return result
