"""Whether an engine can be used: it ends by ``shutdown``, by an error, and in a forked child."""

from __future__ import annotations

import os
import threading
import weakref

from ringlet.fusion.errors import EngineClosed, refuse_forked
from ringlet.ring.errors import again


class Lifetime:
    """One engine's. ``direct`` is false once submissions may have to be refused, or noted.

    ``lock`` is held where something must not begin once the engine has ended.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.closing = False
        self.direct = True
        self.error: Exception | None = None
        self._pid = os.getpid()
        _lives.add(self)

    @property
    def forked(self) -> bool:
        """Whether this process is a child of the engine's."""
        return os.getpid() != self._pid

    @property
    def running(self) -> bool:
        """Whether there is a thread to wake."""
        return not self.closing and not self.forked

    def check_open(self) -> None:
        """Raise what ended the engine, or EngineClosed."""
        refuse_forked(self._pid)
        if self.closing:
            raise EngineClosed("submitted after shutdown; call init again")
        if self.error is not None:
            raise again(self.error)

    def note_each(self, on: bool) -> None:
        """Let submissions be noted one by one from now on, or no more."""
        with self.lock:
            self.direct = not (on or self.closing or self.error is not None)

    def close(self) -> bool:
        """Begin to close; False if that has begun before."""
        with self.lock:
            before, self.closing, self.direct = self.closing, True, False
            return not before

    def end(self, error: Exception) -> None:
        """Refuse everything with ``error`` from now on."""
        with self.lock:
            self.error, self.direct = error, False


def _close_in_child() -> None:
    for life in _lives:
        life.direct = False


_lives: weakref.WeakSet[Lifetime] = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_in_child)
