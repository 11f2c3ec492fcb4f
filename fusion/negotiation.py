"""Negotiation: which tensors every rank is ready for, and what to say when ranks disagree.

The coordinator runs on rank 0 and is a plain state machine: messages in, broadcasts out. Requests
arrive in any order on any rank; one is executed when every rank has asked for it. A request that
was executed once has a number, and asking for it again takes one bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringlet.fusion import messages as m
from ringlet.fusion.request import Request, dumps, loads
from ringlet.fusion.validation import disagreement, group_disagreement


class Coordinator:
    """Implements ``ringlet.ring.control.Handler`` for ``size`` ranks."""

    def __init__(self, size: int, cache_capacity: int = 4096) -> None:
        self._size = size
        self._capacity = cache_capacity
        self._groups = 0
        self._table: dict[str, dict[int, Request]] = {}
        self._declared: dict[str, dict[int, list[Request]]] = {}
        self._votes: dict[tuple[int, int], dict[int, int]] = {}
        self._epochs: dict[int, int] = {}
        self._cached: list[Request] = []
        self._ids: dict[Request, int] = {}
        self._gone: dict[int, str] = {}

    # -- ringlet.ring.control.Handler -----------------------------------------------------------

    def on_message(self, rank: int, message: bytes) -> list[bytes]:
        """Take a message of ``rank``; return what every rank is to hear."""
        kind = message[:1]
        if kind == m.VOTE:
            return self._vote(rank, m.unpack_vote(message))
        if kind == m.HITS:
            return self._ask(rank, [self._cached[i] for i in m.unpack_hits(message)])
        if kind == m.GOODBYE:
            return self._leave(rank)
        body = loads(message[1:])
        if kind == m.REQUEST:
            return self._ask(rank, [Request.from_list(fields) for fields in body])
        if kind == m.DECLARE:
            return self._declare(rank, body[0], [Request.from_list(f) for f in body[1]])
        if kind == m.FAILED:
            group, epoch, text = body
            return self._fail(group, epoch, f"rank {rank}: {text}")
        if kind == m.BROKEN:
            return [m.BROKEN + dumps(f"rank {rank}: {body}")]
        return [m.BROKEN + dumps(f"rank {rank} sent a message of unknown kind {kind!r}")]

    def on_lost(self, rank: int) -> list[bytes]:
        """Tell everybody that ``rank`` went away without a goodbye."""
        waiting = ", ".join(repr(name) for name in list(self._table)[:6])
        text = f"rank {rank} is gone: its connection closed without a goodbye"
        return [m.LOST + dumps([rank, text + (f" (waiting: {waiting})" if waiting else "")])]

    # -- requests -------------------------------------------------------------------------------

    def _ask(self, rank: int, requests: list[Request]) -> list[bytes]:
        ready: list[dict[int, Request]] = []
        refused: list[bytes] = []
        for request in requests:
            asked = self._table.setdefault(request.name, {})
            asked[rank] = request
            if self._gone:
                refused.append(self._refuse_for_gone(request.name))
            elif len(asked) == self._size:
                del self._table[request.name]
                text = disagreement(asked)
                if text:
                    refused.append(m.REFUSED + dumps([[request.name], text, []]))
                else:
                    ready.append(asked)
        return refused + (self._execute(ready) if ready else [])

    def _execute(self, ready: list[dict[int, Request]]) -> list[bytes]:
        self._groups += 1
        # Known only if all ask alike: rows of an all-gather differ even where rank 0's did not.
        alike = [all(request == asked[0] for request in asked.values()) for asked in ready]
        known = [
            self._ids.get(asked[0]) if same else None
            for asked, same in zip(ready, alike, strict=True)
        ]
        if all(i is not None for i in known):
            ids = [i for i in known if i is not None]
            return [m.pack_execute_hits(self._groups, ids)]
        items: list[list[Any]] = []
        for asked, same in zip(ready, alike, strict=True):
            first = asked[0]
            number = self._number(first) if same else -1
            rows = [asked[r].shape[0] if asked[r].shape else 0 for r in range(self._size)]
            items.append([first.name, number, rows if first.kind == "allgather" else []])
        return [m.EXECUTE + dumps([self._groups, items])]

    def _number(self, request: Request) -> int:
        """Return the request's cache id, giving it one while there is room; -1 otherwise."""
        known = self._ids.get(request)
        if known is not None:
            return known
        if len(self._cached) >= self._capacity:
            return -1
        self._ids[request] = len(self._cached)
        self._cached.append(request)
        return self._ids[request]

    # -- groups ---------------------------------------------------------------------------------

    def _declare(self, rank: int, name: str, requests: list[Request]) -> list[bytes]:
        declared = self._declared.setdefault(name, {})
        declared[rank] = requests
        if self._gone:
            return self._refuse_groups()
        if len(declared) < self._size:
            return []
        del self._declared[name]
        text = group_disagreement(declared)
        if text:
            return [m.REFUSED + dumps([name, text, []])]
        self._groups += 1
        return [m.DECLARED + dumps([name, self._groups, [r.name for r in declared[0]]])]

    def _vote(self, rank: int, vote: m.Vote) -> list[bytes]:
        if vote.epoch != self._epochs.get(vote.group, 0):
            return []  # of a step that failed meanwhile
        votes = self._votes.setdefault((vote.group, vote.bucket), {})
        votes[rank] = vote.nbytes
        if self._gone:
            return self._fail(vote.group, vote.epoch, self._gone_text(), sorted(self._gone))
        if len(votes) < self._size:
            return []
        del self._votes[vote.group, vote.bucket]
        sizes = tuple(votes[r] for r in range(self._size))
        return [m.pack_go(m.Verdict(vote.group, vote.epoch, vote.bucket, sizes))]

    def _fail(self, group: int, epoch: int, text: str, gone: Sequence[int] = ()) -> list[bytes]:
        if epoch != self._epochs.get(group, 0):
            return []  # another rank's failure of the same step was told already
        self._epochs[group] = epoch + 1
        for key in [key for key in self._votes if key[0] == group]:
            del self._votes[key]
        return [m.FAILED + dumps([group, epoch, text, list(gone)])]

    # -- ranks that leave -----------------------------------------------------------------------

    def _leave(self, rank: int) -> list[bytes]:
        self._gone[rank] = f"rank {rank} has shut down"
        told = [self._refuse_for_gone(name) for name in list(self._table)]
        told += self._refuse_groups()
        for group in {group for group, _ in self._votes}:
            told += self._fail(group, self._epochs.get(group, 0), self._gone_text(), [rank])
        return [*told, m.GONE + dumps(rank)]

    def _refuse_for_gone(self, name: str) -> bytes:
        asked = self._table.pop(name)
        who = ", ".join(str(rank) for rank in sorted(asked))
        text = f"{self._gone_text()} while {name!r} was waiting on rank(s) {who}"
        return m.REFUSED + dumps([[name], text, sorted(self._gone)])

    def _refuse_groups(self) -> list[bytes]:
        names = list(self._declared)
        self._declared.clear()
        gone = sorted(self._gone)
        return [m.REFUSED + dumps([name, self._gone_text(), gone]) for name in names]

    def _gone_text(self) -> str:
        return "; ".join(self._gone.values())
