"""Which requests every rank of one process set has made: part of the coordinator, on rank 0.

Requests arrive in any order on any rank. One that was executed has a number, and asking for it
again takes one bit, so that a steady step costs one AND over the ranks' bit vectors. What some
rank asks for in full is looked up by name instead, to tell ranks what they disagree on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce
from operator import and_, or_
from typing import Any

from ringlet.fusion import messages as m
from ringlet.fusion.request import Request, dumps
from ringlet.fusion.validation import disagreement, listed, named_ranks

Asked = dict[int, Request]


class Readiness:
    """The requests of process set ``number``, which consists of ``ranks``, ascending."""

    def __init__(
        self, number: int, ranks: Sequence[int], capacity: int, next_batch: Callable[[], int]
    ) -> None:
        self.number, self.ranks = number, tuple(ranks)
        self._capacity = capacity
        self._next_batch = next_batch
        self._named: dict[str, Asked] = {}
        self._bits = dict.fromkeys(self.ranks, 0)  # cached requests asked for
        self._cached: list[Request] = []
        self._ids: dict[Request, int] = {}
        self._bits_of: dict[str, int] = {}  # all cached requests of a name
        self._bits_of_group: dict[str, int] = {}
        self._contested = 0  # cached requests that go by name for now, for some rank asked so
        self._held: dict[str, list[Asked]] = {}  # ready members of groups that are not complete
        self._joined: list[int] = []

    @property
    def joined(self) -> bool:
        """Whether some rank has run out of data."""
        return bool(self._joined)

    @property
    def active(self) -> list[int]:
        """Return the ranks that have not joined."""
        return [rank for rank in self.ranks if rank not in self._joined]

    def ask(self, rank: int, requests: Sequence[Request]) -> list[bytes]:
        """Take requests in full."""
        for request in requests:
            if request.group:  # of which some may have no number: then all go by name
                self._contested |= self._bits_of_group.get(request.group, 0)
            self._by_name(request.name)[rank] = request
        return self._run_named([request.name for request in requests])

    def hit(self, rank: int, bits: int) -> list[bytes]:
        """Take cached requests; ValueError for one that is not."""
        if bits >> len(self._cached):
            raise ValueError(f"asked for cached requests that were never told: {bits:x}")
        contested = bits & self._contested
        self._bits[rank] |= bits & ~contested
        known = [self._cached[i] for i in m.ids_of(contested)]
        return (self.ask(rank, known) if known else []) + self._run_cached()

    def join(self, rank: int) -> list[bytes]:
        """Go on without ``rank`` until all have joined."""
        if rank not in self._joined:
            self._joined.append(rank)
        if len(self._joined) == len(self.ranks):
            last = self._joined[-1]
            self._joined.clear()
            return [m.JOINED + dumps([self.number, last, "", []])]
        return self._run_named(list(self._named)) + self._run_cached()

    def waiting(self) -> dict[str, list[int]]:
        """Return what some ranks have asked for and others have not: the former, by name."""
        found = {name: sorted(asked) for name, asked in self._named.items()}
        for i in m.ids_of(reduce(or_, self._bits.values())):
            ranks = [rank for rank, bits in self._bits.items() if bits >> i & 1]
            found[self._cached[i].name] = ranks
        return found

    def refuse_all(self, why: str, gone: Sequence[int]) -> list[bytes]:
        """Give up on everything that waits."""
        told: list[bytes] = []
        if self._joined:
            self._joined.clear()
            text = f"{why}, so that not all ranks can join"
            told.append(m.JOINED + dumps([self.number, -1, text, list(gone)]))
        for name, ranks in self.waiting().items():
            text = f"{why} while {name!r} was waiting on {named_ranks(ranks)}"
            told.append(m.REFUSED + dumps([self.number, [name], text, list(gone)]))
        for group in self._held.values():
            names = [asked[min(asked)].name for asked in group]
            text = f"{why} while {listed(names)} waited for the rest of their group"
            told.append(m.REFUSED + dumps([self.number, names, text, list(gone)]))
        self._named.clear()
        self._held.clear()
        self._contested = 0
        self._bits = dict.fromkeys(self.ranks, 0)
        return told

    # -- inside ---------------------------------------------------------------------------------

    def _by_name(self, name: str) -> Asked:
        """Return who asked for ``name``; those that asked by number are moved here."""
        asked = self._named.get(name)
        if asked is None:
            asked = self._named[name] = {}
            known = self._bits_of.get(name, 0)
            self._contested |= known
            for rank, bits in self._bits.items():
                for i in m.ids_of(bits & known):
                    asked[rank] = self._cached[i]
                self._bits[rank] &= ~known
        return asked

    def _run_named(self, names: Sequence[str]) -> list[bytes]:
        active = self.active
        told: list[bytes] = []
        ready: list[Asked] = []
        for name in dict.fromkeys(names):
            asked = self._named[name]
            if not all(rank in asked for rank in active):
                continue
            del self._named[name]
            self._contested &= ~self._bits_of.get(name, 0)
            text = disagreement(asked) or self._objection(asked)
            if text:
                told.append(m.REFUSED + dumps([self.number, [name], text, []]))
                told += self._refuse_group(asked, text)
            else:
                ready += self._complete(asked)
        return told + ([self._execute(ready)] if ready else [])

    def _objection(self, asked: Asked) -> str:
        """Return why what all active ranks ask for cannot be done now, or an empty string."""
        request = asked[min(asked)]
        if self._joined and request.kind not in ("allreduce", "barrier"):
            return (
                f"{request.kind} of tensor {request.name!r}: {named_ranks(sorted(self._joined))} "
                "joined, and until all ranks have joined only allreduce can run"
            )
        return ""

    def _complete(self, asked: Asked) -> list[Asked]:
        """Return what can be executed now that ``asked`` can: nothing, or its whole group."""
        request = asked[min(asked)]
        if not request.group:
            return [asked]
        held = self._held.setdefault(request.group, [])
        held.append(asked)
        return self._held.pop(request.group) if len(held) == request.group_size else []

    def _refuse_group(self, asked: Asked, text: str) -> list[bytes]:
        """Refuse the other members of a group, of which one was refused."""
        group = asked[min(asked)].group
        if not group:
            return []
        names = [a[min(a)].name for a in self._held.pop(group, [])]
        names += [n for n, a in self._named.items() if any(r.group == group for r in a.values())]
        for name in names:
            self._named.pop(name, None)
            self._contested &= ~self._bits_of.get(name, 0)
        why = f"another member of the group was refused: {text}"
        return [m.REFUSED + dumps([self.number, names, why, []])] if names else []

    def _execute(self, ready: Sequence[Asked]) -> bytes:
        items: list[list[Any]] = []
        for asked in ready:
            first = asked[min(asked)]
            everyone = [asked.get(rank) for rank in self.ranks]
            # Rows of an all-gather differ though rank 0's did not: known only if all ask alike.
            alike = all(request == first for request in everyone)
            sizes: list[Any] = []
            if first.kind == "allgather":
                sizes = [r.shape[0] if r and r.shape else 0 for r in everyone]
            elif first.kind == "alltoall":
                sizes = [r.splits if r else () for r in everyone]
            told = None if len(asked) == len(self.ranks) else first.to_list()
            items.append([first.name, self._number(first) if alike else -1, sizes, told])
        return m.EXECUTE + dumps([self.number, self._next_batch(), items])

    def _number(self, request: Request) -> int:
        """Return the request's cache id, giving it one while there is room; -1 otherwise."""
        known = self._ids.get(request)
        if known is not None:
            return known
        if len(self._cached) >= self._capacity or not _may_return(request):
            return -1
        number = self._ids[request] = len(self._cached)
        self._cached.append(request)
        self._bits_of[request.name] = self._bits_of.get(request.name, 0) | 1 << number
        if request.group:
            known_of_group = self._bits_of_group.get(request.group, 0)
            self._bits_of_group[request.group] = known_of_group | 1 << number
        return number

    def _run_cached(self) -> list[bytes]:
        ready = reduce(and_, (self._bits[rank] for rank in self.active))
        if not ready:
            return []
        told: list[bytes] = []
        if self._joined:
            for i in m.ids_of(ready):
                request = self._cached[i]
                text = self._objection({0: request})
                if text:
                    ready &= ~(1 << i)
                    self._clear(1 << i)
                    told.append(m.REFUSED + dumps([self.number, [request.name], text, []]))
        self._clear(ready)
        if ready:
            told.append(m.pack_execute_hits(self.number, self._next_batch(), ready))
        return told

    def _clear(self, done: int) -> None:
        for rank in self.ranks:
            self._bits[rank] &= ~done


def _may_return(request: Request) -> bool:
    """Whether a request is worth a number: not if its name came from a counter.

    Nor if it belongs to a group of which some members may get a number and others not.
    """
    uneven = request.group != "" and request.kind in ("allgather", "alltoall")
    return ".noname." not in request.name and not uneven
