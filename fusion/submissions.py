"""What callers have handed in one by one, until it is done: shared by them and the engine."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Sequence

from ringlet.compressors import Compressor, NoCompression
from ringlet.fusion.errors import DuplicateName
from ringlet.fusion.request import Request
from ringlet.fusion.strategy import check_op, choose, effective
from ringlet.fusion.work import Signal, Work

_REMEMBERED = 1 << 14


class Submissions:
    """Work in flight, by name, and the queue of what other ranks have not been told of."""

    def __init__(self, signal: Signal) -> None:
        self._signal = signal
        self._lock = threading.Lock()
        self._queue: list[Work] = []
        self._in_flight: dict[Hashable, Work] = {}
        self._checked: dict[Hashable, tuple[Request, Compressor]] = {}
        self._error: Exception | None = None
        self.queued_bytes = 0

    def check(self, request: Request, compressor: Compressor, size: int) -> None:
        """Raise CompressorError unless ``request`` can be done by ``size`` ranks.

        ValueError when a compressed tensor comes with another shape under its old name.
        """
        if self.was_checked(request, compressor):
            return
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
        with self._lock:
            if self._error is not None or key in self._in_flight:
                return self._refused(work)
            self._in_flight[key] = work
            self.queued_bytes += work.input.nbytes
            self._queue.append(work)
            return len(self._queue) == 1

    def add(self, works: Sequence[Work]) -> bool:
        """Queue ``works`` together; return whether the queue was empty.

        Raises DuplicateName, and queues none, if one of the names is in flight.
        """
        with self._lock:
            for work in works:
                if self._error is not None or work.request.key in self._in_flight:
                    self._refused(work)
            for work in works:
                self._in_flight[work.request.key] = work
                self.queued_bytes += work.input.nbytes
            first = not self._queue
            self._queue.extend(works)
        return first

    @property
    def queued(self) -> int:
        """How many works other ranks have not been told of."""
        return len(self._queue)

    def drain(self) -> list[Work]:
        """Return the queue, and empty it."""
        with self._lock:
            works, self._queue = self._queue, []
            self.queued_bytes = 0
        return works

    def find(self, key: Hashable) -> Work | None:
        """Return what is in flight under a name."""
        return self._in_flight.get(key)

    def complete(self, works: Sequence[Work]) -> None:
        """Let the callers of ``works`` go on; their names are free again."""
        with self._lock:
            in_flight = self._in_flight
            for work in works:
                if in_flight.get(work.request.key) is work:
                    del in_flight[work.request.key]
                work.complete()
        self._signal.notify()
        for work in works:
            if work.awaited:
                work.tell()

    def refuse(self, key: Hashable, error: Exception) -> None:
        """End what is in flight under a name with ``error``."""
        with self._lock:
            work = self._in_flight.get(key)
            if work is not None:
                self._forget(work)
                if work in self._queue:
                    self._queue.remove(work)
        if work is not None:
            work.finish(error)

    def fail(self, works: Iterable[Work], error: Exception) -> None:
        """End ``works`` with ``error``."""
        for work in works:
            with self._lock:
                self._forget(work)
            work.finish(error)

    def close(self, error: Exception) -> None:
        """End everything, now and later, with ``error``."""
        with self._lock:
            self._error = error
            works = list(self._in_flight.values())
            self._in_flight.clear()
            self._queue.clear()
        for work in works:
            work.finish(error)

    def _refused(self, work: Work) -> bool:
        if self._error is not None:
            raise self._error
        raise DuplicateName(
            f"{work.name!r} was submitted again before its first submission finished; give each "
            "tensor its own name, or wait"
        )

    def _forget(self, work: Work) -> None:
        if self._in_flight.get(work.request.key) is work:
            del self._in_flight[work.request.key]


def _refuse_new_shape(before: Request, now: Request, compressor: Compressor) -> None:
    """Raise ValueError if what a compressor remembers of a tensor would not fit any more."""
    if before.kind == now.kind and not isinstance(compressor, NoCompression):
        raise ValueError(
            f"{now.name!r} has shape {list(now.shape)} now and had {list(before.shape)} before; "
            f"what {str(compressor)!r} remembers of it does not fit. Give tensors of different "
            "shapes different names"
        )
