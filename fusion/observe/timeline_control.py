"""Starting and stopping timelines on all ranks, whichever of them asks."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ringlet.fusion.observe.timeline import Timeline, usable
from ringlet.ring.errors import RingError, again

if TYPE_CHECKING:
    from ringlet.fusion.extensions import Extensions

log = logging.getLogger("ringlet")

_AT_SHUTDOWN_S = 30.0  # how long leaving may take for the sake of a timeline


class Timelines:
    """One rank's end; at most one timeline is written at a time.

    Timelines are numbered, so that calls of several ranks for the same one count once.
    """

    def __init__(self, extensions: Extensions) -> None:
        self._extensions = extensions
        self._number = 0  # of timelines that were started
        self._asked = 0  # the number of the one that this rank has started or joined
        self._current: Timeline | None = None
        self._ended = threading.Event()  # whether the last one was merged
        self._ended.set()
        extensions.on_announced("timeline.start", self._start)
        extensions.on_announced("timeline.stop", self._stop)
        extensions.before_shutdown(self._last_call)
        extensions.when_over(self._leave_behind)

    @property
    def path(self) -> Path | None:
        """Where the timeline under way will be, as far as this rank knows, or None."""
        current = self._current
        return None if current is None else current.wanted or current.path

    def start(self, path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
        """Write what all ranks do from now on to ``path``, on rank 0's machine.

        Any rank may call this, or all of them: rank 0's path counts then, as only its file is
        there in the end. Returns once this rank records. Raises OSError when the file cannot be
        written, and ValueError while this rank has another timeline.
        """
        where = usable(path)
        current = self._current
        if current is not None:
            self._join(current, where)
            return
        key = ("timeline", self._number + 1)
        argument = [self._number + 1, str(where), mark_cycles]
        self._extensions.announce(key, "timeline.start", argument).wait()
        current = self._current
        if current is not None:
            self._join(current, where)
            if current.problem is not None:
                raise again(current.problem)

    def _join(self, current: Timeline, where: Path) -> None:
        """Take part in one that this rank, or another, has begun."""
        if current.wanted is not None and current.wanted != where:
            raise ValueError(
                f"a timeline is being written to {current.wanted}; stop it before another"
            )
        current.wanted = where
        self._asked = self._number

    def stop(self, timeout: float | None = None) -> None:
        """End the timeline and merge it: on return, rank 0 finds it at its path. Any rank may.

        It is the one that this rank has started, if it has. Does nothing when none is being
        written. Raises OSError when rank 0 cannot write it, and TimeoutError after ``timeout``
        seconds.
        """
        number, self._asked = self._asked or self._number, 0
        if self._current is None or number < self._number:
            if not self._ended.wait(timeout):  # another rank was quicker, and may have begun anew
                raise TimeoutError(f"the timeline is not merged after {timeout} s")
            return
        self._extensions.announce(("timeline", -number), "timeline.stop", number).wait(timeout)

    @contextlib.contextmanager
    def stretch(self, name: str) -> Iterator[None]:
        """Show the time of a with-block of the program, such as "backward", in the timeline."""
        current = self._current
        if current is None:
            yield
            return
        start = time.perf_counter()
        try:
            yield
        finally:
            current.stretch(name, start, time.perf_counter())

    # -- on the engine's thread -----------------------------------------------------------------

    def _start(self, argument: Any, all_here: bool) -> None:
        number, path, mark_cycles = argument
        if number == self._number + 1 and self._current is None:
            self._number = number
            self._current = Timeline(self._extensions.comm, Path(path), mark_cycles, all_here)
            self._extensions.observe(self._current)
        self._extensions.answer(("timeline", number))

    def _stop(self, number: Any, all_here: bool) -> None:
        current = self._current
        if number != self._number or current is None:
            return  # another rank was quicker
        self._ended.clear()
        self._current = None
        self._extensions.unobserve(current)

        def done(error: Exception | None) -> None:
            self._ended.set()
            self._extensions.answer(("timeline", -number), error)

        current.finish(all_here, done)

    # -- the end --------------------------------------------------------------------------------

    def _last_call(self) -> None:
        """Merge while the other ranks are still there: the timeline ends with the first to go."""
        path = self.path
        try:
            self.stop(_AT_SHUTDOWN_S)
        except TimeoutError:
            log.warning(
                "the timeline%s is not merged after %g s, and is not waited for any longer; should "
                "the process end before it is, the ranks' parts stay beside it, and `ringlet "
                "timeline t.json PART ...` merges them",
                "" if path is None else f" {path}", _AT_SHUTDOWN_S,
            )  # fmt: skip
        except (RingError, OSError) as error:
            log.debug("the timeline at shutdown: %s", error)

    def _leave_behind(self) -> None:
        current, self._current = self._current, None
        if current is not None:
            current.close()
            log.warning(
                "the timeline was not merged; the ranks' parts stay beside %s, and "
                "`ringlet timeline %s` merges them",
                current.path, current.path,
            )  # fmt: skip
