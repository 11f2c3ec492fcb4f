"""Ranks as threads of one process: for tests, examples, and research on one machine.

Nothing is copied to be sent. Each rank lays its arrays on the table and waits; once all have, every
rank works on its own shard of everybody's arrays. Small calls are finished by the last to arrive,
which saves a second meeting. Ranks that call different things learn so from a ``Mismatch``.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ringlet.ring.communicator import Communicator, ReduceOp
from ringlet.ring.dtypes import Array, dtype_name
from ringlet.ring.errors import Mismatch, PeerLost, RingError, again
from ringlet.ring.rank_order import combine, even_counts

T = TypeVar("T")
_thread = threading.local()
SMALL = 1 << 17  # bytes over all ranks up to which the last rank to arrive does all the work
GRACE = 30.0  # seconds that ranks have to notice that another one failed


@dataclass
class _Call:
    """What one rank lays on the table: the call in words, which must agree, and its arguments."""

    what: str
    nbytes: int
    work: Callable[[Sequence[_Call], int, int], None]  # do the shares of ranks [first, last)
    send: Any = None
    receive: Any = None
    send_counts: Sequence[int] = ()
    receive_counts: Sequence[int] = ()


class LocalWorld:
    """``size`` ranks that are threads of this process; ``communicators`` holds one for each.

    ``origin`` holds, by rank, the ranks by which errors name them; None means 0, 1, ...
    """

    def __init__(self, size: int, origin: Sequence[int] | None = None) -> None:
        if size < 1:
            raise ValueError(f"a world has at least one rank, not {size}")
        self.size = size
        self.origin = tuple(range(size) if origin is None else origin)
        self._subsets: weakref.WeakSet[LocalWorld] = weakref.WeakSet()
        self._siblings: dict[int, LocalWorld] = {}
        self._condition = threading.Condition(threading.Lock())
        self._calls: dict[int, _Call] = {}
        self._met: Sequence[_Call] = ()
        self._done = True
        self._mismatch: str | None = None
        self._meetings = 0
        self._lost: PeerLost | None = None
        self._watchers: list[Callable[[int, str], None]] = []
        self.communicators = [LocalCommunicator(self, rank) for rank in range(size)]

    def leave(self, rank: int, why: str, lost: bool = True) -> None:
        """Note that ``rank`` takes part no more: whoever waits for it raises PeerLost.

        It also leaves the subsets of this world. One that is not ``lost`` may tell why itself.
        """
        origin = self.origin[rank]
        with self._condition:
            if self._lost is None:
                self._lost = PeerLost(f"rank {origin} {why}", [origin] if lost else [])
            watchers = list(self._watchers)
            subsets = list(self._subsets)
            self._condition.notify_all()
        for watcher in watchers:
            watcher(rank, why)
        for subset in subsets:
            if origin in subset.origin:
                subset.leave(subset.origin.index(origin), why, lost)

    def subset(self, ranks: Sequence[int]) -> LocalWorld:
        """Return a world of some of this one's ranks, which lose it when they leave this one."""
        world = LocalWorld(len(ranks), [self.origin[rank] for rank in ranks])
        with self._condition:
            self._subsets.add(world)
        return world

    def sibling(self, number: int) -> LocalWorld:
        """Return a world of the same ranks, the same one on each of them."""
        with self._condition:
            known = self._siblings.get(number)
        if known is None:
            made = self.subset(range(self.size))
            with self._condition:
                known = self._siblings.setdefault(number, made)
                known._lost = known._lost or self._lost
        return known

    def watch(self, watcher: Callable[[int, str], None]) -> None:
        """Call ``watcher(rank, why)`` whenever a rank leaves."""
        with self._condition:
            self._watchers.append(watcher)

    def perform(self, rank: int, call: _Call) -> Sequence[_Call]:
        """Make ``call`` together with all other ranks; return everybody's, by rank."""
        calls, done = self._meet(rank, call)
        if not done:
            call.work(calls, rank, rank + 1)
            self._meet(rank, _Call(f"the end of {call.what}", 0, _nothing))
        return calls

    def _meet(self, rank: int, call: _Call) -> tuple[Sequence[_Call], bool]:
        with self._condition:
            self._check()
            if rank in self._calls:
                raise RingError(f"two threads use the communicator of rank {rank} at once")
            self._calls[rank] = call
            meeting = self._meetings
            if len(self._calls) == self.size:
                self._conclude(rank)
            while meeting == self._meetings:
                self._check()
                self._condition.wait()
            # No later meeting can end before this rank has joined it.
            if self._mismatch is not None:
                raise Mismatch(self._mismatch)
            return self._met, self._done

    def _check(self) -> None:
        if self._lost is not None:
            raise again(self._lost)

    def _conclude(self, rank: int) -> None:
        calls = [self._calls[r] for r in range(self.size)]
        self._calls.clear()
        self._met, self._mismatch = calls, _disagreement(calls)
        self._done = max(call.nbytes for call in calls) <= SMALL
        if self._mismatch is None and self._done:
            try:
                calls[0].work(calls, 0, self.size)
            except BaseException as error:
                origin = self.origin[rank]
                self._lost = PeerLost(f"rank {origin} failed: {error!r}", [origin])
                self._condition.notify_all()
                raise
        self._meetings += 1
        self._condition.notify_all()


