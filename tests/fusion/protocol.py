"""Ranks that speak the engine's protocol without data, and a plain model that judges what they see.

``World`` has a coordinator and simulated ranks. Its rules (``World.RULES``) submit, join, declare,
vote, fail, change process sets and leave, and move messages one by one, so that every interleaving
is possible. Whatever is broadcast is compared with what the ranks are really waiting for.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from ringlet.fusion import Request
from ringlet.fusion.negotiation import messages as m
from ringlet.fusion.negotiation.coordinator import Coordinator
from ringlet.fusion.requests.request import dumps, loads

NAMES = "abcdef"
SERIES = "s.noname."
GROUPS = {"g": "ab", "h": "bc", "k": "abc", "l": "de"}
ALONE = {"allgather": (2, 3), "broadcast": (2,), "allreduce": (2, 3)}


@dataclass
class Group:
    """A declared group as one rank sees it: ``outcomes`` of its steps, by turn."""

    number: int
    process_set: int
    turn: int = 0
    epoch: int = 0
    voted: set = field(default_factory=set)
    done: set = field(default_factory=set)
    zeros: set = field(default_factory=set)  # voted as a rank that joined
    failures: dict = field(default_factory=dict)
    outcomes: list = field(default_factory=list)
    abandoning: bool = False

    BUCKETS = 2

    @property
    def reduced(self):
        return len(self.done) == self.BUCKETS

    @property
    def failed(self):
        return self.turn in self.failures

    def collect(self):
        """Begin the next step."""
        failed = self.failures.pop(self.turn, None) is not None
        self.outcomes.append("failed" if failed else "reduced")
        self.turn += 1
        self.abandoning = False
        for names in (self.voted, self.done, self.zeros):
            names.clear()


class Rank:
    """One rank: what it waits for, what it has learnt, and the messages it has yet to send."""

    def __init__(self, number, size):
        self.number = number
        self.out = deque()
        self.at = 0  # broadcasts that it has heard
        self.version = 0
        self.asked = {}  # by (process set, name): the request that waits
        self.cached = {}  # by (process set, number): request and sizes
        self.ids = {}
        self.sets = {0: tuple(range(size))}
        self.removed = set()
        self.joined = set()
        self.calls = {}  # by process set: how many calls without names, since the last join
        self.joins = {}  # by process set: how often all joined
        self.calling = None
        self.declaring = set()
        self.groups = {}
        self.batches = {}  # that have to be voted on, by number: groups of one step
        self.reduced = set()  # batches
        self.left = False

    def runs(self, number, process_set, requests):
        """Begin a batch, which is voted on if anything in it is compressed."""
        if any(r.kind == "allreduce" and r.spec != "none" for r in requests):
            self.batches[number] = Group(number, process_set)

    def find(self, number):
        """Return a group, or a batch."""
        return self.groups.get(number) or self.batches.get(number)

    def send(self, message, asks=()):
        """Queue a message; ``asks`` are the requests that it makes."""
        self.out.append((message, asks))


class World:
    """``size`` ranks and their coordinator. A violation is an AssertionError."""

    def __init__(self, size, capacity):
        self.size = size
        self.coordinator = Coordinator(size, capacity)
        self.ranks = [Rank(r, size) for r in range(size)]
        self.log = []
        self.gave_up = set()  # broadcasts of verdicts whose exchange all ranks give up
        self.sets = {0: tuple(range(size))}
        # What the coordinator has been told and has not answered: the truth that it is held to.
        self.waiting = [{} for _ in range(size)]
        self.joined = [set() for _ in range(size)]
        self.votes = {}  # by group and bucket: the ranks, with their turns
        self.turns = {}  # of groups: turn, and the buckets that were told to go
        self.counts = dict.fromkeys(
            ["executed", "called", "refused", "reduced", "failed", "evicted", "run", "undone"], 0
        )
        self.batches = {}  # the process sets of batches, by number

    @property
    def alive(self):
        """The ranks that have not left."""
        return [rank for rank in self.ranks if not rank.left]

    def group(self, draw):
        """Return a rank and one of its groups, if it has any."""
        rank = draw(self.alive)
        return rank, rank.groups[draw(sorted(rank.groups))] if rank.groups else None

    # -- rules: what programs do. ``draw(options)`` returns one of them -------------------------

    def submit(self, draw):
        """One rank asks for something."""
        rank = draw(self.alive)
        number = draw(sorted(rank.sets))
        self.submit_on([rank], self.some_requests(number, draw), draw)

    def submit_everywhere(self, draw):
        """All ranks of a process set ask for the same, or nearly."""
        number = draw(sorted(self.sets))
        ranks = [rank for rank in self.alive if number in rank.sets]
        requests = self.some_requests(number, draw)
        self.submit_on(ranks, requests, draw)

    def submit_on(self, ranks, requests, draw):
        number, group = requests[0].process_set, requests[0].group
        for rank in ranks:
            of_set = [r for (n, _), r in rank.asked.items() if n == number]
            busy = {r.name for r in of_set} & {r.name for r in requests}
            if number in rank.joined or busy or (group and any(r.group == group for r in of_set)):
                continue
            self.ask(rank, requests, by_number=draw([True, True, True, False]))

    def some_requests(self, number, draw):
        group = draw(["", "", "", *GROUPS])
        kind = draw(["allreduce", "allreduce", "allgather", "broadcast"])
        rows = draw([2, 2, 2, 3]) if kind != "broadcast" else 2
        names = GROUPS[group] if group else draw(NAMES)
        spec = draw(["none", "none", "fp16"])
        return [
            Request(name, kind, shape=(rows, 2), spec=spec, process_set=number, group=group,
                    group_size=len(names) if group else 0)
            for name in names
        ]  # fmt: skip

    def ask(self, rank, requests, by_number=True):
        """Ask as the engine does: fresh requests in full, known ones by number."""
        fresh, known = [], []
        for request in requests:
            rank.asked[request.process_set, request.name] = request
            (known if by_number and request in rank.ids else fresh).append(request)
        if fresh:
            fields = [request.to_list() for request in fresh]
            rank.send(m.REQUEST + dumps([rank.version, fields]), fresh)
        if known:
            bits = sum(1 << rank.ids[request] for request in known)
            rank.send(m.pack_hits(known[0].process_set, rank.version, bits), known)

    def call(self, draw):
        """One rank makes calls without names."""
        rank = draw(self.alive)
        self.make_calls([rank], draw(sorted(rank.sets)), draw)

    def call_everywhere(self, draw):
        """All ranks of a process set make the same calls, or nearly."""
        number = draw(sorted(self.sets))
        self.make_calls([rank for rank in self.alive if number in rank.sets], number, draw)

    def make_calls(self, ranks, number, draw):
        counts = [draw([1, 1, 2, 3]) for _ in range(draw([1, 1, 2]))]
        kinds = [draw(["allreduce"] * 5 + ["allgather", "broadcast"]) for _ in counts]
        rows = [draw([2, 2, 2, 3]) for _ in counts]
        cuts = [draw([[0], [0], [1], [2, 1]]) for _ in counts]
        plain = draw([True, True, True, False])
        for rank in ranks:
            if number not in rank.joined:
                odd = draw([False] * 12 + [True])
                for count, kind, n, cut in zip(counts, kinds, rows, cuts, strict=True):
                    shape = (n + odd, 2)
                    self.call_on(rank, number, count, kind, shape, cut, plain != odd)

    def call_on(self, rank, number, count, kind, shape, cut, by_run):
        """Make calls, by number or in full; ``cut`` are those that go ahead of the others."""
        since = f"join{rank.joins[number]}." if rank.joins.get(number) else ""
        prototype = Request(f"{SERIES}{since}", kind, shape=shape, process_set=number)
        first = rank.calls.get(number, 0)
        rank.calls[number] = first + count
        early = [first + n for n in cut if 0 < n < count]
        for these in (early, [n for n in range(first, first + count) if n not in early]):
            asks = [prototype.numbered(n) for n in these]
            for request in asks:
                rank.asked[number, request.name] = request
            if by_run and asks:
                runs = []
                for n in these:
                    if runs and runs[-1].stop == n:
                        runs[-1] = runs[-1]._replace(stop=n + 1)
                    else:
                        runs.append(m.Run(n, n + 1, prototype))
                rank.send(m.pack_series(number, rank.version, runs), asks)
            elif asks:
                fields = [request.to_list() for request in asks]
                rank.send(m.REQUEST + dumps([rank.version, fields]), asks)

    def join(self, draw):
        rank = draw(self.alive)
        number = draw(sorted(rank.sets))
        if number in rank.joined or any(
            g.voted - g.zeros or g.abandoning
            for g in rank.groups.values()
            if g.process_set == number
        ):
            return
        self.go_on_without(rank, number)

    def go_on_without(self, rank, number):
        rank.joined.add(number)
        self.pass_over(rank, number)
        rank.send(m.JOIN + dumps(number))

    def pass_over(self, rank, number):
        for group in rank.groups.values():
            while group.process_set == number and group.failed and group.voted == group.zeros:
                group.collect()

    def call_sets(self, draw):
        rank = draw(self.alive)
        if rank.calling is not None:
            return
        pairs = [[0, 1], [0, 1], list(range(self.size)), [self.size - 1], [0, self.size]]
        if draw([True, True, False]):
            rank.calling = m.ADD_SET + dumps(draw(pairs))
        else:
            rank.calling = m.REMOVE_SET + dumps(draw([1, 1, 2, 0]))
        rank.send(rank.calling)

    def declare(self, draw):
        rank = draw(self.alive)
        number, name = draw(sorted(rank.sets)), draw("pq")
        if (number, name) in rank.declaring:
            return
        fields = [Request(n, shape=(2,), process_set=number).to_list() for n in "xy"]
        problem = draw([""] * 6 + ["out of luck"])
        if draw([False] * 6 + [True]):
            fields.pop()
        rank.declaring.add((number, name))
        rank.send(m.DECLARE + dumps([number, name, [] if problem else fields, problem]))

    def vote(self, draw):
        rank, group = self.group(draw)
        if group is None or group.failed or group.abandoning or group.process_set in rank.joined:
            return
        left = [b for b in range(Group.BUCKETS) if b not in group.voted]
        if left:
            self.cast(rank, group, draw(left))

    def step_everywhere(self, draw):
        """All ranks vote for all of a group's buckets."""
        _, group = self.group(draw)
        for rank in self.alive:
            own = rank.groups.get(group.number) if group else None
            if own is None or own.process_set in rank.joined or own.abandoning:
                continue
            if own.failed or own.reduced:
                own.collect()
            for bucket in range(Group.BUCKETS):
                if not own.failed and bucket not in own.voted:
                    self.cast(rank, own, bucket)

    def declare_everywhere(self, draw):
        """All ranks of a process set declare the same."""
        number, name = draw(sorted(self.sets)), draw("pq")
        for rank in self.alive:
            if number in rank.sets and (number, name) not in rank.declaring:
                fields = [Request(n, shape=(2,), process_set=number).to_list() for n in "xy"]
                rank.declaring.add((number, name))
                rank.send(m.DECLARE + dumps([number, name, fields, ""]))

    def cast(self, rank, group, bucket, absent=False):
        group.voted.add(bucket)
        rank.send(m.pack_vote(m.Vote(
            group.number, group.epoch, bucket, 10 + rank.number, group.process_set, group.turn,
            7, 0, Group.BUCKETS, True, absent,
        )))  # fmt: skip

    def fail(self, draw):
        """A compressor fails, before this rank has voted."""
        rank, group = self.group(draw)
        if group is None or group.failed or group.abandoning or len(group.voted) == Group.BUCKETS:
            return
        if group.process_set in rank.joined:
            return
        group.voted.update(range(Group.BUCKETS))
        self.give_up(rank, group, draw(["compression", "memory"]))

    def batch(self, draw):
        """A rank votes on a bucket of a batch, or cannot encode it."""
        busy = [rank for rank in self.alive if rank.batches]
        if not busy:
            return
        rank = draw(busy)
        batch = rank.batches[draw(sorted(rank.batches))]
        left = [b for b in range(Group.BUCKETS) if b not in batch.voted]
        if not left:
            return
        if draw([True, True, False]):
            self.cast(rank, batch, draw(left))
        else:
            batch.voted.update(range(Group.BUCKETS))
            self.give_up(rank, batch, draw(["compression", "memory"]))

    def abandon(self, draw):
        """The program gives up the step, begun or not."""
        rank, group = self.group(draw)
        if group is None or group.abandoning or group.process_set in rank.joined:
            return
        if group.failed:
            group.collect()
        elif not group.reduced:
            group.abandoning = True
            self.give_up(rank, group, "abandoned")

    def give_up(self, rank, group, kind):
        at = group.process_set, group.number, group.epoch, group.turn
        rank.send(m.FAILED + dumps(m.Failure(*at, kind, "because")))

    def collect(self, draw):
        _, group = self.group(draw)
        if group is not None and (group.failed or group.reduced):
            group.collect()

    def leave(self, draw):
        rank = draw(self.alive)
        if len(self.alive) > 1 and draw([True] + [False] * 40):
            rank.left = True
            rank.send(m.GOODBYE + dumps(draw(["", "ValueError: no data"])))

    def transmit(self, draw):
        """Some of one rank's messages reach the coordinator."""
        senders = [rank for rank in self.ranks if rank.out]
        if senders:
            rank = draw(senders)
            for _ in range(draw([1, 1, 2, 5])):
                if rank.out:
                    self.take(rank, draw)

    def deliver(self, draw):
        """One rank hears some of the broadcasts."""
        behind = [rank for rank in self.ranks if rank.at < len(self.log)]
        if behind:
            rank = draw(behind)
            for _ in range(draw([1, 2, 5])):
                if rank.at < len(self.log):
                    self.hear(rank)

    RULES = (
        submit, submit, submit_everywhere, submit_everywhere, submit_everywhere, join, call_sets,
        call, call, call_everywhere, call_everywhere, call_everywhere,
        declare, declare_everywhere, vote, vote, step_everywhere, step_everywhere, fail, abandon,
        collect, collect, leave, *[batch] * 6, *[transmit] * 8, *[deliver] * 8,
    )  # fmt: skip

    # -- the network ----------------------------------------------------------------------------

    def take(self, rank, draw=None):
        """The coordinator gets a rank's next message."""
        message, asks = rank.out.popleft()
        for request in asks:
            self.waiting[rank.number][request.process_set, request.name] = request
        if message[:1] == m.JOIN:
            self.joined[rank.number].add(loads(message[1:]))
        elif message[:1] == m.VOTE:
            vote = m.unpack_vote(message)
            ranks = self.votes.setdefault((vote.group, vote.bucket, vote.epoch), {})
            assert rank.number not in ranks
            ranks[rank.number] = vote.turn
        for told in self.coordinator.on_message(rank.number, message):
            self.judge(told)
            self.log.append(told)
            if told[:1] == m.GO and draw is not None and draw([False] * 12 + [True]):
                self.gave_up.add(len(self.log) - 1)

    def judge(self, told):
        """Compare a broadcast with what ranks wait for."""
        kind, body = told[:1], None if told[:1] in (m.GO, m.EXECUTE_HITS) else told[1:]
        assert kind != m.BROKEN, body
        if kind == m.EXECUTE:
            number, batch, items = loads(body)
            items = [m.Item._make(item) for item in items]
            self.batches[batch] = number
            self.execute(number, {item.name: item for item in items})
        elif kind == m.EXECUTE_SERIES:
            number, _, runs = loads(body)
            names = [f"{prefix}{n}" for prefix, first, stop in runs for n in range(first, stop)]
            self.counts["called"] += len(names)
            self.execute(number, dict.fromkeys(names))
        elif kind == m.EXECUTE_HITS:
            number, batch, bits = m.unpack_execute_hits(told)
            self.batches[batch] = number
            cache = self.coordinator._sets[number]._cache
            self.execute(number, {cache[i].name: None for i in m.ids_of(bits)})
        elif kind == m.REFUSED:
            refusal = m.Refusal._make(loads(body))
            for name in refusal.names if isinstance(refusal.names, list) else ():
                self.counts["refused"] += 1
                for rank in refusal.ranks:  # no process set: it was removed meanwhile
                    known = self.waiting[rank].pop((refusal.process_set, name), None)
                    assert known is not None or refusal.process_set not in self.sets
        elif kind == m.JOINED:
            number, _, text, _ = loads(body)
            for rank in self.sets.get(number, ()):
                assert text or number in self.joined[rank], "told that all had joined"
                self.joined[rank].discard(number)
        elif kind == m.SET:
            change = m.SetChange._make(loads(body))
            if not change.text and change.ranks:
                self.sets[change.number] = tuple(change.ranks)
            elif not change.text:
                del self.sets[change.number]
                for waiting in self.waiting:
                    for key in [key for key in waiting if key[0] == change.number]:
                        del waiting[key]
        elif kind == m.GO:
            verdict = m.unpack_go(told)
            voted = self.votes.pop((verdict.group, verdict.bucket, verdict.epoch))
            number = self.set_of(verdict.group)
            assert sorted(voted) == list(self.sets[number]), "a verdict without everybody's vote"
            assert len(set(voted.values())) == 1, "a verdict over different steps"
            assert verdict.sizes == tuple(10 + rank for rank in self.sets[number])

    def set_of(self, group):
        if group in self.batches:
            return self.batches[group]
        found = {r.groups[group].process_set for r in self.ranks if group in r.groups}
        assert len(found) == 1
        return found.pop()

    def execute(self, number, items):
        """Judge what is to be executed."""
        self.counts["executed"] += len(items)
        members = self.sets[number]
        for name, item in items.items():
            asked = {r: self.waiting[r].pop((number, name), None) for r in members}
            present = {r: request for r, request in asked.items() if request is not None}
            assert present, f"{name}: executed for nobody"
            for r in asked.keys() - present.keys():
                assert number in self.joined[r], f"{name}: rank {r} never gave its data"
                assert item is not None
                assert item.request is not None
            alike = {
                replace(q, shape=q.shape[1:] if q.kind == "allgather" else q.shape)
                for q in present.values()
            }
            assert len(alike) == 1, f"{name}: executed though ranks differ: {alike}"
            (request,) = alike
            assert request.kind == "allreduce" or len(present) == len(asked)
            if item is not None:
                assert item.contributors == len(present)
                if request.kind == "allgather":
                    assert list(item.sizes) == [present[r].shape[0] for r in members]
            if request.group:
                assert set(GROUPS[request.group]) <= items.keys(), "a part of a group"

    def hear(self, rank):
        """A rank hears its next broadcast."""
        at, told = rank.at, self.log[rank.at]
        rank.at += 1
        kind = told[:1]
        body = None if kind in (m.GO, m.WANTED, m.EXECUTE_HITS) else loads(told[1:])
        if kind == m.EXECUTE:
            rank.version += 1
            number, batch, items = body
            if number in rank.sets:
                items = map(m.Item._make, items)
                rank.runs(batch, number, [self.learn(rank, number, item) for item in items])
        elif kind == m.EXECUTE_HITS:
            number, batch, bits = m.unpack_execute_hits(told)
            if number in rank.sets:
                rank.runs(batch, number, [rank.cached[number, i][0] for i in m.ids_of(bits)])
            for i in m.ids_of(bits) if number in rank.sets else ():
                request, sizes = rank.cached[number, i]
                assert rank.asked.pop((number, request.name)) == request
                if request.kind == "allgather":
                    assert request.shape[0] == sizes[rank.sets[number].index(rank.number)]
        elif kind == m.EXECUTE_SERIES:
            number, _, runs = body
            for prefix, first, stop in runs if number in rank.sets else ():
                for n in range(first, stop):
                    request = rank.asked.pop((number, f"{prefix}{n}"))
                    assert request.kind != "allgather"  # which needs sizes
        elif kind == m.REFUSED:
            number, names, ranks, *_ = body
            if isinstance(names, str) and rank.number in ranks:
                rank.declaring.discard((number, names))
            for name in names if isinstance(names, list) and rank.number in ranks else ():
                rank.asked.pop((number, name), None)
        elif kind == m.JOINED:
            if body[0] in rank.joined and not body[2]:
                rank.joins[body[0]] = rank.joins.get(body[0], 0) + 1
                rank.calls[body[0]] = 0
            rank.joined.discard(body[0])
        elif kind == m.DECLARED and body[0] in rank.sets:
            number, name, group, _ = body
            rank.declaring.remove((number, name))
            rank.groups[group] = Group(group, number)
        elif kind == m.SET:
            self.change(rank, m.SetChange._make(body))
        elif kind == m.GO:
            self.go(rank, at, m.unpack_go(told))
        elif kind == m.STEP_FAILED:
            self.failed(rank, m.FailedStep._make(body))
        elif kind == m.WANTED:
            vote = m.unpack_vote(told)
            group = rank.groups.get(vote.group)
            wanted = group is not None and vote.process_set in rank.joined
            if wanted and group.epoch == vote.epoch and vote.bucket not in group.voted:
                group.zeros.add(vote.bucket)
                self.cast(rank, group, vote.bucket, absent=True)

    def learn(self, rank, number, item):
        request = rank.asked.pop((number, item.name), None)
        if request is None:
            assert number in rank.joined
            request = Request.from_list(item.request)
        if item.cache_id >= 0:
            before = rank.cached.get((number, item.cache_id))
            if before is not None and before[0] != request:
                self.counts["evicted"] += 1
                if rank.ids.get(before[0]) == item.cache_id:
                    del rank.ids[before[0]]
            rank.cached[number, item.cache_id] = request, item.sizes
            rank.ids[request] = item.cache_id
        return request

    def change(self, rank, change):
        if rank.number in change.called:
            assert rank.calling is not None
            rank.calling = None
        if change.text:
            return
        if change.ranks:
            if rank.number in change.ranks:
                rank.sets[change.number] = tuple(change.ranks)
            return
        number = change.number
        rank.sets.pop(number, None)
        rank.joined.discard(number)
        rank.declaring = {key for key in rank.declaring if key[0] != number}
        rank.asked = {key: r for key, r in rank.asked.items() if key[0] != number}
        rank.groups = {n: g for n, g in rank.groups.items() if g.process_set != number}
        rank.batches = {n: b for n, b in rank.batches.items() if b.process_set != number}
        rank.ids = {r: i for r, i in rank.ids.items() if r.process_set != number}

    def go(self, rank, at, verdict):
        group = rank.find(verdict.group)
        if group is None or verdict.epoch != group.epoch:
            return
        assert not group.failed
        if at in self.gave_up:
            if rank.number == rank.sets[group.process_set][0]:
                self.give_up(rank, group, "exchange")
            return
        assert verdict.bucket not in group.done
        group.done.add(verdict.bucket)
        if group.reduced and verdict.group in rank.batches:
            self.counts["run"] += 1
            del rank.batches[verdict.group]
            rank.reduced.add(verdict.group)
        elif group.reduced:
            self.counts["reduced"] += 1
            if group.zeros:
                assert len(group.zeros) == Group.BUCKETS, "zeros for a part of a step"
                group.collect()

    def failed(self, rank, failed):
        assert failed.group not in rank.reduced, "a batch failed that was reduced"
        group = rank.find(failed.group)
        if group is None or group.epoch != failed.epoch:
            return
        assert failed.kind != "mismatch", failed.text
        if rank.batches.pop(failed.group, None) is not None:
            self.counts["undone"] += 1
            rank.send(m.RELEASE + dumps([group.process_set, failed.group]))
            return
        self.counts["failed"] += 1
        group.epoch += 1
        assert failed.turn > group.turn or (failed.turn == group.turn and not group.reduced)
        group.failures[failed.turn] = True
        if group.process_set in rank.joined and not failed.gone:
            self.pass_over(rank, group.process_set)

    # -- what has to hold in the end ------------------------------------------------------------

    def settle(self):
        """Every message arrives."""
        while any(r.out or r.at < len(self.log) for r in self.ranks):
            for rank in self.ranks:
                while rank.out:
                    self.take(rank)
                while rank.at < len(self.log):
                    self.hear(rank)

    def finish(self):
        """Ranks do what the others wait for; then nobody waits. Then all leave."""
        self.settle()
        for _ in range(8):
            self.catch_up()
            self.settle()
        if not any(rank.left for rank in self.ranks):
            for rank in self.ranks:
                assert not rank.asked, f"rank {rank.number} waits for {rank.asked}"
                assert not rank.batches
                assert not rank.declaring
                assert rank.calling is None
                assert not rank.joined
            self.compare()
            votes = self.coordinator._votes
            kept = (votes._of.keys() | votes._released.keys()) & self.batches.keys()
            assert not kept, f"batches {kept} are over, and not forgotten"
        for rank in self.ranks:
            if not rank.left:
                rank.left = True
                rank.send(m.GOODBYE + dumps(""))
        self.settle()
        for rank in self.ranks:
            assert not rank.asked
            assert not rank.declaring
            assert rank.calling is None
            assert not rank.joined
        assert self.coordinator._waiting() == []
        assert not any(self.waiting)

    def catch_up(self):
        for rank in self.alive:
            for batch in rank.batches.values():
                for bucket in range(Group.BUCKETS):
                    if bucket not in batch.voted:
                        self.cast(rank, batch, bucket)
        for number, members in list(self.sets.items()):
            ranks = [self.ranks[r] for r in members if not self.ranks[r].left]
            wanted = {}
            for rank in ranks:
                for (of, name), request in rank.asked.items():
                    if of == number:
                        wanted.setdefault(name, request)
            joined = [rank for rank in ranks if number in rank.joined]
            for rank in ranks:
                if rank in joined:
                    continue
                lacking = [q for name, q in wanted.items() if (number, name) not in rank.asked]
                for group in {q.group for q in lacking}:
                    asks = [q for q in lacking if q.group == group]
                    if group and len(asks) < asks[0].group_size:
                        asks = [replace(q, group="", group_size=0) for q in asks]
                    self.ask(rank, asks)
                for group in rank.groups.values():
                    if group.process_set == number:
                        self.step([r for r in ranks if r not in joined], rank, group)
                if (
                    joined
                    and not wanted
                    and not any(g.voted for g in rank.groups.values() if g.process_set == number)
                ):
                    self.go_on_without(rank, number)
            for name in {name for r in ranks for of, name in r.declaring if of == number}:
                for rank in ranks:
                    if (number, name) not in rank.declaring:
                        rank.declaring.add((number, name))
                        rank.send(m.DECLARE + dumps([number, name, [], ""]))
        calling = [rank.calling for rank in self.ranks if rank.calling is not None]
        for rank in self.ranks if calling else ():
            if rank.calling is None and not rank.left:
                rank.calling = calling[0]
                rank.send(rank.calling)

    def step(self, active, rank, group):
        """Bring a rank to where the furthest one is, and end steps that have begun."""
        for peer in active:
            own = peer.groups.get(group.number)
            while own is not None and (own.failed or own.reduced):
                own.collect()
        peers = [r.groups.get(group.number) for r in active]
        behind = any(p.turn > group.turn or p.voted or p.abandoning for p in peers if p)
        for bucket in range(Group.BUCKETS) if behind and not group.abandoning else ():
            if bucket not in group.voted:
                self.cast(rank, group, bucket)

    def compare(self):
        """Ranks have learnt the same."""
        for number, members in self.sets.items():
            ranks = [self.ranks[r] for r in members]
            learnt = [
                {i: q.name for (of, i), (q, _) in rank.cached.items() if of == number}
                for rank in ranks
            ]
            assert all(each == learnt[0] for each in learnt)
            cache = self.coordinator._sets[number]._cache
            assert learnt[0] == {i: cache[i].name for i in range(len(cache))}
            for group in [n for n, g in ranks[0].groups.items() if g.process_set == number]:
                outcomes = [rank.groups[group].outcomes for rank in ranks]
                shortest = min(map(len, outcomes))
                assert all(o[:shortest] == outcomes[0][:shortest] for o in outcomes)
                assert len({rank.groups[group].epoch for rank in ranks}) == 1
