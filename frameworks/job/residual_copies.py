"""Copies of what compression holds back on a rank, at another one: if the rank is lost, they live.

A copy is made at each commit, and travels beside the steps that follow, to a rank of another host
where there is one. After ranks were lost, or left, whoever has the newest copy of such a rank's
residuals adds them to its own. Members are processes, whose numbers are never used again; their
ranks change.
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from ringlet.fusion import Request
from ringlet.fusion.requests.handle import Handle
from ringlet.job import json_exchange
from ringlet.job.process_sets import InvalidArgument, ProcessSet, global_process_set
from ringlet.job.session import current
from ringlet.ring.collectives.checksum import checksum
from ringlet.ring.dtypes import Array
from ringlet.ring.errors import RingError
from ringlet.ring.rendezvous import epochs
from ringlet.ring.wire.keys import MEMBER

log = logging.getLogger("ringlet")

Held = Mapping[str, Mapping[str, Any]]  # arrays, by parameter, and by what it is called there
_WORD = 8  # bytes: of two before the head, its length and the checksum of all that follows
_HOLDERS = 64  # that may hold nothing back
_TOLD = frozenset({"member", "host", "copies", "taken"})


class Remembered(Protocol):
    """What compressors remember: ``ringlet.shared.memory.Memory``."""

    owes: bool

    def own(self) -> Held:
        """Return what this rank alone holds back, by parameter."""

    def take_over(self, given: Held, among: int) -> None:
        """Add what another rank held back, of so many."""


class Holder(Protocol):
    """What keeps the memory of compressors, such as the reducer of an optimizer."""

    @property
    def memory(self) -> Remembered:
        """What compressors remember."""

    @property
    def step(self) -> int:
        """How many steps there were."""

    @property
    def process_set(self) -> ProcessSet:
        """The ranks that reduce together."""


@dataclass(frozen=True)
class Copy:
    """What member ``member`` held back at ``step``, when it was ``rank`` of ``size`` in an epoch.

    ``held`` are float32 arrays, for each holder.
    """

    member: int
    epoch: int
    rank: int
    size: int
    step: int
    held: Sequence[Held]

    @property
    def norm(self) -> float:
        """Return the Euclidean norm of all that was held back."""
        arrays = [array for held in self.held for of in held.values() for array in of.values()]
        return math.sqrt(sum(float(np.vdot(a, a)) for a in arrays))


class Copies:
    """This rank's part in keeping copies for what ``holders`` hold back.

    ``send`` begins to renew them and ``settle``, collective too, takes over what ranks held back
    that are there no more. Everything between ranks is checked before it is used.
    """

    def __init__(self, holders: Callable[[], Sequence[Holder]]) -> None:
        self._find = holders
        self._member, self._host = int(os.environ[MEMBER]), os.environ["HOROVOD_HOSTNAME"]
        self._kept: dict[int, Copy] = {}  # by member
        self._taken: dict[int, tuple[int, float, int]] = {}  # by member: its rank, norm and step
        self._coming: Handle | None = None
        self._shift = 1  # how many ranks further a copy goes
        # New memory takes longer than copying: what is sent, the copy kept, the one that comes.
        self._sent = self._last = self._next = np.empty(0, np.uint8)

    @property
    def _holders(self) -> Sequence[Holder]:
        """What there is by now: optimizers may have been wrapped again."""
        found = refuse_sets(self._find())
        for holder in found:
            holder.memory.owes = True
        return found

    def renew(self) -> None:
        """Renew the copies of this epoch, and wait for it. Collective."""
        self.send()
        self.collect()

    def send(self) -> None:
        """Begin to renew the copies of this epoch. Collective; returns at once."""
        self.collect()
        runtime = current()
        if runtime.size == 1:
            self._kept.clear()
            return
        to = (runtime.rank + self._shift) % runtime.size
        holders = self._holders
        held, step = [holder.memory.own() for holder in holders], sum(each.step for each in holders)
        copy = Copy(self._member, _epoch(), runtime.rank, runtime.size, step, held)
        data = self._sent = packed(copy, self._sent)
        splits = tuple(data.size if rank == to else 0 for rank in range(runtime.size))
        request = Request("elastic.copies", "alltoall", "uint8", data.shape, splits=splits)
        self._coming = runtime.engine.submit(request, data, self._room)

    def collect(self) -> None:
        """Wait for the copy that is on its way; where it does not come the last one is kept."""
        handle, self._coming = self._coming, None
        if handle is None:
            return
        try:
            data = handle.wait()
        except RingError:
            return  # whoever was lost is found out elsewhere
        copy = unpacked(data)
        if copy is None or len(copy.held) != len(self._find()):
            log.warning("a copy of what compression holds back on another rank came damaged")
            return
        self._kept, self._last, self._next = {copy.member: copy}, self._next, self._last

    def settle(self) -> bool:
        """After ranks were numbered anew: take over what those held back that are gone. Collective.

        Returns whether this rank has taken something over, which the next commit is to hold.
        """
        runtime = current()
        copies = [[c.member, c.epoch, c.step] for c in self._kept.values()]
        taken = [[member, *what] for member, what in self._taken.items()]
        told = json_exchange.gather(
            {"member": self._member, "host": self._host, "copies": copies, "taken": taken},
            "elastic.copies.kept",
            global_process_set,
            "which copies a rank has",
            _is_told,
        )
        self._shift = shift([each["host"] for each in told])
        chosen = takers(told)
        mine = [member for member, rank in chosen.items() if rank == runtime.rank]
        for member in mine:
            if member in self._kept:  # or what was told is not what was meant
                self._take_over(self._kept[member])
        there = {each["member"] for each in told}
        self._kept = {member: c for member, c in self._kept.items() if member in there}
        return bool(mine)

    def report(self) -> None:
        """Let the launcher know what was taken over so far. Collective."""
        taken = [[member, *what] for member, what in self._taken.items()]
        told = json_exchange.gather(
            taken, "elastic.copies.taken", global_process_set, "what was taken over", _are_taken
        )
        if current().rank == 0:
            everything = [[*each, rank] for rank, of in enumerate(told) for each in of]
            epochs.tell_taken(_epoch(), everything)

    def _room(self, size: int) -> Array:
        """Make room for the copy that comes; the one that is kept stays until all of it is here."""
        if self._next.size != size:
            self._next = np.empty(size, np.uint8)
        return self._next

    def _take_over(self, copy: Copy) -> None:
        holders = self._holders
        now = sum(holder.step for holder in holders)
        for holder, held in zip(holders, copy.held, strict=False):
            holder.memory.take_over(held, copy.size)
        self._taken[copy.member] = copy.rank, copy.norm, now - copy.step


def refuse_sets(holders: Sequence[Holder]) -> Sequence[Holder]:
    """Return ``holders``; InvalidArgument for one that some of the job's ranks have no part in.

    Such a rank could keep a copy, and would never pay it.
    """
    for holder in holders:
        if holder.process_set.process_set_id != global_process_set.process_set_id:
            raise InvalidArgument(
                "redundancy=1 keeps a copy at any rank of the job, and an optimizer reduces over "
                f"{holder.process_set}: use elastic.run without redundancy=1, or reduce over all "
                "ranks"
            )
    return holders


def shift(hosts: Sequence[str]) -> int:
    """Return how many ranks further a rank's copy goes: to another host, where that is possible.

    Every rank gets one copy. ``hosts`` are those of the ranks, which are next to each other there.
    """
    most = max(hosts.count(host) for host in set(hosts))
    return most if most < len(hosts) else 1


def takers(told: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Return by member who is gone the rank that takes over what it held back: the newest copy's.

    ``told`` is what each rank has told, by rank. What was taken over once stays so.
    """
    done = {each["member"] for each in told}
    done |= {taken[0] for each in told for taken in each["taken"]}
    best: dict[int, tuple[int, int, int]] = {}
    for rank, each in enumerate(told):
        for member, epoch, step in each["copies"]:
            found = (epoch, step, -rank)
            if member not in done and found > best.get(member, (-1, -1, 0)):
                best[member] = found
    return {member: -found[2] for member, found in best.items()}


