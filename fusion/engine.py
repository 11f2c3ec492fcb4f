"""The fusion engine: one background thread that agrees with the other ranks and moves tensors.

Callers submit by name, in any order, while backward still runs. The thread compresses what is
complete, votes, and runs collectives in the one order that the coordinator announces.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ringlet.compressors import Compressor, NoCompression, Workspace
from ringlet.compressors.context import State
from ringlet.fusion import messages as m
from ringlet.fusion.buffers import BufferPool
from ringlet.fusion.errors import CompressionFailed, DuplicateName, EngineClosed
from ringlet.fusion.executor import Batch, execute_single
from ringlet.fusion.group import Group
from ringlet.fusion.member import Member
from ringlet.fusion.negotiation import Coordinator
from ringlet.fusion.request import Request, dumps, loads
from ringlet.fusion.stats import Stats
from ringlet.fusion.strategy import check_op, choose, effective
from ringlet.fusion.work import Handle, Work
from ringlet.ring.communicator import Communicator
from ringlet.ring.control import ControlPlane, Handler
from ringlet.ring.dtypes import Array
from ringlet.ring.errors import Mismatch, PeerLost

log = logging.getLogger("ringlet")

_NAMING_S = 2.0  # how long to wait for the name of a rank that a transport lost
_LEAVING_S = 10.0  # how long to wait until the coordinator has heard the goodbye

OpenControl = Callable[[Communicator, Handler | None], ControlPlane]


@dataclass(frozen=True)
class Limits:
    """What the engine may be tuned by; all ranks need the same ``fusion_threshold``.

    ``fusion_threshold`` is in bytes of uncompressed tensors, ``cycle_time`` in seconds: how long
    single submissions wait for company when nobody waits for them. ``seed`` feeds the random
    numbers of compressors.
    """

    fusion_threshold: int = 16 << 20
    cycle_time: float = 0.001
    seed: int = 0


class Engine:
    """Owns the communicator from now on. Made, and shut down, by all ranks together."""

    def __init__(
        self, comm: Communicator, open_control: OpenControl, limits: Limits | None = None
    ) -> None:
        self.comm = comm
        self.limits = limits or Limits()
        self.stats = Stats()
        self.rank, self.size = comm.rank, comm.size
        coordinator = Coordinator(self.size) if self.rank == 0 else None
        self._control = open_control(comm, coordinator)
        self._pool = BufferPool()
        self._workspace = Workspace()
        self._states: dict[str, State] = {}
        self._lock = threading.Lock()
        self._queue: deque[Work] = deque()
        self._complete: deque[tuple[Group | Batch, int, int]] = deque()
        self._waiting: dict[str, Work] = {}
        self._declaring: dict[str, tuple[Handle, list[Member]]] = {}
        self._executing: list[Work] = []  # taken, but perhaps not finished
        self._groups: dict[int, Group | Batch] = {}
        self._cached: dict[int, Request] = {}
        self._ids: dict[Request, int] = {}
        self._error: Exception | None = None
        self._hurried = False
        self._closing = False
        self._pid = os.getpid()
        self._thread = threading.Thread(
            target=self._run, name=f"ringlet-engine-{self.rank}", daemon=True
        )
        self._thread.start()

    # -- called by any thread -------------------------------------------------------------------

    def declare(
        self,
        name: str,
        requests: Sequence[Request],
        compressors: Sequence[Compressor],
        states: Sequence[State],
    ) -> Group:
        """Declare tensors that are reduced together in every step. Collective.

        Raises Mismatch when ranks declare different tensors, the same on every rank.
        """
        names = [request.name for request in requests]
        repeated = sorted({n for n in names if names.count(n) > 1})
        if repeated:
            raise DuplicateName(f"declared twice in {name!r}: {', '.join(map(repr, repeated))}")
        members = [
            self._member(request, compressor, state)
            for request, compressor, state in zip(requests, compressors, states, strict=True)
        ]
        handle = Handle(name, self._hurry)
        with self._lock:
            self._check_open()
            if name in self._declaring:
                raise DuplicateName(f"group {name!r} is being declared already")
            self._declaring[name] = (handle, members)
        body = [name, [member.request.to_list() for member in members]]
        self._control.send(m.DECLARE + dumps(body))
        group: Group = handle.wait()
        return group

    def release(self, group: Group) -> None:
        """Forget a group between steps; every rank does, sooner or later."""
        self._groups.pop(group.number, None)

    def submit(
        self,
        request: Request,
        values: Array,
        output: Array | None = None,
        compressor: Compressor | None = None,
    ) -> Handle:
        """Submit one tensor (flat ``values``); every rank must submit the same name.

        The result goes to ``output``, or in place where it has the same size; the arrays belong
        to the engine until the handle is done. Raises DuplicateName while the name is in flight.
        """
        chosen = NoCompression() if compressor is None else compressor
        check_op(chosen, request.op)
        choose(effective(chosen, request.dtype, request.numel), self.size, request.collective)
        handle = Handle(request.name, self._hurry)
        work = Work(request, handle, values, values if output is None else output, chosen)
        with self._lock:
            self._check_open()
            if request.name in self._waiting:
                raise DuplicateName(
                    f"{request.name!r} was submitted again before its first submission finished; "
                    "give each tensor its own name, or wait"
                )
            self._waiting[request.name] = work
            self._queue.append(work)
        self._control.wake()
        return handle

    def shutdown(self) -> None:
        """End the thread and close the control plane; idempotent. What is in flight fails."""
        with self._lock:
            if self._closing:
                return
            self._closing = True
        if os.getpid() != self._pid:
            return
        self._control.wake()
        self._thread.join()
        self._control.close()

    def reset_stats(self) -> None:
        """Start counting anew."""
        self.stats = Stats()

    def _check_open(self) -> None:
        if os.getpid() != self._pid:
            raise EngineClosed(
                "this process was forked after init; the engine lives in the parent. "
                "Call init in the child, or start workers with 'spawn'"
            )
        if self._closing:
            raise EngineClosed("submitted after shutdown; call init again")
        if self._error is not None:
            raise self._error

    def _hurry(self) -> None:
        self._hurried = True
        self._control.wake()

    def _member(self, request: Request, compressor: Compressor, state: State) -> Member:
        limits = self.limits
        return Member(
            request, compressor, self.rank, self.size, limits.seed, self._workspace, state
        )

    # -- the engine's thread ----------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._closing:
                for message in self._control.receive(self._patience()):
                    self._dispatch(message)
                self._encode_complete()
                self._flush()
            self._control.send(m.GOODBYE)
            self._keep_promises()
            self._break(EngineClosed("the engine was shut down"))
        except PeerLost as error:
            self._break(self._named(error))
        except Exception as error:
            log.debug("the engine failed", exc_info=True)
            self._announce(error)
            self._break(error)

    def _keep_promises(self) -> None:
        """Run what this rank had voted for: others may be inside those collectives already."""
        deadline = time.monotonic() + _LEAVING_S
        while (left := deadline - time.monotonic()) > 0:
            for message in self._control.receive(left):
                if message[:1] == m.GONE and loads(message[1:]) == self.rank:
                    return
                self._dispatch(message)

    def _patience(self) -> float | None:
        """Return how long to wait for messages: not at all if there is something to send."""
        if self._complete or self._closing:
            return 0.0
        if not self._queue:
            return None
        return 0.0 if self._hurried else self.limits.cycle_time

    def _flush(self) -> None:
        """Ask for what was submitted since the last time."""
        with self._lock:
            works = list(self._queue)
            self._queue.clear()
            self._hurried = False
        if not works:
            return
        hits = [self._ids[w.request] for w in works if w.request in self._ids]
        fresh = [w.request.to_list() for w in works if w.request not in self._ids]
        if fresh:
            self._control.send(m.REQUEST + dumps(fresh))
        if hits:
            self._control.send(m.pack_hits(hits))

    def _encode_complete(self) -> None:
        """Compress buckets whose tensors are all there, and vote for them."""
        while self._complete:
            group, index, epoch = self._complete.popleft()
            if epoch != group.epoch:
                continue  # of a step that failed meanwhile
            try:
                nbytes = group.buckets[index].encode(self.stats)
            except Exception as error:
                log.debug("a bucket could not be encoded", exc_info=True)
                known = isinstance(error, CompressionFailed)
                text = str(error) if known else f"{type(error).__name__}: {error}"
                self._control.send(m.FAILED + dumps([group.number, epoch, text]))
                continue
            self._control.send(m.pack_vote(m.Vote(group.number, epoch, index, nbytes)))

    def _dispatch(self, message: bytes) -> None:
        kind = message[:1]
        if kind == m.GO:
            self._go(m.unpack_go(message))
        elif kind == m.EXECUTE_HITS:
            number, ids = m.unpack_execute_hits(message)
            works = [self._take(self._cached[i].name) for i in ids]
            self._execute(number, [(work, ()) for work in works])
        elif kind == m.EXECUTE:
            self._execute_fresh(*loads(message[1:]))
        elif kind == m.DECLARED:
            self._declared(*loads(message[1:]))
        elif kind == m.REFUSED:
            self._refuse(*loads(message[1:]))
        elif kind == m.FAILED:
            number, epoch, text, gone = loads(message[1:])
            group = self._groups.get(number)
            if group is not None and group.epoch == epoch:
                group.fail(PeerLost(text, gone) if gone else CompressionFailed(text))
                self._forget_batch(group)
        elif kind == m.LOST:
            rank, text = loads(message[1:])
            raise PeerLost(text, [rank])
        elif kind == m.BROKEN:
            raise EngineClosed(f"the engine broke on {loads(message[1:])}")

    def _go(self, verdict: m.Verdict) -> None:
        group = self._groups[verdict.group]
        bucket = group.buckets[verdict.bucket]
        bucket.exchange(self.comm, verdict.sizes, self.stats)
        if bucket.more:
            self._complete.append((group, verdict.bucket, verdict.epoch))
            return
        group.bucket_done()
        self._forget_batch(group)

    def _declared(self, name: str, number: int, order: list[str]) -> None:
        handle, members = self._declaring.pop(name)
        by_name = {member.request.name: member for member in members}
        ordered = [by_name[n] for n in order]
        threshold = self.limits.fusion_threshold
        group = Group(name, number, ordered, self.size, threshold, self._pool, self._bucket_ready)
        group.warm_up()
        handle.output = self._groups[number] = group
        handle.finish()

    def _bucket_ready(self, group: Group, index: int, epoch: int) -> None:
        self._complete.append((group, index, epoch))
        self._control.wake()

    def _execute_fresh(self, number: int, items: list[tuple[str, int, list[int]]]) -> None:
        ready: list[tuple[Work, tuple[int, ...]]] = []
        for name, cache_id, rows in items:
            work = self._take(name)
            if cache_id >= 0:
                self._cached[cache_id] = work.request
                self._ids[work.request] = cache_id
            ready.append((work, tuple(rows)))
        self._execute(number, ready)

    def _execute(self, number: int, ready: list[tuple[Work, tuple[int, ...]]]) -> None:
        """Run what all ranks are ready for: allreduces fused by look-ahead, the rest in order."""
        self._executing = [work for work, _ in ready]
        reductions = [work for work, _ in ready if work.request.kind == "allreduce"]
        if reductions:
            members = [self._prepared(work) for work in reductions]
            batch = Batch(number, reductions, members, self.limits.fusion_threshold, self._pool)
            for index in batch.run_plain(self.comm, self.stats):
                self._groups[number] = batch
                self._complete.append((batch, index, batch.epoch))
        for work, rows in ready:
            if work.request.kind != "allreduce":
                execute_single(self.comm, work, rows)

    def _prepared(self, work: Work) -> Member:
        state: State = {}
        if not isinstance(work.compressor, NoCompression):
            state = self._states.setdefault(work.request.name, {})
        member = self._member(work.request, work.compressor, state)
        member.input, member.output = work.input, work.output
        return member

    def _forget_batch(self, group: Group | Batch) -> None:
        if isinstance(group, Batch) and group.finished:
            self._groups.pop(group.number, None)

    def _take(self, name: str) -> Work:
        with self._lock:
            return self._waiting.pop(name)

    def _refuse(self, names: str | list[str], text: str, gone: list[int]) -> None:
        error = PeerLost(text, gone) if gone else Mismatch(text)
        if isinstance(names, str):
            if names in self._declaring:
                self._declaring.pop(names)[0].finish(error)
            return
        for name in names:
            with self._lock:
                work = self._waiting.pop(name, None)
                if work is not None and work in self._queue:
                    self._queue.remove(work)
            if work is not None:
                work.handle.finish(error)

    def _named(self, error: PeerLost) -> PeerLost:
        """Return an error that names the lost rank, if the coordinator tells it soon."""
        deadline = time.monotonic() + _NAMING_S
        try:
            while not error.ranks and (left := deadline - time.monotonic()) > 0:
                for message in self._control.receive(left):
                    if message[:1] == m.LOST:
                        rank, text = loads(message[1:])
                        return PeerLost(text, [rank])
        except PeerLost as gone:
            return gone
        return error

    def _announce(self, error: Exception) -> None:
        """Tell the other ranks, as far as that is still possible, why this one stops."""
        try:
            self._control.send(m.BROKEN + dumps(f"{type(error).__name__}: {error}"))
        except Exception:
            log.debug("could not announce the failure", exc_info=True)

    def _break(self, error: Exception) -> None:
        """Fail everything in flight, and whatever comes later, with ``error``."""
        with self._lock:
            self._error = error
            works = [*self._waiting.values(), *self._executing]
            self._waiting.clear()
            self._queue.clear()
        for work in works:
            if not work.handle.done():
                work.handle.finish(error)
        for handle, _ in list(self._declaring.values()):
            handle.finish(error)
        for group in list(self._groups.values()):
            group.fail(error, for_good=True)
