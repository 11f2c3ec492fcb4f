"""What the ranks print, whole line by whole line, with the rank in front."""

from __future__ import annotations

import os
import re
import select
import stat
from collections import deque
from typing import BinaryIO

from ringlet.ring.errors import LaunchError
from ringlet.ring.processes.output_files import open_files

STDOUT, STDERR = 1, 2
HIGH = 1 << 20  # bytes waiting to be printed from which on no more should be fed
LAST = 10  # lines of each rank that are remembered
LONGEST = 64 << 20  # a longer line is broken, so that memory stays bounded

PLACES = {STDOUT: "the standard output", STDERR: "the standard error"}
_NAMES = {STDOUT: b"stdout", STDERR: b"stderr"}
_LINE = re.compile(rb"[^\r\n]*(?:\r\n|\r|\n)")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


class Losses:
    """Output that could not be written, because a disk is full, say, by place.

    It is dropped, and the job goes on without it.
    """

    def __init__(self) -> None:
        self._dropped: dict[str, int] = {}

    def add(self, place: str, nbytes: int, error: OSError) -> str:
        """Count bytes that ``place`` did not take; return what to say of it, once for a place."""
        known = place in self._dropped
        self._dropped[place] = self._dropped.get(place, 0) + nbytes
        why = error.strerror or str(error)
        return "" if known else f"{place}: {why}; what cannot be written there is dropped"

    def summary(self) -> str:
        """Return how much was dropped; empty if nothing was."""
        listed = ", ".join(
            f"{nbytes or 'some'} bytes for {place}" for place, nbytes in self._dropped.items()
        )
        return listed and f"output was dropped: {listed}"