def packed(copy: Copy, room: Array | None = None) -> Array:
    """Return ``copy`` as bytes, in ``room`` if it fits: a head in JSON, and arrays as float32."""
    arrays = [
        (i, name, key, np.asarray(array))
        for i, held in enumerate(copy.held)
        for name, of in held.items()
        for key, array in of.items()
    ]
    size = sum(array.size for *_, array in arrays)
    numbers = [copy.member, copy.epoch, copy.rank, copy.size, copy.step, len(copy.held)]
    shapes = [[i, name, key, list(array.shape)] for i, name, key, array in arrays]
    text = json.dumps({"copy": numbers, "arrays": shapes}).encode()
    text += b" " * (-len(text) % 8)
    total = 2 * _WORD + len(text) + 4 * size
    made = room if room is not None and room.size == total else np.empty(total, np.uint8)
    body, start = made[2 * _WORD + len(text) :], 0
    values = body.view(np.float32)
    for *_, array in arrays:
        values[start : start + array.size] = array.reshape(-1)
        start += array.size
    made[2 * _WORD : total - 4 * size] = np.frombuffer(text, np.uint8)
    for place, number in enumerate((len(text), checksum(made[2 * _WORD :]))):
        word = number.to_bytes(_WORD, "little")
        made[place * _WORD : (place + 1) * _WORD] = np.frombuffer(word, np.uint8)
    return made


def unpacked(data: Array) -> Copy | None:
    """Return what ``packed`` made of a copy, whose arrays share ``data``; None where it is not."""
    try:
        length, total = data[: 2 * _WORD].view(np.uint64).tolist()
        stop = 2 * _WORD + length
        if checksum(data[2 * _WORD :]) != total:
            return None
        head, body = json.loads(data[2 * _WORD : stop].tobytes()), data[stop:]
        member, epoch, rank, size, step, holders = map(int, head["copy"])
        arrays, values, start = head["arrays"], body.view(np.float32), 0
        if not 0 <= rank < size or not 0 <= holders <= len(arrays) + _HOLDERS:
            return None
        held: list[dict[str, dict[str, Any]]] = [{} for _ in range(holders)]
        for i, name, key, shape in arrays:
            if any(type(n) is not int or n < 0 for n in (i, *shape)):
                return None
            end = start + math.prod(shape)
            held[i].setdefault(name, {})[key] = values[start:end].reshape(shape)
            start = end
        if start != values.size:
            return None
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return None
    return Copy(member, epoch, rank, size, step, held)


def _epoch() -> int:
    return int(os.environ[epochs.EPOCH])


def _is_told(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() == _TOLD
        and type(value["member"]) is int
        and isinstance(value["host"], str)
        and isinstance(value["copies"], list)
        and all(_numbers(each, 3) for each in value["copies"])
        and _are_taken(value["taken"])
    )


def _are_taken(value: Any) -> bool:
    return isinstance(value, list) and all(_numbers(each, 4) for each in value)


def _numbers(value: Any, count: int) -> bool:
    return (
        isinstance(value, list)
        and len(value) == count
        and all(type(number) in (int, float) for number in value)
    )
