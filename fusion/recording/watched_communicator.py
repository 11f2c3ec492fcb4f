"""A communicator that notes when each collective ran, and what it moved."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, cast

from ringlet.fusion.recording.events import Span
from ringlet.ring.communicator import Communicator
from ringlet.ring.dtypes import Array

Note = Callable[[Span], None]


class Watched:
    """Stands in for ``inner`` and passes everything on; ``note`` is told of every collective."""

    def __init__(self, inner: Communicator, note: Note) -> None:
        self.inner = inner
        self._note = note

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    @property
    def exchanges(self) -> int:
        """How many compressed collectives there were: the inner communicator counts."""
        return self.inner.exchanges

    @exchanges.setter
    def exchanges(self, value: int) -> None:
        self.inner.exchanges = value

    def allreduce(self, buffer: Array, *args: Any, **options: Any) -> None:
        """See ``Communicator.allreduce``."""
        self._timed("allreduce", buffer.nbytes, buffer, *args, **options)

    def allgather(self, send: Array, receive: Array, *args: Any, **options: Any) -> None:
        """See ``Communicator.allgather``."""
        self._timed("allgather", send.nbytes, send, receive, *args, **options)

    def expect(self, receive: Array) -> Callable[[Array], None]:
        """See ``Communicator.expect``."""
        gather = self.inner.expect(receive)
        return lambda send: self._noted("allgather", send.nbytes, lambda: gather(send))

    def alltoall(self, send: Array, receive: Array, *args: Any, **options: Any) -> None:
        """See ``Communicator.alltoall``."""
        self._timed("alltoall", send.nbytes, send, receive, *args, **options)

    def reduce_scatter(self, send: Array, receive: Array, *args: Any, **options: Any) -> None:
        """See ``Communicator.reduce_scatter``."""
        self._timed("reduce_scatter", send.nbytes, send, receive, *args, **options)

    def broadcast(self, buffer: Array, root: int = 0) -> None:
        """See ``Communicator.broadcast``."""
        self._timed("broadcast", buffer.nbytes, buffer, root)

    def barrier(self) -> None:
        """See ``Communicator.barrier``."""
        self._timed("barrier", 0)

    def _timed(self, name: str, nbytes: int, *args: Any, **options: Any) -> None:
        self._noted(name, nbytes, lambda: getattr(self.inner, name)(*args, **options))

    def _noted(self, name: str, nbytes: int, call: Callable[[], None]) -> None:
        start = time.perf_counter()
        call()
        self._note(Span(name, start, time.perf_counter(), nbytes))


def watched(comm: Communicator, note: Note) -> Communicator:
    """Return ``comm`` with every collective noted."""
    return cast(Communicator, Watched(unwatched(comm), note))


def unwatched(comm: Communicator) -> Communicator:
    """Return the communicator behind ``comm``."""
    return comm.inner if isinstance(comm, Watched) else comm