class LocalCommunicator(Communicator):
    """One rank of a ``LocalWorld``; use it from one thread."""

    name = "local"

    def __init__(self, world: LocalWorld, rank: int) -> None:
        super().__init__(rank, world.size, world.origin)
        self.world = world

    def sums_in_float32(self, dtype: str) -> bool:
        """True: the sums are ours."""
        return True

    def _allreduce(self, buffer: Array, op: ReduceOp, name: str) -> None:
        # Shard r is combined on rank r, in rank order, and written to every rank's buffer.
        counts = even_counts(buffer.size, self.size)

        def work(calls: Sequence[_Call], first: int, last: int) -> None:
            shard = slice(sum(counts[:first]), sum(counts[:last]))
            shards = [call.send[shard] for call in calls]
            combine(shards, shards, op, name)

        what = f"allreduce({op.name}) of {buffer.size} {name}"
        self._perform(_Call(what, buffer.nbytes * self.size, work, buffer))

    def _allgather(self, send: Array, receive: Array, counts: list[int]) -> None:
        what = f"allgather of {_list(counts)} {dtype_name(receive)}"
        self._perform(_Call(what, receive.nbytes * self.size, _gather, send, receive))

    def _alltoall(
        self, send: Array, receive: Array, send_counts: list[int], receive_counts: list[int]
    ) -> None:
        what = f"alltoall of {dtype_name(send)}"
        nbytes = receive.nbytes * self.size
        self._perform(_Call(what, nbytes, _exchange, send, receive, send_counts, receive_counts))

    def _reduce_scatter(
        self, send: Array, receive: Array, counts: list[int], op: ReduceOp, name: str
    ) -> None:
        def work(calls: Sequence[_Call], first: int, last: int) -> None:
            for rank in range(first, last):
                piece = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
                combine([c.send[piece] for c in calls], [calls[rank].receive], op, name)

        what = f"reduce_scatter({op.name}) of {_list(counts)} {name}"
        self._perform(_Call(what, send.nbytes * self.size, work, send, receive))

    def _broadcast(self, buffer: Array, root: int) -> None:
        def work(calls: Sequence[_Call], first: int, last: int) -> None:
            for rank in range(first, last):
                if rank != root:
                    calls[rank].send[:] = calls[root].send

        what = f"broadcast of {buffer.size} {dtype_name(buffer)} from rank {root}"
        self._perform(_Call(what, buffer.nbytes * self.size, work, buffer))

    def _barrier(self) -> None:
        self._perform(_Call("barrier", 0, _nothing))

    def share(self, value: T, root: int = 0) -> T:
        """Return rank ``root``'s ``value``, the object itself, on every rank."""
        self._usable()
        shared: T = self._perform(_Call(f"share from rank {root}", 0, _nothing, value))[root].send
        return shared

    def _subset(self, ranks: list[int]) -> LocalCommunicator | None:
        first = ranks[0]
        world = self.share(self.world.subset(ranks) if self.rank == first else None, first)
        if world is None or self.rank not in ranks:
            return None
        return world.communicators[ranks.index(self.rank)]

    def interrupt(self) -> None:
        """Leave the world: whoever waits for this rank raises PeerLost."""
        self.world.leave(self.rank, "gave up", lost=False)

    def _sibling(self, number: int) -> LocalCommunicator | None:
        return self.world.sibling(number).communicators[self.rank]

    def _close(self) -> None:
        self.world.leave(self.rank, "closed its communicator")

    def _perform(self, call: _Call) -> Sequence[_Call]:
        return self.world.perform(self.rank, call)


