"""Where records go: files and callbacks, on a thread of their own, so that training never waits."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

from ringlet.ring.safe_files import create_text, refuse_others

Record = dict[str, Any]
log = logging.getLogger("ringlet")

LIMIT = 1 << 14  # records that may wait


class Sink(Protocol):
    """Takes records, one at a time, on one thread."""

    def write(self, record: Record) -> None:
        """Take a record."""

    def close(self) -> None:
        """Finish."""


class JsonLines:
    """Writes a record a line to ``path``; each line is whole on the disk before the next begins.

    With ``append`` behind those that are there. Raises OSError where ``path`` is a link
    (``ringlet.ring.safe_files``), or no file of records.
    """

    def __init__(self, path: str | os.PathLike[str], append: bool = False) -> None:
        refuse_others(path, b'{"kind":')
        self._file = create_text(path, append=append)

    def write(self, record: Record) -> None:
        """Append a line."""
        self._file.write(json.dumps(record, separators=(",", ":")) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class Callback:
    """Calls a function with every record."""

    def __init__(self, function: Callable[[Record], object]) -> None:
        self._function = function

    def write(self, record: Record) -> None:
        """Call the function."""
        self._function(record)

    def close(self) -> None:
        """Do nothing."""


class Dispatcher:
    """Hands records to ``sinks``; what does not fit in the queue is dropped and counted.

    A sink that raises is told of once, in the log, and goes on getting records.
    """

    def __init__(self, sinks: Sequence[Sink], limit: int = LIMIT) -> None:
        self.dropped = 0
        self._sinks, self._limit = list(sinks), limit
        self._complained: set[int] = set()
        self._queue: deque[Record] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="ringlet-metrics", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Queue a record, or drop it. Never waits."""
        if len(self._queue) >= self._limit:
            self.dropped += 1
            return
        self._queue.append(record)
        self._wake.set()

    def close(self) -> None:
        """Write what is queued, and close the sinks. Idempotent."""
        if not self._closing:
            self._closing = True
            self._wake.set()
            self._thread.join()

    def _run(self) -> None:
        while not self._closing:
            self._wake.wait()
            self._wake.clear()
            self._drain()
        self._drain()
        if self.dropped:
            log.warning("%d records of metrics were dropped: a sink is too slow", self.dropped)
        for sink in self._sinks:
            self._try(sink, sink.close)

    def _drain(self) -> None:
        while self._queue:
            record = self._queue.popleft()
            for sink in self._sinks:
                self._try(sink, partial(sink.write, record))

    def _try(self, sink: Sink, call: Callable[[], object]) -> None:
        try:
            call()
        except BaseException:  # a sink's fault, whatever it is, is no other sink's
            if id(sink) not in self._complained:
                self._complained.add(id(sink))
                log.warning("metrics are lost in %s", type(sink).__name__, exc_info=True)
