"""Declared groups, and the votes for their buckets: part of the coordinator, on rank 0.

A bucket goes out once every rank of its process set has encoded it. A step that fails on one rank
fails on all, once: every failure raises the group's epoch, and votes of an older one do not count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from ringlet.fusion import messages as m
from ringlet.fusion.readiness import Readiness
from ringlet.fusion.request import Request, dumps
from ringlet.fusion.stragglers import Stragglers
from ringlet.fusion.validation import group_disagreement


@dataclass
class _Ballot:
    """What the coordinator knows of one group."""

    peers: Readiness
    epoch: int = 0
    votes: dict[int, dict[int, int]] = field(default_factory=dict)  # bucket, then bytes by rank


class Ballots:
    """All groups, and compressed batches, by number."""

    def __init__(self, stragglers: Stragglers) -> None:
        self._stragglers = stragglers
        self._declared: dict[tuple[int, str], dict[int, list[Request]]] = {}
        self._of: dict[int, _Ballot] = {}

    def declare(
        self, peers: Readiness, rank: int, name: str, requests: list[Request], number: int
    ) -> list[bytes]:
        """Take a declaration; the group is ``number`` if this completes it."""
        declared = self._declared.setdefault((peers.number, name), {})
        declared[rank] = requests
        if len(declared) < len(peers.ranks):
            return []
        del self._declared[peers.number, name]
        text = group_disagreement(declared)
        if text:
            return [m.REFUSED + dumps([peers.number, name, text, []])]
        names = [request.name for request in declared[min(declared)]]
        return [m.DECLARED + dumps([peers.number, name, number, names])]

    def vote(self, peers: Readiness, rank: int, vote: m.Vote) -> list[bytes]:
        """Count a vote; a verdict if it was the last one."""
        ballot = self._of.setdefault(vote.group, _Ballot(peers))
        if vote.epoch != ballot.epoch:
            return []  # of a step that failed meanwhile
        votes = ballot.votes.setdefault(vote.bucket, {})
        votes[rank] = vote.nbytes
        complete = len(votes) == len(peers.ranks)
        self._stragglers.voted((vote.group, vote.bucket), rank, complete)
        if complete:
            del ballot.votes[vote.bucket]
            if not ballot.votes and not ballot.epoch:
                del self._of[vote.group]  # nothing to remember
            sizes = tuple(votes[r] for r in peers.ranks)
            return [m.pack_go(m.Verdict(vote.group, vote.epoch, vote.bucket, sizes))]
        return self._wanted(vote, ballot) if peers.joined else []

    def joined(self, peers: Readiness) -> list[bytes]:
        """Ask ranks that joined for what the others are already waiting for."""
        told: list[bytes] = []
        for number, ballot in self._of.items():
            if ballot.peers is peers:
                for bucket in ballot.votes:
                    vote = m.Vote(number, ballot.epoch, bucket, 0, peers.number)
                    told += self._wanted(vote, ballot)
        return told

    def fail(
        self, peers: Readiness, group: int, epoch: int, text: str, gone: Sequence[int] = ()
    ) -> list[bytes]:
        """Fail a group's step on all ranks, unless another rank's failure was told already."""
        ballot = self._of.setdefault(group, _Ballot(peers))
        if epoch != ballot.epoch:
            return []
        ballot.epoch += 1
        ballot.votes.clear()
        self._stragglers.forget()
        return [m.FAILED + dumps([group, epoch, text, list(gone)])]

    def refuse_all(self, process_set: int, why: str, gone: Sequence[int]) -> list[bytes]:
        """Give up on every declaration and every step of a process set that waits."""
        told: list[bytes] = []
        for key in [key for key in self._declared if key[0] == process_set]:
            del self._declared[key]
            told.append(m.REFUSED + dumps([*key, why, list(gone)]))
        for number, ballot in list(self._of.items()):
            if ballot.votes and ballot.peers.number == process_set:
                told += self.fail(ballot.peers, number, ballot.epoch, why, gone)
        return told

    def waiting(self) -> dict[int, tuple[Readiness, list[int]]]:
        """Return the groups whose step waits: their ranks, and those that it does not wait for."""
        found: dict[int, tuple[Readiness, list[int]]] = {}
        for number, ballot in self._of.items():
            votes = list(ballot.votes.values())
            if votes:
                ready = [r for r in ballot.peers.ranks if all(r in of for of in votes)]
                found[number] = ballot.peers, ready
        return found

    def _wanted(self, vote: m.Vote, ballot: _Ballot) -> list[bytes]:
        votes = ballot.votes[vote.bucket]
        if any(rank not in votes for rank in ballot.peers.active):
            return []
        return [m.pack_vote(vote, m.WANTED)]
