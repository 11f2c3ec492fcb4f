"""One rank's trace: a file of Chrome's trace events that is valid JSON whenever one looks.

Events wait in a bounded queue for a thread of their own. What does not fit in the queue or on the
disk is dropped and counted: training never waits for a disk.
"""

from __future__ import annotations

import json
import logging
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ringlet.ring.safe_files import create

log = logging.getLogger("ringlet")

Event = dict[str, Any]
Render = Callable[[Any], Iterable[Event]]

LIMIT = 1 << 16  # items that may wait
_TOGETHER = 512  # items written at once
_EVERY = 0.1  # seconds between looks at the queue
_END = b"\n]\n"
_PAGE = 3 << 10  # bytes


class TraceFile:
    """Writes what ``render`` makes of each item to ``path``, one event a line.

    The file ends with its closing bracket after every write, which are small; the next write
    replaces it. A kill in the microseconds of a write may leave a torn last line. Raises OSError
    where ``path`` is a link (``ringlet.ring.safe_files``).
    """

    def __init__(self, path: Path, render: Render, limit: int = LIMIT) -> None:
        self.path = path
        self.dropped = 0  # items for which there was no room
        self._render, self._limit = render, limit
        self._queue: deque[Any] = deque()
        self._file = create(path)
        self.owner = os.fstat(self._file).st_uid  # some disks give all files to one user
        self._at = 0  # where the closing bracket is to be overwritten
        self._warned = False
        self._stop = threading.Event()
        self._write(b"[")
        self._thread = threading.Thread(target=self._run, name="ringlet-timeline", daemon=True)
        self._thread.start()

    def put(self, item: Any) -> None:
        """Queue ``item``, or drop it. From any thread; never waits."""
        if len(self._queue) >= self._limit:
            self.dropped += 1
        else:
            self._queue.append(item)

    def close(self) -> None:
        """Write what is queued, and close the file. Idempotent."""
        if not self._stop.is_set():
            self._stop.set()
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(_EVERY):
            self._drain()
        self._drain()
        if self.dropped:
            note = {"ph": "M", "name": "dropped", "pid": 0, "args": {"items": self.dropped}}
            self._append([note])
        os.close(self._file)

    def _drain(self) -> None:
        while self._queue:
            items = [self._queue.popleft() for _ in range(min(_TOGETHER, len(self._queue)))]
            try:
                events = [event for item in items for event in self._render(item)]
            except Exception:
                log.warning("the timeline cannot show something", exc_info=True)
                self.dropped += len(items)
                continue
            if not self._append(events):
                self.dropped += len(items)

    def _append(self, events: list[Event]) -> bool:
        whole = True
        data = b""
        for event in events:
            data += b"\n" if self._at == 1 and not data else b",\n"
            data += json.dumps(event, separators=(",", ":")).encode()
            if len(data) > _PAGE:  # a process can be killed between two pages of one write
                whole = self._write(data) and whole
                data = b""
        return (not data or self._write(data)) and whole

    def _write(self, data: bytes) -> bool:
        """Replace the closing bracket by ``data`` and another one; False if that did not work."""
        whole = data + _END
        try:
            if os.pwrite(self._file, whole, self._at) == len(whole):
                self._at += len(data)
                return True
            raise OSError("the disk is full")
        except OSError as error:
            if not self._warned:
                self._warned = True
                log.warning("the timeline %s drops events: %s", self.path, error)
        try:  # take back what was written, so that the file stays valid
            os.ftruncate(self._file, self._at)
            os.pwrite(self._file, _END, self._at)
        except OSError:
            log.debug("could not repair %s", self.path, exc_info=True)
        return False