class Printer:
    """Gathers lines of many ranks and writes them to descriptors 1 and 2 without blocking.

    Lines leave in the order in which they became whole, and a line is finished before the next
    begins, also when both descriptors are one pipe. A carriage return ends a line as well, as
    progress bars need. Bytes are passed through as they are. If there is a ``directory``, what a
    rank writes goes to ``rank.N/stdout`` and ``rank.N/stderr`` in it too, as it is; if ranks
    ``come`` and go, from ``join`` to ``leave``. What cannot be written is dropped, and counted in
    ``losses``. Lines of the launcher's own begin with its ``title``.
    """

    def __init__(
        self,
        size: int,
        prefix: bool = True,
        directory: str | None = None,
        come: bool = False,
        title: str = "ringlet run",
    ) -> None:
        self.size, self._title = size, title.encode()
        self.directory = directory
        first, width = ((), 1) if come else (range(size), len(str(size - 1)))
        self._files = {} if directory is None else open_files(directory, first, width)
        self.losses = Losses()
        self.prefix = prefix
        self.pending = 0
        self._muted = False
        self._partial: dict[tuple[int, int], bytearray] = {}
        self._queue: deque[tuple[int, memoryview]] = deque()
        self._last: dict[int, deque[bytes]] = {}
        self._speaker: int | None = None  # the rank whose line was whole last

    def join(self, rank: int) -> None:
        """Write what a rank that has come prints to files, too, if there is a directory."""
        if self.directory is not None:
            try:
                self._files |= open_files(self.directory, [rank])
            except LaunchError as error:
                self.note(f"{error}; what rank {rank} prints is not kept")

    def leave(self, rank: int) -> None:
        """Close the files of a rank that prints no more."""
        for stream in _NAMES:
            if file := self._files.pop((rank, stream), None):
                self._close(file)

    def feed(self, rank: int, stream: int, data: bytes) -> None:
        """Take bytes that ``rank`` wrote to ``stream`` (1 or 2); queue the lines now whole."""
        if file := self._files.get((rank, stream)):
            self._keep(file, data)
        if self._muted:
            return
        partial = self._partial.setdefault((rank, stream), bytearray())
        if partial.endswith(b"\r"):  # kept back: it may have been half of a \r\n
            data = b"\r" + data
            del partial[-1:]
        cut = 1 + max(data.rfind(b"\n"), data.rfind(b"\r", 0, len(data) - 1))
        if cut:
            self._put(rank, stream, bytes(partial) + data[:cut])
            partial.clear()
        partial += data[cut:]
        if len(partial) > LONGEST:
            self.finish(rank, stream)

    def finish(self, rank: int, stream: int) -> None:
        """Queue what ``rank`` wrote to ``stream`` last without ending the line."""
        if partial := self._partial.pop((rank, stream), None):
            alone = self.size == 1 and not self.prefix  # then the bytes are the user's, untouched
            self._put(rank, stream, bytes(partial) + (b"" if alone else b"\n"))

    def note(self, text: str) -> None:
        """Queue a line of the launcher's own on the standard error.

        What others have sent may be part of it: control characters are shown, not obeyed.
        """
        self._say(_CONTROL.sub(lambda found: ascii(found[0])[1:-1], text))

    def _say(self, text: str) -> None:
        try:
            data = text.encode(errors="surrogateescape")
        except UnicodeEncodeError:
            data = text.encode(errors="backslashreplace")
        self._queue_bytes(STDERR, b"%b: %b\n" % (self._title, data))

    def remind(
        self, rank: int, name: str, remedy: str | None = None, did: str = "failed first"
    ) -> bool:
        """Say again what ``rank``, called ``name``, printed last if others have printed since.

        And what it ``did``, and the ``remedy`` if it lacked a module. Returns whether anything was
        said.
        """
        last = [line.decode(errors="replace") for line in self._last.get(rank, ())]
        lines = [] if self._speaker == rank else last
        if lines:
            self.note(f"{name} {did}; its last lines were:")
        for line in lines:
            self._say(f"| {line}")  # as it was printed
        if remedy is None or not any("ModuleNotFoundError" in line for line in last):
            return bool(lines)
        self.note(remedy)
        return True

    def _put(self, rank: int, stream: int, lines: bytes) -> None:
        self._speaker = rank
        kept = self._last.setdefault(rank, deque(maxlen=LAST))
        kept.extend(line[:400] for line in lines[-4096:].splitlines()[-LAST:])
        if self.prefix:
            mark = b"[%d]<%s>: " % (rank, _NAMES[stream])
            if b"\r" in lines:
                lines = b"".join(mark + line for line in _LINE.findall(lines))
            else:
                lines = mark + lines[:-1].replace(b"\n", b"\n" + mark) + b"\n"
        self._queue_bytes(stream, lines)

    def _queue_bytes(self, stream: int, data: bytes) -> None:
        self._queue.append((stream, memoryview(data)))
        self.pending += len(data)

    @property
    def wants(self) -> int | None:
        """The descriptor that has to become writable, or None when nothing waits."""
        return self._queue[0][0] if self._queue else None

    def write(self) -> None:
        """Write what can be written now. Raises BrokenPipeError when nobody reads any more."""
        while (stream := self.wants) is not None:
            _, data = self._queue[0]
            poll = select.poll()
            poll.register(stream, select.POLLOUT)
            if not poll.poll(0):
                return
            # A pipe that polls writable takes this much without blocking; a file takes all.
            regular = stat.S_ISREG(os.fstat(stream).st_mode)
            try:
                written = os.write(stream, data if regular else data[: select.PIPE_BUF])
            except (BlockingIOError, BrokenPipeError) as error:
                if isinstance(error, BrokenPipeError):
                    raise
                return
            except OSError as error:
                self._lost(PLACES[stream], len(data), error)
                written = len(data)
            self.pending -= written
            if written < len(data):
                self._queue[0] = (stream, data[written:])
            else:
                self._queue.popleft()

    def _keep(self, file: BinaryIO, data: bytes) -> None:
        rest = memoryview(data)
        try:
            while rest:
                rest = rest[file.write(rest) :]
        except OSError as error:
            self._lost(f"--output-filename {self.directory}", len(rest), error)

    def _lost(self, place: str, nbytes: int, error: OSError) -> None:
        if said := self.losses.add(place, nbytes, error):
            self.note(said)

    def mute(self) -> None:
        """Print nothing of the ranks any more, not even what waits; notes still pass."""
        self._muted = True
        self._queue.clear()
        self._partial.clear()
        self.pending = 0

    def close(self) -> None:
        """Close the files. Idempotent."""
        for file in self._files.values():
            self._close(file)

    def _close(self, file: BinaryIO) -> None:
        try:
            file.close()
        except OSError as error:  # a file system elsewhere says only now that it is full
            self._lost(f"--output-filename {self.directory}", 0, error)
