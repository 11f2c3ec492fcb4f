"""What callers have handed in one by one, until it is done: shared by them and the engine."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Hashable, Iterable, Sequence

from ringlet.compressors import Compressor
from ringlet.fusion.errors import DuplicateName
from ringlet.fusion.planning.strategy import check_op, choose, effective
from ringlet.fusion.requests.handle import Signal, Work
from ringlet.fusion.requests.legality import check_request
from ringlet.fusion.requests.request import Request
from ringlet.ring.errors import again

_REMEMBERED = 1 << 14


class TensorQueue:
    """Work in flight, by name, and the queue of what other ranks have not been told of."""

    def __init__(self, signal: Signal) -> None:
        self._signal = signal
        self.lock = threading.RLock()
        self._queue: list[Work] = []
        self._in_flight: dict[Hashable, Work] = {}
        self._of_group: dict[Hashable, int] = {}  # how many members of a group are
        self._checked: dict[Hashable, tuple[Request, Compressor]] = {}
        self._error: Exception | None = None
        self.queued_bytes = 0

    def check(self, request: Request, compressor: Compressor, size: int) -> None:
        """Raise TypeError or ValueError unless ``request`` can be done by ``size`` ranks.

        CompressorError, a ValueError, where it is for the compressor; ValueError too when a
        compressed tensor comes with another shape under its old name.
        """
        if self.was_checked(request, compressor):
            return
        check_request(request, size)
        known = self._checked.get(request.key)
        if known is not None and known[0].shape != request.shape:
            _refuse_new_shape(known[0], request, compressor)
        check_op(compressor, request.op)
        choose(effective(compressor, request.dtype, request.numel), size, request.collective)
        if len(self._checked) >= _REMEMBERED:
            self._checked.clear()
        self._checked[request.key] = (request, compressor)

    def was_checked(self, request: Request, compressor: Compressor) -> bool:
        """Whether this very request was found to be in order."""
        known = self._checked.get(request.key)
        return known is not None and known[0] is request and known[1] is compressor

    def add_one(self, work: Work) -> bool:
        """Queue ``work``; see ``add``."""
        key = work.request.key
        with self.lock:
            if self._error is not None or key in self._in_flight or work.request.group:
                self._admit([work])
            self._in_flight[key] = work
            self.queued_bytes += work.input.nbytes
            self._queue.append(work)
            first = len(self._queue) == 1
            return first if self._error is None else self._end_late(self._error)

    def add(self, works: Sequence[Work]) -> bool:
        """Queue ``works`` together; return whether the queue was empty.

        Raises DuplicateName, and queues none, if one of the names is in flight, or all of a group,
        or if two of ``works`` have one name.
        """
        with self.lock:
            self._admit(works)
            for work in works:
                self._in_flight[work.request.key] = work
                self.queued_bytes += work.input.nbytes
            first = not self._queue
            self._queue.extend(works)
            return first if self._error is None else self._end_late(self._error)

    @property
    def queued(self) -> int:
        """How many works other ranks have not been told of."""
        return len(self._queue)

    def drain(self) -> list[Work]:
        """Return the queue, and empty it."""
        with self.lock:
            works, self._queue = self._queue, []
            self.queued_bytes = 0
        return works

    def find(self, key: Hashable) -> Work | None:
        """Return what is in flight under a name."""
        return self._in_flight.get(key)

    def complete(self, works: Sequence[Work]) -> None:
        """Let the callers of ``works`` go on; their names are free again."""
        with self.lock:
            for work in works:
                self._forget(work)
                work.complete()
        self._signal.notify()
        for work in works:
            if work.awaited:
                work.tell()

    def refuse(self, key: Hashable, error: Exception) -> None:
        """End what is in flight under a name with ``error``."""
        with self.lock:
            work = self._in_flight.get(key)
            if work is not None:
                self._forget(work)
                if work in self._queue:
                    self._queue.remove(work)
        if work is not None:
            work.finish(error)

    def refuse_set(self, process_set: int, error: Exception) -> None:
        """End what is in flight in a process set with ``error``."""
        with self.lock:
            in_flight = self._in_flight.values()
            works = [work for work in in_flight if work.request.process_set == process_set]
            for work in works:
                self._forget(work)
            gone = set(works)
            self._queue = [work for work in self._queue if work not in gone]
        for work in works:
            work.finish(error)

    def fail(self, works: Iterable[Work], error: Exception) -> None:
        """End ``works`` with ``error``."""
        for work in works:
            with self.lock:
                self._forget(work)
            work.finish(error)

    def close(self, error: Exception) -> None:
        """End everything, now and later, with ``error``."""
        with self.lock:
            self._error = error
            works = list(self._in_flight.values())
            self._in_flight.clear()
            self._of_group.clear()
            self._queue.clear()
        for work in works:
            work.finish(error)

    def _end_late(self, error: Exception) -> bool:
        """End what a signal's handler has interrupted that shut down, and returned: wake nobody."""
        self.close(error)
        return False

    def _admit(self, works: Sequence[Work]) -> None:
        """Count ``works`` as members of their groups. Raises if they must not be submitted."""
        if self._error is not None:
            raise again(self._error)
        keys: set[Hashable] = set()
        for work in works:
            key = work.request.key
            if key in self._in_flight or key in keys:
                raise DuplicateName(
                    f"{work.name!r} was submitted again before its first submission finished; give "
                    "each tensor its own name, or wait"
                )
            keys.add(key)
        grouped = [work.request for work in works if work.request.group]
        counts = Counter((request.process_set, request.group) for request in grouped)
        for request in grouped:
            key = request.process_set, request.group
            if self._of_group.get(key, 0) + counts[key] > request.group_size:
                raise DuplicateName(
                    f"group {request.group!r} was submitted again before its first submission "
                    "finished; give each group its own name, or wait"
                )
        for key, count in counts.items():
            self._of_group[key] = self._of_group.get(key, 0) + count

    def _forget(self, work: Work) -> None:
        """Let the name of ``work`` be used again."""
        request = work.request
        if self._in_flight.get(request.key) is not work:
            return
        del self._in_flight[request.key]
        if request.group:
            key = request.process_set, request.group
            self._of_group[key] -= 1
            if not self._of_group[key]:
                del self._of_group[key]


def _refuse_new_shape(before: Request, now: Request, compressor: Compressor) -> None:
    """Raise ValueError if what a compressor remembers of a tensor would not fit any more."""
    if before.kind == now.kind and compressor.traits().stateful:
        raise ValueError(
            f"{now.name!r} has shape {list(now.shape)} now and had {list(before.shape)} before; "
            f"what {str(compressor)!r} remembers of it does not fit. Give tensors of different "
            "shapes different names"
        )
