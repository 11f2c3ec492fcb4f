"""The timeline of all ranks, started and stopped at run time, at one point of everybody's order.

Every rank writes a file of its own, and leaves valid JSON behind if it is killed. At the end the
files of ranks that rank 0 cannot see travel to it, and it merges all of them by its own clock.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from ringlet.fusion.observe.clocks import estimate
from ringlet.fusion.observe.merge import BEGINNINGS, merge, rank_file
from ringlet.fusion.observe.render import Clock, Instant, Renderer, Single, Stretch
from ringlet.fusion.observe.tracefile import TraceFile
from ringlet.fusion.recording.events import BucketDone, Quiet, Span, StepDone
from ringlet.ring.communicator import Communicator
from ringlet.ring.safe_files import create, open_own, refuse_devices, refuse_others

log = logging.getLogger("ringlet")

_PIECE = 1 << 20  # bytes of a file that a rank sends at once
_ASIDE = ".merging"  # behind the name of a part that is being merged


class _Part(NamedTuple):
    """A rank's file where rank 0 merges it: others may give its name to something else."""

    path: Path
    file: BinaryIO


class Timeline(Quiet):
    """One rank's part of a timeline, and at the end its share of merging. An observer."""

    def __init__(self, comm: Communicator, path: Path, mark_cycles: bool, all_here: bool) -> None:
        """Open this rank's file; collective, unless ranks have left (``all_here`` is false)."""
        self.path = path  # the ranks' parts are beside it
        self.wanted: Path | None = None  # where this rank asked for it; rank 0's place counts
        self._comm, self._marks = comm, mark_cycles
        self._own = rank_file(path, comm.rank)
        self._made: Path | None = None  # a folder for it alone
        self._file: TraceFile | None = None
        self.problem: OSError | None = None
        try:
            if not path.parent.is_dir():  # another machine, with another disk
                self._made = Path(tempfile.mkdtemp(prefix="ringlet-"))
                self._own = self._made / self._own.name
            self._file = TraceFile(self._own, Renderer(comm.rank, socket.gethostname()))
        except OSError as error:
            self.problem = error
            log.warning("this rank's part of the timeline cannot be written: %s", error)
        if all_here:
            self._measure_clock()

    # -- what the engine tells ------------------------------------------------------------------

    def bucket_done(self, event: BucketDone) -> None:
        """Draw a bucket."""
        self._put(event)

    def step_done(self, event: StepDone) -> None:
        """Draw a step."""
        self._put(event)

    def single_done(self, kind: str, name: str, submitted: float, spans: Sequence[Span]) -> None:
        """Draw an operation that is not fused."""
        self._put(Single(kind, name, submitted, spans))

    def abandoned(self, owner: str, step: int, why: str) -> None:
        """Mark a step that failed."""
        detail = {"group": owner, "step": step, "why": why}
        self._put(Instant("step abandoned", time.perf_counter(), detail))

    def cycle(self, at: float, tensors: int) -> None:
        """Mark a cycle, if that was asked for."""
        if self._marks:
            self._put(Instant("CYCLE_START", at, {"tensors": tensors}))

    def stretch(self, name: str, start: float, end: float) -> None:
        """Draw a stretch of the program's own time. From any thread."""
        self._put(Stretch(name, start, end))

    # -- the end --------------------------------------------------------------------------------

    def close(self) -> None:
        """Write what is left of this rank's part."""
        if self._file is not None:
            self._file.close()

    def finish(self, all_here: bool, done: Callable[[Exception | None], None]) -> None:
        """Close this rank's part, and merge all on rank 0. Collective if ``all_here``.

        ``done`` is called on this thread, or on rank 0 by another one once the file is there.
        """
        if all_here:
            self._measure_clock()
        self.close()
        if all_here:
            _collect(self._comm, self.path, self._own, self._content)
            if self._made is not None and not self._own.exists():
                _quietly(self._made.rmdir)
        parts = self._opened(all_here) if self._comm.rank == 0 else []
        if all_here:
            self._comm.barrier()  # whoever goes on may begin another timeline of this name
        if self._comm.rank != 0:
            done(None)
            return

        def work() -> None:
            try:
                merge(self.wanted or self.path, [part.file for part in parts])
                for part in parts:
                    part.path.unlink()
            except Exception as error:
                for path, _ in parts:  # where `ringlet timeline` finds them
                    if path.name.endswith(_ASIDE) and path.exists():
                        _quietly(partial(path.rename, path.with_name(path.name[: -len(_ASIDE)])))
                log.warning("the timeline could not be merged: %s", error)
                done(error)
            else:
                done(None)
            finally:
                for part in parts:
                    part.file.close()

        threading.Thread(target=work, name="ringlet-merge").start()

    def _opened(self, all_here: bool) -> list[_Part]:
        """Return the ranks' parts that rank 0 finds, under names that no rank writes to."""
        found = []
        for rank in range(self._comm.size):
            path = rank_file(self.path, rank)
            try:
                file = self._open(path)
            except OSError as error:
                if all_here or not isinstance(error, FileNotFoundError):
                    log.warning("rank %d's part of the timeline is left out: %s", rank, error)
                continue
            found.append(_Part(_set_aside(path), file))
        return found

    def _content(self) -> bytes:
        """Return what is in this rank's part, if it has one."""
        if self._file is None:
            return b""
        try:
            with self._open(self._own) as file:
                return file.read()
        except OSError as error:
            log.warning("this rank's part of the timeline is left out: %s", error)
            return b""

    def _open(self, path: Path) -> BinaryIO:
        """Open a part to be read. Raises OSError where another user may have put it there."""
        owners = {os.geteuid()} if self._file is None else {os.geteuid(), self._file.owner}
        return os.fdopen(open_own(path, owners), "rb")

    def _measure_clock(self) -> None:
        offset = estimate(self._comm)
        self._put(Clock(time.perf_counter(), *offset, time.time()))

    def _put(self, item: Any) -> None:
        if self._file is not None:
            self._file.put(item)


