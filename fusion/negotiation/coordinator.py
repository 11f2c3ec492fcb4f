"""Negotiation: what every rank is ready for, and what to say when ranks disagree.

The coordinator runs on rank 0 and is a plain state machine: messages in, broadcasts out. What it
broadcasts reaches every rank in one order, and so do collectives of different process sets run in
one order wherever a rank belongs to both.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial

from ringlet.fusion.limits import Limits
from ringlet.fusion.negotiation import messages as m
from ringlet.fusion.negotiation.bucket_votes import DAMAGED, FEWER, BucketVotes
from ringlet.fusion.negotiation.request_table import RequestTable
from ringlet.fusion.negotiation.stall_inspector import Stalled, StallInspector
from ringlet.fusion.negotiation.stragglers import Stragglers
from ringlet.fusion.negotiation.validation import differing, listed, named_ranks
from ringlet.fusion.requests.request import Request, dumps, loads
from ringlet.fusion.requests.series import called

_PROTOTYPES = 1 << 12  # that are kept as objects


class Coordinator:
    """Implements ``ringlet.ring.control.plane.Handler`` for ``size`` ranks.

    Process set 0 is all of them; others come and go when all ranks call for it. What a message does
    in which state stands in the tables of ``request_table`` and ``bucket_votes``. Beyond that:

        event \\ state            running                         after some rank has left
        ------------------------  ------------------------------  ----------------------------------
        rank r calls for a        noted; with the last rank's     refused
          process set             call made, removed or refused;
                                  refused if all who have not
                                  called have joined
        rank r is lost            everybody is told, and ends     the same
        rank r leaves             what waits for it is refused    the same
        a message makes no sense  the engine ends on all ranks    the same
    """

    def __init__(
        self,
        size: int,
        cache_capacity: int = Limits.cache_capacity,
        stalls: StallInspector | None = None,
    ) -> None:
        self._capacity = cache_capacity
        self._stalls = stalls or StallInspector()
        self._numbers = itertools.count(1)  # of groups and batches
        self._versions = itertools.count(1)  # of EXECUTE messages
        self._stragglers = Stragglers(self._stalls.warn_after, self._stalls.clock)
        self._votes = BucketVotes(self._stragglers, partial(next, self._numbers))
        self._size = size
        self._sets: dict[int, RequestTable] = {}
        self._sets_so_far = 0
        self._add_set(tuple(range(size)))
        self._set_calls: dict[int, deque[bytes]] = {rank: deque() for rank in range(size)}
        self._sets_changed = 0
        self._gone: dict[int, str] = {}  # with the exception that ended it, if one did
        self._prototypes: dict[bytes, Request] = {}  # by their text
        self._digests: dict[tuple[int, int, int], dict[int, int]] = {}  # of batches, by rank
        self._handlers: dict[bytes, Callable[[int, bytes], list[bytes]]] = {
            m.VOTE: self._vote,
            m.HITS: self._hits,
            m.REQUEST: self._request,
            m.SERIES: self._count,
            m.DECLARE: self._declare,
            m.FAILED: self._failed,
            m.DIGESTS: self._compare,
            m.RELEASE: self._release,
            m.JOIN: self._join,
            m.ADD_SET: self._change_sets,
            m.REMOVE_SET: self._change_sets,
            m.ANNOUNCE: lambda _, message: self._announce(message),
            m.CHECK: lambda _rank, _message: self._check(),
            m.BROKEN: self._broken,
            m.GOODBYE: self._leave,
            m.SEVERED: self._severed,
        }

    def entitle(self, group: int, title: str) -> None:
        """Call a declared group so, where it is told what waits and what failed. Any thread."""
        self._votes.entitle(group, title)

    # -- ringlet.ring.control.plane.Handler ------------------------------------------------------

    def on_message(self, rank: int, message: bytes) -> list[bytes]:
        """Take a message of ``rank``; return what every rank is to hear."""
        take = self._handlers.get(message[:1])
        if take is None:
            told = f"rank {rank} sent a message of unknown kind {message[:1]!r}"
            return [m.BROKEN + dumps(told)]
        try:
            return take(rank, message)
        except Exception as error:  # whatever a rank may send must not end the coordinator
            return [m.BROKEN + dumps(f"rank {rank} sent a message that makes no sense: {error!r}")]

    def on_lost(self, rank: int, why: str = "") -> list[bytes]:
        """Tell everybody that ``rank`` went away without a goodbye."""
        text = f"rank {rank} is gone: {why or 'its connection closed without a goodbye'}"
        waiting = [name for peers in self._sets.values() for name in peers.waiting()]
        if waiting:
            text += f" (waiting: {listed([*map(called, waiting)])})"
        return [m.LOST + dumps([[rank], text])]

    # -- one kind of message each ---------------------------------------------------------------

    def _hits(self, rank: int, message: bytes) -> list[bytes]:
        number, version, bits = m.unpack_hits(message)
        peers = self._known(number)
        if peers is None:
            return []  # its members were told with the removal, and those who ask later by name
        return peers.hit(rank, bits, version) + self._refused_for_gone(peers)

    def _request(self, rank: int, message: bytes) -> list[bytes]:
        told: list[bytes] = []
        by_set: dict[int, list[Request]] = {}
        version, requests = loads(message[1:])
        for request in map(Request.from_list, requests):
            by_set.setdefault(request.process_set, []).append(request)
        for number, asked in by_set.items():
            peers = self._known(number)
            if peers is None:
                names = [request.name for request in asked]
                refusal = m.Refusal(number, names, [rank], _was_removed(number))
                told.append(m.REFUSED + dumps(refusal))
                continue
            told += peers.ask(rank, asked, version)
            told += self._refused_for_gone(peers)
        return told

    def _count(self, rank: int, message: bytes) -> list[bytes]:
        number, version, runs = m.unpack_series(message, self._prototype)
        if any(run.request.process_set != number for run in runs):
            raise ValueError(f"calls of another process set than {number}")
        peers = self._known(number)
        if peers is None:
            names = [f"{run.request.name}{n}" for run in runs for n in range(run.first, run.stop)]
            refusal = m.Refusal(number, names, [rank], _was_removed(number))
            return [m.REFUSED + dumps(refusal)]
        return peers.count(rank, runs, version) + self._refused_for_gone(peers)

    def _prototype(self, text: bytes) -> Request:
        found = self._prototypes.get(text)
        if found is None:
            if len(self._prototypes) >= _PROTOTYPES:
                self._prototypes.clear()
            found = self._prototypes[text] = Request.from_list(loads(text))
        return found

    def _declare(self, rank: int, message: bytes) -> list[bytes]:
        number, name, fields, problem = loads(message[1:])
        peers, requests = self._known(number, rank), [Request.from_list(f) for f in fields]
        if peers is None:
            refusal = m.Refusal(number, name, [rank], _was_removed(number))
            return [m.REFUSED + dumps(refusal)]
        told = self._votes.declare(peers, rank, name, requests, problem)
        return told + self._refused_for_gone(peers)

    def _vote(self, rank: int, message: bytes) -> list[bytes]:
        vote = m.unpack_vote(message)
        peers = self._known(vote.process_set, rank)
        if peers is None:
            return []  # its groups ended with it
        return self._votes.vote(peers, rank, vote) + self._refused_for_gone(peers)

    def _failed(self, rank: int, message: bytes) -> list[bytes]:
        failure = m.Failure(*loads(message[1:]))
        peers = self._known(failure.process_set, rank)
        if peers is None:
            return []
        counts = failure.turn, failure.biggest
        if failure.kind not in m.KINDS or any(type(each) is not int for each in counts):
            raise ValueError(f"failed in no known way: {failure}")
        return self._votes.fail(peers, failure._replace(text=f"rank {rank}: {failure.text}"))

    def _release(self, rank: int, message: bytes) -> list[bytes]:
        number, group = loads(message[1:])
        peers = self._known(number, rank)
        return [] if peers is None else self._votes.release(peers, rank, group)

    def _compare(self, rank: int, message: bytes) -> list[bytes]:
        """Compare what a batch has given to the ranks of a process set."""
        number, digests = loads(message[1:])
        peers = self._known(number, rank)
        if peers is None:
            return []
        for batch, place, name, value in digests:
            found = self._digests.setdefault((number, batch, place), {})
            found[rank] = value
            if len(found) < len(peers.ranks):
                continue
            del self._digests[number, batch, place]
            text = differing("results", {r: f"{each:016x}" for r, each in found.items()})
            if text:
                return [m.BROKEN + dumps(f"{name!r}, or what was fused with it: {text}: {DAMAGED}")]
        return []

    def _join(self, rank: int, message: bytes) -> list[bytes]:
        number = loads(message[1:])
        peers = self._known(number)
        if peers is None:
            return [m.JOINED + dumps([number, -1, _was_removed(number), []])]
        told = peers.join(rank)
        told += self._votes.joined(peers)
        told += [] if number else self._sets_refused_for_joined()
        return told + peers.all_joined() + self._refused_for_gone(peers)

    def _announce(self, message: bytes) -> list[bytes]:
        action, argument = loads(message[1:])
        return [m.ANNOUNCED + dumps([action, argument, not self._gone])]

    def _broken(self, rank: int, message: bytes) -> list[bytes]:
        return [m.BROKEN + dumps(f"rank {rank}: {loads(message[1:])}")]

    def _severed(self, rank: int, message: bytes) -> list[bytes]:
        others, why = loads(message[1:])
        ends = [rank, *(other for other in others if other != rank)]
        what = f"rank {rank} lost a connection"
        if len(ends) > 1:
            listed_ends = " and ".join(f"rank {end}" for end in sorted(ends))
            what = f"the connection between {listed_ends} broke, though they are there"
        return [m.LOST + dumps([sorted(ends), f"{what}: {why}"])]

    # -- stalls ---------------------------------------------------------------------------------

    def _check(self) -> list[bytes]:
        text, over = self._stalls.inspect(self._waiting())
        texts = [text, self._stragglers.report()]
        told = [m.STALLED + dumps(text) for text in texts if text]
        if over:
            after = self._stalls.give_up_after
            why = f"a stall of more than {after:g} s; {self._stalls.cause()}"
            told.append(m.BROKEN + dumps(why))
        return told

    def _waiting(self) -> list[Stalled]:
        """Return what some ranks wait for, with those and the others."""
        found: list[Stalled] = []
        for peers in self._sets.values():
            within = f" of process set {peers.number}" if peers.number else ""
            for name, (ready, turn) in peers.waiting().items():
                missing = [r for r in peers.active if r not in ready]
                found.append(Stalled(f"{called(name)!r}{within}", ready, missing, turn))
            for group, (ready, turn) in peers.unfinished().items():
                missing = [r for r in peers.active if r not in ready]
                found.append(Stalled(f"the rest of group {group!r}{within}", ready, missing, turn))
        for what, (peers, (ready, turn)) in self._votes.waiting().items():
            missing = [r for r in peers.ranks if r not in ready]
            found.append(Stalled(what, ready, missing, turn))
        for (number, name), (ready, turn) in self._votes.calls().items():
            missing = [r for r in self._sets[number].active if r not in ready]
            found.append(Stalled(f"the declaration of {called(name)!r}", ready, missing, turn))
        ready = [rank for rank, calls in self._set_calls.items() if calls]
        if ready:
            call = _in_words(self._set_calls[ready[0]][0])
            missing = [rank for rank in self._set_calls if rank not in ready]
            found.append(Stalled(f"the call to {call}", ready, missing, self._sets_changed))
        return [each for each in found if each.missing]

    # -- process sets ---------------------------------------------------------------------------

    def _add_set(self, ranks: tuple[int, ...]) -> int:
        number = self._sets_so_far
        self._sets_so_far += 1
        next_batch, next_version = partial(next, self._numbers), partial(next, self._versions)
        table = RequestTable(number, ranks, self._capacity, next_batch, next_version)
        self._sets[number] = table
        return number

    def _known(self, number: int, rank: int | None = None) -> RequestTable | None:
        """Return a process set; None if it was removed. LookupError if it never was.

        ValueError if ``rank`` is given and not in it.
        """
        if not 0 <= number < self._sets_so_far:
            raise LookupError(f"there is no process set {number}")
        peers = self._sets.get(number)
        if peers is not None and rank is not None and rank not in peers.ranks:
            raise ValueError(f"rank {rank} is not in process set {number}")
        return peers

    def _change_sets(self, rank: int, message: bytes) -> list[bytes]:
        """Make or remove a process set once all ranks have called for the same."""
        self._set_calls[rank].append(message)
        if self._gone:
            return self._refuse_sets()
        if not all(self._set_calls.values()):
            return self._sets_refused_for_joined()
        calls = {rank: queue.popleft() for rank, queue in self._set_calls.items()}
        self._sets_changed += 1
        text = differing("process sets", {rank: _in_words(call) for rank, call in calls.items()})
        told, number, ranks = [], 0, []
        if not text and message[:1] == m.REMOVE_SET:
            number = loads(message[1:])
            removed = self._sets.pop(number, None) if number else None
            if removed is None:
                text = f"there is no process set {number}" if number else "process set 0 stays"
            else:
                why = f"process set {number} was removed"
                told = removed.refuse_all(why)
                for key in [key for key in self._digests if key[0] == number]:
                    del self._digests[key]
                told += self._votes.refuse_all(removed, why, retire=True)
        elif not text:
            ranks = loads(message[1:])
            text = self._unfit(ranks)
            number = 0 if text else self._add_set(tuple(ranks))
        change = m.SetChange(number, [] if text else ranks, text, list(calls))
        return [*told, m.SET + dumps(change)]

    def _unfit(self, ranks: Sequence[int]) -> str:
        """Return why there can be no process set of ``ranks``, or an empty string."""
        plain = isinstance(ranks, list) and all(type(rank) is int for rank in ranks)
        if plain and ranks and ranks == sorted(set(ranks)) and ranks[0] >= 0:
            if ranks[-1] < self._size:
                return ""
            return f"process set {ranks}: there is no rank {ranks[-1]} in a job of {self._size}"
        return f"process set {ranks}: it takes at least one rank, ascending, each once"

    def _refuse_sets(self) -> list[bytes]:
        return self._refuse_set_calls(self._why_gone(self._gone), sorted(self._gone))

    def _sets_refused_for_joined(self) -> list[bytes]:
        """Refuse calls for process sets that wait for nobody but ranks that have joined."""
        absent = [rank for rank, queue in self._set_calls.items() if not queue]
        if any(rank in self._sets[0].active for rank in absent):
            return []
        return self._refuse_set_calls(
            f"process sets stay as they are: {named_ranks(absent)} joined, and all ranks have to "
            "call for a change: make it before any rank calls join(), or after all have"
        )

    def _refuse_set_calls(self, why: str, gone: Sequence[int] = ()) -> list[bytes]:
        called = [rank for rank, queue in self._set_calls.items() if queue]
        if not called:
            return []
        for queue in self._set_calls.values():
            queue.clear()
        return [m.SET + dumps(m.SetChange(0, [], why, called, gone))]

    # -- ranks that leave -----------------------------------------------------------------------

    def _leave(self, rank: int, message: bytes) -> list[bytes]:
        self._gone[rank] = str(loads(message[1:]))
        told = self._refuse_sets()
        for peers in self._sets.values():
            told += self._refused_for_gone(peers)
        return [*told, m.GONE + dumps([rank, self._why_gone([rank])])]

    def _refused_for_gone(self, peers: RequestTable) -> list[bytes]:
        """Give up on what waits for ranks that have left, if any of ``peers`` did."""
        gone = sorted(rank for rank in self._gone if rank in peers.ranks)
        if not gone:
            return []
        why = self._why_gone(gone)
        hint = "" if any(self._gone[rank] for rank in gone) else FEWER
        refused = self._votes.refuse_all(peers, why, gone, hint=hint)
        return peers.refuse_all(why, gone) + refused

    def _why_gone(self, ranks: Iterable[int]) -> str:
        ended = ((rank, self._gone[rank]) for rank in ranks)
        return "; ".join(
            f"rank {rank} has ended ({why})" if why else f"rank {rank} has shut down"
            for rank, why in ended
        )


def _was_removed(number: int) -> str:
    return f"process set {number} was removed"


def _in_words(call: bytes) -> str:
    value = loads(call[1:])
    return f"remove {value}" if call[:1] == m.REMOVE_SET else f"add {value}"
