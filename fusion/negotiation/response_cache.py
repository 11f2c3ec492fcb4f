"""The response cache: numbers for requests, so that asking again takes one bit.

A name has one number at most, and a number stands for what each rank asked for under its name the
last time that this was executed by name. A rank asks by number only while it wants just that. So
ranks whose requests changed and ranks whose requests did not always meet under the name.

When the cache is full, a number that was not used lately goes to another name. A rank may ask by a
number before it has heard of that: it says how many EXECUTE messages it had heard, its *version*,
and its bits mean what they meant then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ringlet.fusion.requests.request import Request

_NEVER = "it asked for cached requests that it was never told of"


class Entry(NamedTuple):
    """What a number stands for. ``requests`` are by rank; the first is that of those not in it."""

    name: str
    requests: Mapping[int, Request]

    def of(self, rank: int) -> Request:
        """Return what ``rank`` asks for by the number."""
        found = self.requests.get(rank)
        return self.first if found is None else found

    @property
    def first(self) -> Request:
        """The lowest rank's request."""
        return self.requests[min(self.requests)]


class _Change(NamedTuple):
    """Ranks of a lower version than ``version`` mean ``before`` by number ``i``."""

    version: int
    i: int
    before: Entry | None


class ResponseCache:
    """The coordinator's cache for the ``ranks`` of one process set, with ``capacity`` numbers."""

    def __init__(self, ranks: Sequence[int], capacity: int) -> None:
        self._capacity = capacity
        self._entries: list[Entry] = []
        self._ids: dict[str, int] = {}
        self._groups: dict[str, int] = {}  # the numbers of a group's members, as bits
        self.partial = 0  # numbers of groups of which not all members have one
        self._used = 0  # since a number was last looked for
        self._hand = 0  # where to look next
        self._changes: deque[_Change] = deque()  # that some rank may not have heard of
        self._heard = dict.fromkeys(ranks, 0)

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, i: int) -> Entry:
        return self._entries[i]

    def use(self, bits: int) -> None:
        """Note that numbers are in use."""
        self._used |= bits

    def bits_beside(self, request: Request) -> int:
        """Return the numbers that must go by name when ``request`` does: its group's too."""
        i = self._ids.get(request.name)
        bits = self._groups.get(request.group, 0) if request.group else 0
        if i is not None:
            first = self._entries[i].first
            bits |= 1 << i | (self._groups.get(first.group, 0) if first.group else 0)
        return bits

    def hear(self, rank: int, version: int) -> None:
        """Note what ``rank`` has heard; forget changes that all ranks have heard of."""
        self._heard[rank] = version
        if self._changes:
            all_heard = min(self._heard.values())
            while self._changes and self._changes[0].version <= all_heard:
                self._changes.popleft()

    def meant(self, rank: int, bits: int, version: int) -> tuple[int, list[Request]]:
        """Return which of ``bits`` mean what they mean now, and what the others meant.

        Raises ValueError for a number that ``rank`` was never told.
        """
        if self._changes and self._changes[-1].version > version:
            return self._meant_before(rank, bits, version)
        if bits >> len(self._entries):
            raise ValueError(_NEVER)
        return bits, []

    def _meant_before(self, rank: int, bits: int, version: int) -> tuple[int, list[Request]]:
        before: dict[int, Entry | None] = {}
        for change in reversed(self._changes):
            if change.version <= version:
                break
            if bits >> change.i & 1:
                before[change.i] = change.before  # the earliest one counts
        for i in before:
            bits &= ~(1 << i)
        if bits >> len(self._entries) or None in before.values():
            raise ValueError(_NEVER)
        return bits, [entry.of(rank) for entry in before.values() if entry is not None]

    def put(self, name: str, asked: Mapping[int, Request], pending: int, version: int) -> int:
        """Give ``name`` a number from ``version`` on, for what ranks ``asked``; -1 for none.

        ``pending`` numbers are asked for and keep their meaning.
        """
        requests = asked if len(set(asked.values())) > 1 else {min(asked): asked[min(asked)]}
        entry = Entry(name, requests)
        i = self._ids.get(name)
        if i is None:
            i = self._free(pending)
            if i < 0:
                return -1
        elif self._entries[i] == entry:
            self._used |= 1 << i
            return i
        before = self._entries[i] if i < len(self._entries) else None
        if before is not None:
            self._regroup(before.first, 1 << i, add=False)
            self._ids.pop(before.name, None)
            self._entries[i] = entry
        else:
            self._entries.append(entry)
        self._changes.append(_Change(version, i, before))
        self._ids[name] = i
        self._regroup(entry.first, 1 << i, add=True)
        return i

    def _free(self, pending: int) -> int:
        """Return a number for a new name: one that nobody asks for, and that was not used lately.

        The clock algorithm: whoever was used since the last time round gets another one.
        """
        if len(self._entries) < self._capacity:
            return len(self._entries)
        if len(self._changes) >= self._capacity or not self._capacity:
            return -1  # some rank has been silent for long, and would not understand
        every = (1 << len(self._entries)) - 1 & ~pending
        for _ in range(2):
            free = every & ~self._used
            ahead = free >> self._hand << self._hand
            chosen = (ahead or free) & -(ahead or free)
            if chosen:
                i = chosen.bit_length() - 1
                self._hand = i + 1
                return i
            self._used = 0
        return -1

    def _regroup(self, request: Request, bit: int, add: bool) -> None:
        """Count a number in or out of its group."""
        if not request.group:
            return
        bits = self._groups.get(request.group, 0)
        now = bits | bit if add else bits & ~bit
        if now:
            self._groups[request.group] = now
        else:
            self._groups.pop(request.group, None)
        self.partial &= ~(bits | bit)
        if now.bit_count() != request.group_size:
            self.partial |= now

    def groups_in(self, bits: int) -> list[int]:
        """Return the groups that have some of ``bits``, each as the bits of its members."""
        return [group for group in self._groups.values() if group & bits]
