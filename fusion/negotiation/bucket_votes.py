"""Declared groups, and the votes for their buckets: part of the coordinator, on rank 0.

A bucket goes out once every rank of its process set has encoded it. A group is in one step at a
time, and ranks count its steps alike. The states of a group's step, and what an event does to it:

    event \\ state        open                             decided: all buckets were told to go
    -------------------  -------------------------------  ------------------------------------------
    rank r votes         counted; with the last vote for  the next step is open; it counts there
                         a bucket that goes out
    votes differ in      fails for good, on all ranks     -
      turn or plan
    digests differ       fails for good, on all ranks     -
    rank r cannot go on  fails on all ranks, once: the    fails if all ranks gave up the exchange
      (``Failure``)      epoch rises, and older votes,    together; a rank that gives up by itself
                         and failures, count no more      is too late, and finds the step reduced
    rank r joins         is asked for zeros               is asked for zeros in the next step
    rank r leaves        fails on all ranks               the next step fails with its first vote
    the set is removed   fails on all ranks               its groups are forgotten

A batch is a group of one step. It is forgotten when it is decided, or once all ranks have heard
that it failed (``release``): until then their older votes and failures may come.

Ranks may be apart in what they know: one may fail several steps while another one has not begun the
first of them. So a failure says which step it ends, and each rank ends just that one. Steps are
counted in *turns* since the declaration: the steps of schedules may go back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from ringlet.fusion.negotiation import messages as m
from ringlet.fusion.negotiation.request_table import RequestTable, Wait
from ringlet.fusion.negotiation.stragglers import Stragglers
from ringlet.fusion.negotiation.validation import differing, group_disagreement, named_ranks
from ringlet.fusion.requests.request import Request, dumps

DAMAGED = (
    "data was damaged on its way or in memory, or somebody wrote to a tensor while it was being "
    "reduced, so that replicas may differ; restore the last checkpoint"
)

FEWER = (
    "; if a rank has had fewer batches than others, give all ranks as many, or call hvd.join() "
    "after the loop"
)


@dataclass
class _Ballot:
    """What the coordinator knows of one group."""

    peers: RequestTable
    epoch: int = 0
    turn: int = 0  # the step that is open
    decided: set[int] = field(default_factory=set)  # its buckets that go out
    votes: dict[int, dict[int, m.Vote]] = field(default_factory=dict)  # by bucket, then by rank


@dataclass
class _Call:
    """One rank's declaration; ``problem`` tells why it failed there."""

    requests: list[Request]
    problem: str


