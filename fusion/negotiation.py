"""Negotiation: what every rank is ready for, and what to say when ranks disagree.

The coordinator runs on rank 0 and is a plain state machine: messages in, broadcasts out. What it
broadcasts reaches every rank in one order, and so do collectives of different process sets run in
one order wherever a rank belongs to both.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable

from ringlet.fusion import messages as m
from ringlet.fusion.ballots import Ballots
from ringlet.fusion.readiness import Readiness
from ringlet.fusion.request import Request, dumps, loads
from ringlet.fusion.stall import StallInspector
from ringlet.fusion.stragglers import Stragglers
from ringlet.fusion.validation import listed

CACHE_CAPACITY = 4096


class Coordinator:
    """Implements ``ringlet.ring.control.Handler`` for ``size`` ranks.

    Process set 0 is all of them; others come and go when all ranks call for it.
    """

    def __init__(
        self,
        size: int,
        cache_capacity: int = CACHE_CAPACITY,
        stalls: StallInspector | None = None,
    ) -> None:
        self._capacity = cache_capacity
        self._stalls = stalls or StallInspector()
        self._group_names: dict[int, str] = {}
        self._numbers = itertools.count(1)  # of groups and batches
        self._set_numbers = itertools.count(1)
        self._stragglers = Stragglers(self._stalls.warn_after, self._stalls.clock)
        self._ballots = Ballots(self._stragglers)
        self._sets = {0: self._peers(0, tuple(range(size)))}
        self._set_calls: dict[int, deque[bytes]] = {rank: deque() for rank in range(size)}
        self._gone: dict[int, str] = {}
        self._body: dict[bytes, Callable[[int, bytes], list[bytes]]] = {
            m.VOTE: self._vote,
            m.HITS: self._hits,
            m.REQUEST: self._request,
            m.DECLARE: self._declare,
            m.FAILED: self._failed,
            m.JOIN: self._join,
            m.ADD_SET: self._change_sets,
            m.REMOVE_SET: self._change_sets,
            m.ANNOUNCE: lambda _, message: self._announce(message),
            m.CHECK: lambda rank, message: self._check(),
            m.GOODBYE: lambda rank, _: self._leave(rank),
        }

    # -- ringlet.ring.control.Handler -----------------------------------------------------------

    def on_message(self, rank: int, message: bytes) -> list[bytes]:
        """Take a message of ``rank``; return what every rank is to hear."""
        kind = message[:1]
        if kind == m.BROKEN:
            return [m.BROKEN + dumps(f"rank {rank}: {loads(message[1:])}")]
        try:
            take = self._body[kind]
        except KeyError:
            return [m.BROKEN + dumps(f"rank {rank} sent a message of unknown kind {kind!r}")]
        try:
            return take(rank, message)
        except (LookupError, ValueError, TypeError) as error:
            return [m.BROKEN + dumps(f"rank {rank} sent a message that makes no sense: {error!r}")]

    def on_lost(
        self, rank: int, why: str = "its connection closed without a goodbye"
    ) -> list[bytes]:
        """Tell everybody that ``rank`` went away without a goodbye."""
        waiting = [name for peers in self._sets.values() for name in peers.waiting()]
        text = f"rank {rank} is gone: {why or 'its connection closed without a goodbye'}"
        return [m.LOST + dumps([rank, text + (f" (waiting: {listed(waiting)})" * bool(waiting))])]

    # -- one kind of message each ---------------------------------------------------------------

    def _hits(self, rank: int, message: bytes) -> list[bytes]:
        number, bits = m.unpack_hits(message)
        peers = self._sets[number]
        told = peers.hit(rank, bits)
        return told + self._refused_for_gone(peers)

    def _request(self, rank: int, message: bytes) -> list[bytes]:
        told: list[bytes] = []
        by_set: dict[int, list[Request]] = {}
        for request in map(Request.from_list, loads(message[1:])):
            by_set.setdefault(request.process_set, []).append(request)
        for number, requests in by_set.items():
            told += self._sets[number].ask(rank, requests)
            told += self._refused_for_gone(self._sets[number])
        return told

    def _declare(self, rank: int, message: bytes) -> list[bytes]:
        number, name, fields = loads(message[1:])
        peers, requests = self._sets[number], [Request.from_list(f) for f in fields]
        group = next(self._numbers)
        told = self._ballots.declare(peers, rank, name, requests, group)
        if told:
            self._group_names[group] = name
        return told + self._refused_for_gone(peers)

    def _vote(self, rank: int, message: bytes) -> list[bytes]:
        vote = m.unpack_vote(message)
        peers = self._sets[vote.process_set]
        return self._ballots.vote(peers, rank, vote) + self._refused_for_gone(peers)

    def _failed(self, rank: int, message: bytes) -> list[bytes]:
        number, group, epoch, text = loads(message[1:])
        return self._ballots.fail(self._sets[number], group, epoch, f"rank {rank}: {text}")

    def _join(self, rank: int, message: bytes) -> list[bytes]:
        peers = self._sets[loads(message[1:])]
        told = peers.join(rank)
        told += self._ballots.joined(peers) if peers.joined else []
        return told + self._refused_for_gone(peers)

    def _announce(self, message: bytes) -> list[bytes]:
        action, argument = loads(message[1:])
        return [m.ANNOUNCED + dumps([action, argument, not self._gone])]

    # -- stalls ---------------------------------------------------------------------------------

    def _check(self) -> list[bytes]:
        text, over = self._stalls.inspect(self._waiting())
        texts = [text, self._stragglers.report()]
        told = [m.STALLED + dumps(text) for text in texts if text]
        if over:
            after = self._stalls.give_up_after
            told.append(
                m.BROKEN + dumps(f"a stall of more than {after:.0f} s; rank 0's log says which")
            )
        return told

    def _waiting(self) -> dict[str, tuple[list[int], list[int]]]:
        """Return what some ranks wait for, with those and the others, in words."""
        found: dict[str, tuple[list[int], list[int]]] = {}
        for peers in self._sets.values():
            within = f" of process set {peers.number}" if peers.number else ""
            for name, ready in peers.waiting().items():
                found[f"{name!r}{within}"] = ready, [r for r in peers.active if r not in ready]
        for number, (peers, ready) in self._ballots.waiting().items():
            name = self._group_names.get(number, "a batch")
            missing = [r for r in peers.ranks if r not in ready]
            found[f"a step of {name!r} ({number})"] = ready, missing
        return {what: both for what, both in found.items() if both[1]}

    # -- process sets ---------------------------------------------------------------------------

    def _peers(self, number: int, ranks: tuple[int, ...]) -> Readiness:
        return Readiness(number, ranks, self._capacity, lambda: next(self._numbers))

    def _change_sets(self, rank: int, message: bytes) -> list[bytes]:
        """Make or remove a process set once all ranks have called for the same."""
        self._set_calls[rank].append(message)
        if self._gone:
            return self._refuse_sets("; ".join(self._gone.values()))
        if not all(self._set_calls.values()):
            return []
        calls = [queue.popleft() for queue in self._set_calls.values()]
        if len(set(calls)) > 1:
            told = "; ".join(f"rank {r}: {_in_words(call)}" for r, call in enumerate(calls))
            return [m.SET + dumps([0, [], f"process sets differ between ranks ({told})"])]
        value = loads(message[1:])
        if message[:1] == m.REMOVE_SET:
            if self._sets.pop(value, None) is None:
                return [m.SET + dumps([0, [], f"there is no process set {value}"])]
            return [m.SET + dumps([value, [], ""])]
        number = next(self._set_numbers)
        self._sets[number] = self._peers(number, tuple(value))
        return [m.SET + dumps([number, value, ""])]

    def _refuse_sets(self, why: str) -> list[bytes]:
        waiting = any(self._set_calls.values())
        for queue in self._set_calls.values():
            queue.clear()
        return [m.SET + dumps([0, [], why])] if waiting else []

    # -- ranks that leave -----------------------------------------------------------------------

    def _leave(self, rank: int) -> list[bytes]:
        self._gone[rank] = f"rank {rank} has shut down"
        told = self._refuse_sets(self._gone[rank])
        for peers in self._sets.values():
            told += self._refused_for_gone(peers)
        return [*told, m.GONE + dumps(rank)]

    def _refused_for_gone(self, peers: Readiness) -> list[bytes]:
        """Give up on what waits for ranks that have left, if any of ``peers`` did."""
        gone = sorted(rank for rank in self._gone if rank in peers.ranks)
        if not gone:
            return []
        why = "; ".join(self._gone[rank] for rank in gone)
        told = peers.refuse_all(why, gone)
        return told + self._ballots.refuse_all(peers.number, why, gone)


def _in_words(call: bytes) -> str:
    value = loads(call[1:])
    return f"remove {value}" if call[:1] == m.REMOVE_SET else f"add {value}"
