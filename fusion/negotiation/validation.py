"""The sentences that tell ranks what they disagree on; the same on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from ringlet.fusion.requests.request import Request

_LOADS = "times when a state was loaded, in buckets (0: never), and which,"
_FROZEN = "frozen parameters"
_COMPARED: tuple[tuple[str, Callable[[Request], Any]], ...] = (
    ("operations", lambda r: r.kind),
    ("places", lambda r: r.place),
    ("dtypes", lambda r: r.dtype),
    ("reduce ops", lambda r: r.op.name.title()),
    ("compressors", lambda r: r.spec),
    ("versions of the plugin", lambda r: r.edition),
    ("collectives", lambda r: r.collective),
    ("root ranks", lambda r: r.root),
    ("prescale factors", lambda r: r.prescale),
    ("postscale factors", lambda r: r.postscale),
    ("groups", lambda r: (r.group, r.group_size)),
    (_LOADS, lambda r: r.loaded or 0),
    (_FROZEN, lambda r: "frozen" if r.frozen else "trained"),
)
_LISTED = 6
_CURES = {
    "places": "; tensors on a GPU that is not their rank's go through host memory: "
    "choose it before anything is on it, torch.cuda.set_device(local_rank())",
    _LOADS: "; compressors need the same kind of memory, of the same step, on all ranks, or "
    "replicas part: load on every rank what that rank saved, before its next step",
    _FROZEN: "; set requires_grad alike on all ranks, in the same step, or models drift apart",
    "versions of the plugin": "; install the same one on all hosts, and start the job again",
}


def disagreement(asked: Mapping[int, Request]) -> str:
    """Return what the ranks that asked for one name disagree on, or an empty string."""
    first = asked[min(asked)]
    if first.kind == "allreduce" and all(request == first for request in asked.values()):
        return ""
    for what, value in _COMPARED:
        text = _differing(what, {rank: value(request) for rank, request in asked.items()}, first)
        if text:
            return text + _CURES.get(what, "")
    if first.kind == "allgather":
        if not all(request.shape for request in asked.values()):
            return f"{_subject(first)}: a tensor without dimensions cannot be gathered"
        trailing = {rank: list(request.shape[1:]) for rank, request in asked.items()}
        return _differing("shapes behind the first dimension", trailing, first)
    if first.kind == "alltoall":
        trailing = {rank: list(request.shape[1:]) for rank, request in asked.items()}
        return _differing("shapes behind the first dimension", trailing, first)
    return _differing("shapes", {rank: list(r.shape) for rank, r in asked.items()}, first)


def group_disagreement(declared: Mapping[int, list[Request]]) -> str:
    """Return what ranks that declared one group disagree on, or an empty string."""
    by_name = {rank: {r.name: r for r in declared[rank]} for rank in sorted(declared)}
    first, *others = by_name.values()
    if all(other == first for other in others):
        return ""
    every = dict.fromkeys(name for names in by_name.values() for name in names)
    for name in every:
        having = [rank for rank in by_name if name in by_name[rank]]
        lacking = [rank for rank in by_name if name not in by_name[rank]]
        if lacking:
            missing = [n for n in every if n not in by_name[lacking[0]]]
            what, verb = ("tensors", "are") if len(missing) > 1 else ("tensor", "is")
            return (
                f"{what} {listed(missing)} {verb} declared on {named_ranks(having)} "
                f"but not on {named_ranks(lacking)}"
            )
    for name in every:
        if all(other[name] == first[name] for other in others):
            continue
        text = disagreement({rank: requests[name] for rank, requests in by_name.items()})
        if text:
            return text
    return ""


def other_counts(members: Iterable[Mapping[int, Request]]) -> str:
    """Return how many tensors ranks give a group of ``members``, or an empty string if as many.

    Each of ``members`` has the requests of the ranks that asked for it.
    """
    groups: dict[str, dict[int, Request]] = {}  # one request of each rank
    for asked in members:
        for rank, request in asked.items():
            if request.group:
                groups.setdefault(request.group, {})[rank] = request
    for group, requests in sorted(groups.items()):
        ranks_of: dict[int, list[int]] = {}
        for rank, request in sorted(requests.items()):
            ranks_of.setdefault(request.group_size, []).append(rank)
        if len(ranks_of) > 1:
            first = requests[min(requests)]
            told = " and ".join(f"{n} on {named_ranks(ranks)}" for n, ranks in ranks_of.items())
            told = told.replace(" on", " tensor on" if first.group_size == 1 else " tensors on", 1)
            return f"{first.kind}: group {group!r} has {told}"
    return ""


def not_everywhere(name: str, asked: Mapping[int, Request], lacking: Sequence[int]) -> str:
    """Return that the ranks ``lacking`` have asked for the rest of a group without ``name``."""
    first = asked[min(asked)]
    return (
        f"{first.kind} of tensor {name!r}: it is a member of group {first.group!r} on "
        f"{named_ranks(sorted(asked))} but not on {named_ranks(lacking)}"
    )


def differing(what: str, values: Mapping[int, Any]) -> str:
    """Return which ranks have which of differing ``values``, or an empty string."""
    ranks_of: dict[str, list[int]] = {}
    for rank, value in sorted(values.items()):
        ranks_of.setdefault(str(value), []).append(rank)
    if len(ranks_of) == 1:
        return ""
    told = "; ".join(f"{named_ranks(ranks)}: {value}" for value, ranks in ranks_of.items())
    return f"{what} differ between ranks ({told})"


def _differing(what: str, values: Mapping[int, Any], request: Request) -> str:
    text = differing(what, values)
    return f"{_subject(request)}: {text}" if text else ""


def _subject(request: Request) -> str:
    return f"{request.kind} of tensor {request.name!r}"


def named_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as a sentence has them, the first few."""
    if not ranks:
        return "no rank"
    shown = ", ".join(str(rank) for rank in ranks[:_LISTED])
    more = f" and {len(ranks) - _LISTED} more" if len(ranks) > _LISTED else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {shown}{more}"


def listed(names: Sequence[str]) -> str:
    """Return names as a sentence has them, the first few."""
    shown = ", ".join(repr(name) for name in names[:_LISTED])
    return shown + (f" and {len(names) - _LISTED} more" if len(names) > _LISTED else "")