def _collect(comm: Communicator, path: Path, own: Path, content: Callable[[], bytes]) -> None:
    """Let every rank's file be where rank 0 can open it; those it cannot see are sent to it."""
    token = path.with_name(f"{path.name}.{secrets.token_hex(8)}.here")
    token = Path(os.fsdecode(comm.broadcast_bytes(os.fsencode(token))))  # maybe no UTF-8
    if comm.rank == 0:
        _quietly(token.touch)
    comm.barrier()
    data = b"" if token.exists() and own.parent == token.parent else content()
    said = [json.loads(text) for text in comm.allgather_bytes(json.dumps(len(data)).encode())]
    if comm.rank == 0:
        _quietly(token.unlink)
    received = [bytearray() for _ in range(comm.size)]
    for start in range(0, max(said), _PIECE):
        lengths = [max(0, min(n - start, _PIECE)) for n in said]
        piece = np.frombuffer(data[start : start + _PIECE], np.uint8).copy()
        counts = [piece.size, *([0] * (comm.size - 1))]
        incoming = lengths if comm.rank == 0 else [0] * comm.size
        into = np.empty(sum(incoming), np.uint8)
        comm.alltoall(piece, into, counts, incoming)
        end = 0
        for rank, n in enumerate(incoming):
            received[rank] += into[end : end + n].tobytes()
            end += n
    for rank, whole in enumerate(received):
        if whole:
            _quietly(partial(_write, rank_file(path, rank), whole))
    if data and comm.rank != 0:
        _quietly(own.unlink)


def _set_aside(part: Path) -> Path:
    """Return a part under a name that no rank writes to."""
    aside = part.with_name(part.name + _ASIDE)
    try:
        return part.rename(aside)
    except OSError:
        log.debug("a part of the timeline", exc_info=True)
        return part


def _write(path: Path, content: bytes | bytearray) -> None:
    with os.fdopen(create(path), "wb") as file:
        file.write(content)


def _quietly(call: Callable[[], object]) -> None:
    try:
        call()
    except OSError:
        log.debug("a file of the timeline", exc_info=True)


def usable(path: str | os.PathLike[str]) -> Path:
    """Return ``path`` made absolute. Raises ValueError or OSError where no file can be written.

    So where there is one that holds something else than a timeline.
    """
    if not os.fspath(path):
        raise ValueError("a timeline needs the name of a file")
    where = Path(path).absolute()
    if where.is_dir():
        raise IsADirectoryError(f"the timeline {where} is a directory; name a file in it")
    if not where.parent.is_dir():
        raise FileNotFoundError(f"the timeline's directory {where.parent} does not exist")
    if not os.access(where.parent, os.W_OK):
        raise PermissionError(f"the timeline's directory {where.parent} cannot be written to")
    refuse_devices(where)
    refuse_others(where, *BEGINNINGS)
    return where