def this_thread() -> LocalCommunicator | None:
    """Return the communicator of the rank that this thread is inside ``run_local``, if any."""
    return getattr(_thread, "communicator", None)


def run_local(fn: Callable[..., T], size: int, *args: Any) -> list[T]:
    """Run ``fn(comm, *args)`` on ``size`` ranks, one thread each; return the results by rank.

    When a rank fails, the others raise PeerLost at their next collective, and the first failure is
    raised here. Ranks that do not come to one within 30 s are left behind as daemon threads.
    """
    world = LocalWorld(size)
    results: dict[int, T] = {}
    failures: list[BaseException] = []

    def run(comm: LocalCommunicator) -> None:
        _thread.communicator = comm
        try:
            results[comm.rank] = fn(comm, *args)
        except BaseException as error:
            failures.append(error)  # before anybody can fail because of it
            world.leave(comm.rank, f"failed with {type(error).__name__}: {error}")
        finally:
            comm.close()

    threads = [
        threading.Thread(target=run, args=(comm,), name=f"ringlet rank {comm.rank}", daemon=True)
        for comm in world.communicators
    ]
    try:
        for thread in threads:
            thread.start()
        deadline: float | None = None
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2 if deadline is None else max(0.0, deadline - time.monotonic()))
                if failures and deadline is None:
                    deadline = time.monotonic() + GRACE
                if deadline is not None and time.monotonic() >= deadline:
                    break
    except BaseException as error:
        world.leave(0, f"was interrupted by {error!r}")
        raise
    if failures:
        raise failures[0]
    return [results[rank] for rank in range(size)]


def _nothing(calls: Sequence[_Call], first: int, last: int) -> None:
    pass


def _gather(calls: Sequence[_Call], first: int, last: int) -> None:
    for call in calls[first:last]:
        start = 0
        for other in calls:
            call.receive[start : start + other.send.size] = other.send
            start += other.send.size


def _exchange(calls: Sequence[_Call], first: int, last: int) -> None:
    for rank in range(first, last):
        start = 0
        for other in calls:
            offset, n = sum(other.send_counts[:rank]), other.send_counts[rank]
            calls[rank].receive[start : start + n] = other.send[offset : offset + n]
            start += n


def _disagreement(calls: Sequence[_Call]) -> str | None:
    ranks: dict[str, list[int]] = {}
    for rank, call in enumerate(calls):
        ranks.setdefault(call.what, []).append(rank)
    if len(ranks) > 1:
        said = "; ".join(f"{_list(r)} called {what}" for what, r in ranks.items())
        return f"ranks called different collectives: ranks {said}"
    for i, sender in enumerate(calls):
        for j, n in enumerate(sender.send_counts):
            if calls[j].receive_counts[i] != n:
                expected = calls[j].receive_counts[i]
                return (
                    f"alltoall: rank {i} sends {n} elements to rank {j}, which expects {expected}"
                )
    return None


def _list(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