class BucketVotes:
    """All groups, and compressed batches, by number."""

    def __init__(self, stragglers: Stragglers, next_number: Callable[[], int]) -> None:
        self._stragglers, self._next_number = stragglers, next_number
        self._calls: dict[tuple[int, str], dict[int, deque[_Call]]] = {}
        self._turns: dict[tuple[int, str], int] = {}  # how often a name was declared
        self._of: dict[int, _Ballot] = {}
        self._names: dict[int, str] = {}  # of declared groups
        self._titles: dict[int, str] = {}  # what those of them are called that were entitled
        self._released: dict[int, set[int]] = {}  # the ranks that have no use for a group any more

    def declare(
        self, peers: RequestTable, rank: int, name: str, requests: list[Request], problem: str
    ) -> list[bytes]:
        """Take a declaration, or a rank's word that it failed there."""
        key = peers.number, name
        calls = self._calls.setdefault(key, {})
        calls.setdefault(rank, deque()).append(_Call(requests, problem))
        if len(calls) < len(peers.ranks):
            return self._refused_for_joined(peers, name)
        declared = {rank: queue.popleft() for rank, queue in sorted(calls.items())}
        self._calls[key] = {rank: queue for rank, queue in calls.items() if queue}
        if not self._calls[key]:
            del self._calls[key]
        self._turns[key] = self._turns.get(key, 0) + 1
        failed = [rank for rank, call in declared.items() if call.problem]
        if failed:
            text = (
                f"{name!r} was not declared: {named_ranks(failed)}: {declared[failed[0]].problem}"
            )
        else:
            text = group_disagreement({rank: call.requests for rank, call in declared.items()})
        if text:
            return [m.REFUSED + dumps(m.Refusal(peers.number, name, peers.ranks, text))]
        number = self._next_number()
        self._names[number] = name
        names = [request.name for request in declared[min(declared)].requests]
        return [m.DECLARED + dumps([peers.number, name, number, names])]

    def vote(self, peers: RequestTable, rank: int, vote: m.Vote) -> list[bytes]:
        """Count a vote; a verdict if it was the last one."""
        ballot = self._ballot(peers, vote.group)
        if vote.epoch != ballot.epoch:
            return []  # of a step that failed meanwhile
        votes = ballot.votes.setdefault(vote.bucket, {})
        if rank in votes:
            raise ValueError(f"voted twice for bucket {vote.bucket} of group {vote.group}")
        votes[rank] = vote
        complete = len(votes) == len(peers.ranks)
        self._stragglers.voted((vote.group, vote.bucket), rank, complete)
        if vote.turn != ballot.turn:
            text = self._drift(ballot, rank, vote.turn)
            return self._impossible(peers, ballot, vote.group, text)
        if not complete:
            return self._wanted(vote, ballot) if peers.joined else []
        text = differing("plans", {r: f"{v.plan:016x}" for r, v in votes.items()})
        if text:
            text += "; ranks have different limits or versions of a compressor, or follow its "
            text += "schedule from different steps, having loaded files of such"
        digests = {r: f"{v.digest:016x}" for r, v in votes.items()}
        if not text and all(v.digest for v in votes.values()):
            text = differing("sums of the step before", digests)
            text = text and f"{text}: {DAMAGED}"
        if text:
            text = f"bucket {vote.bucket}: {text}"
            return self._impossible(peers, ballot, vote.group, text)
        del ballot.votes[vote.bucket]
        if vote.final:
            ballot.decided.add(vote.bucket)
            if len(ballot.decided) == vote.buckets:
                ballot.decided.clear()
                ballot.turn += 1
                if vote.group not in self._names and not ballot.epoch:
                    del self._of[vote.group]  # a batch, of which nothing is left
        sizes = tuple(votes[r].nbytes for r in peers.ranks)
        contributors = sum(not v.absent for v in votes.values())
        verdict = m.Verdict(vote.group, vote.epoch, vote.bucket, contributors, sizes)
        return [m.pack_go(verdict)]

    def release(self, peers: RequestTable, rank: int, group: int) -> list[bytes]:
        """Note that a rank has no use for a group; forget it once no rank has.

        Of a batch that failed a rank says so once it has heard that, and nothing more of it.
        """
        ranks = self._released.setdefault(group, set())
        ranks.add(rank)
        if not ranks.issuperset(peers.ranks):
            return []
        del self._released[group]
        self._of.pop(group, None)
        name = self._forget(group)
        if name is None:
            return []  # a batch, which ranks have forgotten
        self._turns.pop((peers.number, name), None)
        return [m.FORGET + dumps(group)]

    def joined(self, peers: RequestTable) -> list[bytes]:
        """Ask ranks that joined for what the others are already waiting for."""
        told: list[bytes] = []
        for number, name in list(self._calls):
            if number == peers.number:
                told += self._refused_for_joined(peers, name)
        for ballot in self._of.values():
            if ballot.peers is peers:
                for votes in ballot.votes.values():
                    told += self._wanted(next(iter(votes.values())), ballot)
        return told

    def _refused_for_joined(self, peers: RequestTable, name: str) -> list[bytes]:
        """Refuse a declaration that waits for nobody but ranks that have joined.

        Not earlier: who is refused may join next, and a later rank would be told of that instead.
        """
        calls = self._calls[peers.number, name]
        absent = [rank for rank in peers.ranks if rank not in calls]
        if any(rank in peers.active for rank in absent):
            return []
        del self._calls[peers.number, name]
        text = (
            f"{name!r} was not declared: {named_ranks(absent)} joined, and what is declared needs "
            "all ranks: make optimizers, and take their first step, before any rank calls join()"
        )
        return [m.REFUSED + dumps(m.Refusal(peers.number, name, sorted(calls), text))]

    def fail(
        self, peers: RequestTable, failure: m.Failure, gone: Sequence[int] = ()
    ) -> list[bytes]:
        """Fail a group's step on all ranks, unless that is settled otherwise already."""
        ballot = self._ballot(peers, failure.group)
        if failure.epoch != ballot.epoch:
            return []  # another failure of the same step came before
        if failure.turn < ballot.turn and failure.kind != "exchange":
            return []  # it was reduced before the rank gave it up, which will find out
        under_way = bool(ballot.votes or ballot.decided)
        reduced = failure.turn + 1 == ballot.turn and not under_way
        if failure.turn != ballot.turn and not reduced:
            text = f"{failure.text}; {self._drift(ballot, None, failure.turn)}"
            failure = failure._replace(kind="mismatch", text=text)
        ballot.epoch += 1
        ballot.votes.clear()
        ballot.decided.clear()
        ballot.turn = failure.turn + 1
        self._stragglers.forget()
        told = m.FailedStep(*failure[1:], gone)
        return [m.STEP_FAILED + dumps(told)]

    def refuse_all(
        self,
        peers: RequestTable,
        why: str,
        gone: Sequence[int] = (),
        retire: bool = False,
        hint: str = "",
    ) -> list[bytes]:
        """Give up on every declaration and every step of a process set that waits.

        No step of its groups can be reduced any more if they ``retire``. The ``hint`` says what may
        have led to it, where steps wait.
        """
        told: list[bytes] = []
        for key in [key for key in self._calls if key[0] == peers.number]:
            called = sorted(self._calls.pop(key))
            text = f"{why} while {key[1]!r} was being declared on {named_ranks(called)}"
            told.append(m.REFUSED + dumps(m.Refusal(*key, called, text, gone)))
        for number, ballot in list(self._of.items()):
            if ballot.peers is peers and ballot.votes:
                at = peers.number, number, ballot.epoch, ballot.turn
                asked = sorted({rank for votes in ballot.votes.values() for rank in votes})
                text = f"{why} while {self._in_words(number)} was waiting on {named_ranks(asked)}"
                text += hint
                told += self.fail(peers, m.Failure(*at, "gone", text), gone)
            if ballot.peers is peers and retire:
                del self._of[number]
                name = self._forget(number)
                if name is not None:
                    self._turns.pop((peers.number, name), None)
                self._released.pop(number, None)
        return told

    def waiting(self) -> dict[str, tuple[RequestTable, Wait]]:
        """Return what waits for votes, or for declarations, in words."""
        found: dict[str, tuple[RequestTable, Wait]] = {}
        for number, ballot in self._of.items():
            votes = list(ballot.votes.values())
            if votes:
                ready = [r for r in ballot.peers.ranks if all(r in of for of in votes)]
                turn = hash((ballot.epoch, ballot.turn, *sorted(ballot.decided)))
                found[f"{self._in_words(number)} ({number})"] = ballot.peers, Wait(ready, turn)
        return found

    def _in_words(self, number: int) -> str:
        title = self._title(number)
        return "a batch" if title is None else f"a step of {title!r}"

    def _title(self, number: int) -> str | None:
        """Return what a declared group is called; None for a batch."""
        return self._titles.get(number, self._names.get(number))

    def entitle(self, group: int, title: str) -> None:
        """Call a declared group so, where it is told what waits and what failed. From any thread.

        No lock is taken: a signal's handler may interrupt this, and wait for the coordinator.
        """
        self._titles[group] = title
        if group not in self._names:  # looked at last: ``_forget`` takes the name first
            self._titles.pop(group, None)

    def _forget(self, number: int) -> str | None:
        """Forget what a group is called; return the name it was declared by. None for a batch."""
        name = self._names.pop(number, None)
        self._titles.pop(number, None)
        return name

    def calls(self) -> dict[tuple[int, str], Wait]:
        """Return the declarations that wait for other ranks."""
        return {
            key: Wait(sorted(calls), self._turns.get(key, 0)) for key, calls in self._calls.items()
        }

    def _ballot(self, peers: RequestTable, group: int) -> _Ballot:
        ballot = self._of.setdefault(group, _Ballot(peers))
        if ballot.peers is not peers:
            raise ValueError(f"group {group} is not one of process set {peers.number}")
        return ballot

    def _drift(self, ballot: _Ballot, rank: int | None, turn: int) -> str:
        """Say that a rank is not in the step that the others are in."""
        who = "a rank" if rank is None else f"rank {rank}"
        return (
            f"{who} has {turn} steps behind it since the declaration, the others {ballot.turn}: "
            "ranks have drifted apart. Restore the last checkpoint"
        )

    def _impossible(
        self, peers: RequestTable, ballot: _Ballot, group: int, text: str
    ) -> list[bytes]:
        """Fail a step, and all later ones: ranks have drifted apart."""
        title = self._title(group)
        text = f"{'a batch' if title is None else f'group {title!r}'}: {text}"
        at = peers.number, group, ballot.epoch, ballot.turn
        return self.fail(peers, m.Failure(*at, "mismatch", text))

    def _wanted(self, vote: m.Vote, ballot: _Ballot) -> list[bytes]:
        votes = ballot.votes[vote.bucket]
        if any(rank not in votes for rank in ballot.peers.active):
            return []
        return [m.pack_vote(vote, m.WANTED)]
