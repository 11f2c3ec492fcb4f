"""Whether an engine can be used: it ends by ``shutdown``, by an error, and in a forked child."""

from __future__ import annotations

import os
import sys
import threading
import weakref

from ringlet.fusion.errors import EngineClosed, in_words, refuse_forked
from ringlet.ring.errors import PeerLost, again
from ringlet.ring.rendezvous.exit_hooks import ended_by

_LINE = 300  # characters of the exception that ends a rank, which other ranks are told


class Lifetime:
    """One engine's. ``direct`` is false once submissions may have to be refused, or noted.

    ``lock`` is held where something must not begin once the engine has ended.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.closing = False
        self.why = ""  # the exception because of which it closes, for other ranks
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

    def close(self) -> None:
        """Begin to close, and note which exception the caller ends by, or handles."""
        why = _why_it_ends()
        with self.lock:
            self.why = self.why or why
            self.closing, self.direct = True, False

    def end(self, error: Exception) -> None:
        """Refuse everything with ``error`` from now on."""
        with self.lock:
            self.error, self.direct = error, False


def _why_it_ends() -> str:
    """Return in a line the exception that ends this process, or that this thread handles.

    "" where there is none, or where it is only what another rank has caused.
    """
    error, handled = ended_by(), sys.exc_info()[1]
    if error is None and _counts(handled):
        error = handled
    if error is None or isinstance(error, PeerLost):
        return ""
    return ("while handling " * (error is handled) + " ".join(in_words(error).split()))[:_LINE]


def _counts(handled: BaseException | None) -> bool:
    """Whether a shutdown in a ``finally`` or ``except`` may be because of ``handled``."""
    if isinstance(handled, SystemExit):
        return handled.code not in (None, 0)
    return isinstance(handled, (Exception, KeyboardInterrupt))


def _close_in_child() -> None:
    for life in _lives:
        life.direct = False


_lives: weakref.WeakSet[Lifetime] = weakref.WeakSet()
os.register_at_fork(after_in_child=_close_in_child)
