"""Which requests the ranks of one process set have made: part of the coordinator, on rank 0.

Requests arrive in any order on any rank, by name or by number (``response_cache``). What belongs
together is one *unit*: a single name, or all names that some rank's groups connect. The states of a
unit, and what an event does to it:

    event \\ state             waiting                         judged
    ------------------------  ------------------------------  --------------------------------------
    rank r asks for a name    noted; twice is an error of r   a unit anew, which waits
    rank r asks by number     the same, if the unit goes by   a bit is set; an AND over all ranks'
                              name; else a bit is set         bits executes what all have
    r asks by name, others    their bits become names         -
      by number
    every rank has asked for  judged: executed if all ask     -
      all of its groups       alike, else refused, as a
                              whole and on every rank
    rank r joins              r need not ask any more: zeros  bits become names: zeros are added
                              stand for it in allreduces      only by name
    all ranks joined          judged, with zeros for all who  the next join begins anew
                              have not asked
    rank r leaves             refused                         refused as soon as it is asked for
    the set is removed        refused                         refused as soon as it is asked for

Calls without names are counted (``series_runs``), and travel as runs of alike ones:

    event \\ state             no rank has joined              some rank has joined
    ------------------------  ------------------------------  --------------------------------------
    rank r makes calls        noted, by name or as a run;     each goes by name, as above
                              what all ranks have made alike
                              is executed, the rest refused
    rank r joins              what waits goes by name         -
    rank r leaves, or the     refused                         refused
      set is removed

A unit is judged once, when no rank can have more of it on the way: so nothing of it, no bit either,
outlives the judgement, and no rank is given zeros for data that it still has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import reduce
from operator import and_, or_
from typing import Any, NamedTuple

from ringlet.fusion.negotiation import messages as m
from ringlet.fusion.negotiation.response_cache import ResponseCache
from ringlet.fusion.negotiation.series_runs import SeriesRuns
from ringlet.fusion.negotiation.validation import (
    disagreement,
    named_ranks,
    not_everywhere,
    other_counts,
)
from ringlet.fusion.requests.identity_values import COMPARING
from ringlet.fusion.requests.request import Request, dumps
from ringlet.fusion.requests.series import MARK, place_of, prototype_of

_ALIKE = ("allreduce", "broadcast", "barrier", "reducescatter")  # ranks ask for the very same

Asked = dict[int, Request]


class Wait(NamedTuple):
    """Which ``ranks`` have asked for something; ``turn`` tells one time from the next."""

    ranks: list[int]
    turn: int


class _Unit:
    """Names that are executed together or not at all, and who has asked for them."""

    __slots__ = ("asked", "bits", "groups", "left", "ranks", "turn")

    def __init__(self, turn: int) -> None:
        self.turn = turn
        self.asked: dict[str, Asked] = {}
        self.groups: set[str] = set()
        self.left: dict[tuple[int, str], int] = {}  # what a rank has yet to ask for of its group
        self.ranks: set[int] = set()  # that have asked for something
        self.bits = 0  # numbers that go by name for as long as it waits

    def take(self, rank: int, request: Request) -> None:
        """Note a request."""
        asked = self.asked.setdefault(request.name, {})
        if rank in asked:
            raise ValueError(f"asked for {request.name!r} twice")
        asked[rank] = request
        self.ranks.add(rank)
        if request.group:
            key = rank, request.group
            left = self.left.get(key, request.group_size) - 1
            if left:
                self.left[key] = left
            else:
                self.left.pop(key, None)

    def absorb(self, other: _Unit) -> None:
        """Take over what belongs to the same unit."""
        for name, asked in other.asked.items():
            self.asked.setdefault(name, {}).update(asked)
        self.groups |= other.groups
        self.left |= other.left
        self.ranks |= other.ranks
        self.bits |= other.bits

    def excuse(self, rank: int) -> None:
        """Expect nothing more of a rank that joined."""
        self.left = {key: left for key, left in self.left.items() if key[0] != rank}

    def is_complete(self, active: Iterable[int]) -> bool:
        """Whether no rank can have more of it on the way."""
        return not self.left and self.ranks.issuperset(active)


class RequestTable:
    """The requests of process set ``number``, which consists of ``ranks``, ascending.

    ``next_batch`` and ``next_version`` number batches, and EXECUTE messages, of all process sets.
    """

    def __init__(
        self,
        number: int,
        ranks: Sequence[int],
        capacity: int,
        next_batch: Callable[[], int],
        next_version: Callable[[], int],
    ) -> None:
        self.number, self.ranks = number, tuple(ranks)
        self._next_batch, self._next_version = next_batch, next_version
        self._cache = ResponseCache(ranks, capacity)
        self._bits = dict.fromkeys(self.ranks, 0)  # numbers that were asked for
        self._by_name = 0  # numbers that go by name: some rank asked for their unit so
        self._units: dict[str, _Unit] = {}  # by name
        self._of_group: dict[str, _Unit] = {}
        self._with_bits: set[_Unit] = set()
        self._series: dict[str, SeriesRuns] = {}  # by prefix
        self._joined: list[int] = []
        self._units_so_far = 0
        self._ran = 0  # numbers that were executed since somebody asked what waits
        self._turns: dict[int, int] = {}  # how often that was the case

    @property
    def joined(self) -> bool:
        """Whether some rank has run out of data."""
        return bool(self._joined)

    @property
    def active(self) -> list[int]:
        """Return the ranks that have not joined."""
        return [rank for rank in self.ranks if rank not in self._joined]

    def ask(self, rank: int, requests: Sequence[Request], version: int = 0) -> list[bytes]:
        """Take requests in full. Raises ValueError for one that ``rank`` has made already."""
        self._check(rank)
        self._cache.hear(rank, version)
        units: list[_Unit] = []
        touched: dict[str, SeriesRuns] = {}
        for request in requests:
            place = None if request.group or self._joined else place_of(request.name)
            if place is None:
                units.append(self._take(rank, request))
            else:
                prefix, number = place
                series = touched[prefix] = self._series_of(prefix)
                series.add(rank, m.Run(number, number + 1, prototype_of(request)))
        return self._judge(units) + self._run_series(touched)

    def count(self, rank: int, runs: Sequence[m.Run], version: int) -> list[bytes]:
        """Take calls without names. Raises ValueError for one that ``rank`` has made already."""
        self._check(rank)
        self._cache.hear(rank, version)
        if self._joined:
            return self._judge([self._take(rank, r) for run in runs for r in _one_by_one(run)])
        touched: dict[str, SeriesRuns] = {}
        for run in runs:
            prefix = run.request.name
            series = touched[prefix] = self._series_of(prefix)
            series.add(rank, run)
        return self._run_series(touched)

    def hit(self, rank: int, bits: int, version: int) -> list[bytes]:
        """Take cached requests; ValueError for one that ``rank`` was never told, or asks twice."""
        self._check(rank)
        cache = self._cache
        cache.hear(rank, version)
        bits, others = cache.meant(rank, bits, version)
        if bits & self._bits[rank]:
            raise ValueError("it asked for a cached request twice")
        named = bits if self._joined else bits & (self._by_name | cache.partial)
        self._bits[rank] |= bits & ~named
        told: list[bytes] = []
        if named or others:
            others += [cache[i].of(rank) for i in m.ids_of(named)]
            told = self._judge([self._take(rank, request) for request in others])
        return told + self._run_cached()

    def join(self, rank: int) -> list[bytes]:
        """Go on without ``rank`` until all have joined."""
        self._check(rank)
        if rank in self._joined:
            raise ValueError("it joined twice")
        units: list[_Unit] = []
        for other in self.ranks:  # zeros are added by name only
            bits, self._bits[other] = self._bits[other], 0
            units += [self._take(other, self._cache[i].of(other)) for i in m.ids_of(bits)]
        for series in self._series.values():
            for other, run in series.each():
                units += [self._take(other, request) for request in _one_by_one(run)]
        self._series.clear()
        self._joined.append(rank)
        for unit in set(self._units.values()):
            unit.excuse(rank)
            units.append(unit)
        return self._judge(units)

    def all_joined(self) -> list[bytes]:
        """Begin anew if all ranks have joined."""
        if len(self._joined) < len(self.ranks):
            return []
        last = self._joined[-1]
        self._joined.clear()
        return [m.JOINED + dumps([self.number, last, "", []])]

    def waiting(self) -> dict[str, Wait]:
        """Return what some ranks have asked for and others have not, by name."""
        for i in m.ids_of(self._ran):
            self._turns[i] = self._turns.get(i, 0) + 1
        self._ran = 0
        found = {name: Wait(sorted(u.asked[name]), u.turn) for name, u in self._units.items()}
        for i in m.ids_of(reduce(or_, self._bits.values())):
            ranks = [rank for rank, bits in self._bits.items() if bits >> i & 1]
            found[self._cache[i].name] = Wait(ranks, -self._turns.get(i, 0))
        calls: dict[str, list[int]] = {}
        for series in self._series.values():
            for rank, run in series.each():
                for n in range(run.first, run.stop):
                    calls.setdefault(f"{run.request.name}{n}", []).append(rank)
        return found | {name: Wait(ranks, 0) for name, ranks in calls.items()}

    def unfinished(self) -> dict[str, Wait]:
        """Return which ranks have asked for a group as a whole, where others have only begun."""
        found: dict[str, Wait] = {}
        for unit in set(self._units.values()):
            for group in {group for _, group in unit.left}:
                whole = [rank for rank in self.ranks if (rank, group) not in unit.left]
                found[group] = Wait(whole, unit.turn)
        return found

    def refuse_all(self, why: str, gone: Sequence[int] = ()) -> list[bytes]:
        """Give up on everything that waits."""
        told: list[bytes] = []
        if self._joined:
            self._joined.clear()
            text = f"{why}, so that not all ranks can join"
            told.append(m.JOINED + dumps([self.number, -1, text, list(gone)]))
        for name, (ranks, _) in self.waiting().items():
            text = f"{why} while {name!r} was waiting on {named_ranks(ranks)}"
            told.append(self._refusal([name], ranks, text, gone))
        self._units.clear()
        self._of_group.clear()
        self._with_bits.clear()
        self._series.clear()
        self._by_name = 0
        self._bits = dict.fromkeys(self.ranks, 0)
        return told

    # -- inside ---------------------------------------------------------------------------------

    def _check(self, rank: int) -> None:
        if rank not in self._bits:
            raise ValueError(f"rank {rank} is not in process set {self.number}")

    def _take(self, rank: int, request: Request) -> _Unit:
        """Note a request in its unit; what ranks have asked for by number comes along.

        A number that goes by name may be in a group, whose other numbers then go by name too.
        """
        untaken = [(rank, request)]
        while untaken:
            asking, wanted = untaken.pop()
            unit = self._unit_of(wanted)
            unit.take(asking, wanted)
            untaken += reversed(self._no_more_by_number(unit, self._cache.bits_beside(wanted)))
        return self._units[request.name]

    def _unit_of(self, request: Request) -> _Unit:
        """Return the unit of a request's name, which is that of its group: new, or two made one."""
        name, group = request.name, request.group
        beside = self._of_group.get(group) if group else None
        unit = self._units.get(name, beside)
        if unit is None:
            self._units_so_far += 1
            unit = _Unit(self._units_so_far)
        elif beside is not None and beside is not unit:
            unit = self._merge(unit, beside)
        self._units[name] = unit
        if group and beside is None:
            self._of_group[group] = unit
            unit.groups.add(group)
        return unit

    def _no_more_by_number(self, unit: _Unit, numbers: int) -> list[tuple[int, Request]]:
        """Let ``numbers`` go by name while ``unit`` waits; return what was asked for by them."""
        if not numbers:
            return []
        unit.bits |= numbers
        self._with_bits.add(unit)
        fresh, self._by_name = numbers & ~self._by_name, self._by_name | numbers
        asked: list[tuple[int, Request]] = []
        for rank, bits in self._bits.items() if fresh else ():
            asked += [(rank, self._cache[i].of(rank)) for i in m.ids_of(bits & fresh)]
            self._bits[rank] = bits & ~fresh
        return asked

    def _merge(self, one: _Unit, other: _Unit) -> _Unit:
        if len(one.asked) < len(other.asked):
            one, other = other, one
        one.absorb(other)
        self._with_bits.discard(other)
        if one.bits:
            self._with_bits.add(one)
        self._units |= dict.fromkeys(other.asked, one)
        self._of_group |= dict.fromkeys(other.groups, one)
        return one

    def _judge(self, units: Iterable[_Unit]) -> list[bytes]:
        """Execute, or refuse, those of ``units`` that no rank can have more of."""
        active = self.active
        judged: list[_Unit] = []
        for unit in dict.fromkeys(units):
            absorbed = self._units.get(next(iter(unit.asked))) is not unit
            if absorbed or not unit.is_complete(active):
                continue
            judged.append(unit)
            for name in unit.asked:
                del self._units[name]
            for group in unit.groups:
                del self._of_group[group]
            self._with_bits.discard(unit)
        if not judged:
            return []
        self._by_name = reduce(or_, (unit.bits for unit in self._with_bits), 0)
        told: list[bytes] = []
        ready: list[Asked] = []
        for unit in judged:
            refusals = self._refuse(unit)
            told += refusals
            if not refusals:
                ready += unit.asked.values()
        return told + ([self._execute(ready)] if ready else [])

    def _refuse(self, unit: _Unit) -> list[bytes]:
        """Return the refusals of a unit's members, or nothing where it can be executed."""
        objections: dict[str, str] = {}
        uneven = self._uneven(unit)
        for name, asked in unit.asked.items():
            text = uneven or disagreement(asked) or self._objection(asked)
            if text:
                objections[name] = text
        if not objections:
            return []
        first = next(iter(objections.values()))
        beside = f"another member of the group was refused: {first}"
        alike: dict[tuple[str, tuple[int, ...]], list[str]] = {}
        for name, asked in unit.asked.items():
            text = objections.get(name, beside)
            alike.setdefault((text, tuple(sorted(asked))), []).append(name)
        return [self._refusal(names, ranks, text) for (text, ranks), names in alike.items()]

    def _refusal(
        self, names: Sequence[str], ranks: Sequence[int], text: str, gone: Sequence[int] = ()
    ) -> bytes:
        return m.REFUSED + dumps(m.Refusal(self.number, list(names), list(ranks), text, gone))

    def _uneven(self, unit: _Unit) -> str:
        """Return how active ranks hold other members, or an empty string.

        It is told for all names alike, as no name may be asked for by every rank.
        """
        active = self.active
        for name, asked in unit.asked.items():
            lacking = [rank for rank in active if rank not in asked]
            if lacking:
                return other_counts(unit.asked.values()) or not_everywhere(name, asked, lacking)
        return ""

    def _objection(self, asked: Asked) -> str:
        """Return why what all active ranks ask for cannot be done now, or an empty string."""
        request = asked[min(asked)]
        absent = [rank for rank in sorted(self._joined) if rank not in asked]
        if absent and request.kind not in ("allreduce", "barrier"):
            return (
                f"{request.kind} of tensor {request.name!r}: {named_ranks(absent)} "
                "joined, and until all ranks have joined only allreduce can run"
            )
        if absent and request.prescale != 1.0 and request.op in COMPARING:
            return (
                f"{request.op.name.title()} of tensor {request.name!r}: {named_ranks(absent)} "
                "joined, and stands in by a value that may not be scaled: use postscale_factor, or "
                "scale the tensor before the call"
            )
        return ""

    def _series_of(self, prefix: str) -> SeriesRuns:
        found = self._series.get(prefix)
        if found is None:
            found = self._series[prefix] = SeriesRuns(self.ranks)
        return found

    def _run_series(self, touched: Mapping[str, SeriesRuns]) -> list[bytes]:
        """Execute what all ranks have called alike in some series, and refuse what they have not.

        Nobody has joined.
        """
        told: list[bytes] = []
        ready: list[Asked] = []
        alike: list[tuple[str, int, int]] = []
        for prefix, series in touched.items():
            for first, stop, asked in series.take():
                request = asked[self.ranks[0]]
                same = all(each is request or each == request for each in asked.values())
                if same and request.kind in _ALIKE:
                    if alike and alike[-1][0] == prefix and alike[-1][2] == first:
                        first = alike.pop()[1]
                    alike.append((prefix, first, stop))
                    continue
                for n in range(first, stop):
                    named = {rank: each.numbered(n) for rank, each in asked.items()}
                    text = disagreement(named)
                    if text:
                        told.append(self._refusal([f"{prefix}{n}"], self.ranks, text))
                    else:
                        ready.append(named)
        if ready:
            told.append(self._execute(ready))
        if alike:
            told.append(m.EXECUTE_SERIES + dumps([self.number, self._next_batch(), alike]))
        return told

    def _execute(self, ready: Sequence[Asked]) -> bytes:
        version = self._next_version()
        pending = reduce(or_, self._bits.values()) | self._by_name
        items: list[m.Item] = []
        for asked in ready:
            first = asked[min(asked)]
            everyone = [asked.get(rank) for rank in self.ranks]
            sizes: list[Any] = []
            if first.kind == "allgather":
                sizes = [r.shape[0] if r and r.shape else 0 for r in everyone]
            elif first.kind == "alltoall":
                sizes = [r.splits if r else () for r in everyone]
            whole = len(asked) == len(self.ranks)
            i = -1
            if MARK not in first.name:  # a name from a counter does not return
                i = self._cache.put(first.name, asked, pending, version)
                pending |= 1 << i if i >= 0 else 0
            told = None if whole else first.to_list()
            items.append(m.Item(first.name, i, sizes, told, len(asked)))
        return m.EXECUTE + dumps([self.number, self._next_batch(), items])

    def _run_cached(self) -> list[bytes]:
        if self._joined:
            return []  # all went by name
        ready = reduce(and_, self._bits.values())
        if ready:
            for group in self._cache.groups_in(ready):
                if group & ready != group:
                    ready &= ~group
        if not ready:
            return []
        for rank, bits in self._bits.items():
            self._bits[rank] = bits & ~ready
        self._cache.use(ready)
        self._ran |= ready
        return [m.pack_execute_hits(self.number, self._next_batch(), ready)]


def _one_by_one(run: m.Run) -> Iterator[Request]:
    return map(run.request.numbered, range(run.first, run.stop))
