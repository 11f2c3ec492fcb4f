"""Submissions in flight, and the handles that their callers wait on."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import numpy as np

from ringlet.compressors import Compressor
from ringlet.fusion.devices.host import Mark, collect
from ringlet.fusion.errors import refuse_forked
from ringlet.fusion.requests.request import Request
from ringlet.ring.dtypes import Array

log = logging.getLogger("ringlet")

_NOTHING: Array = np.empty(0, np.float32)

Output = Array | Callable[[int], Array] | None  # where a result goes, or what makes room for it

Result_co = TypeVar("Result_co", covariant=True)


class Waitable(Protocol[Result_co]):
    """An operation under way."""

    def wait(self) -> Result_co:
        """Wait until it is done, and return its result; raises what went wrong."""


def wait_all(handles: Iterable[Waitable[Result_co]]) -> list[Result_co]:
    """Wait for every handle, so that all names are free again; return the results.

    Raises the first error, after that.
    """
    results: list[Result_co] = []
    errors: list[Exception] = []
    for handle in handles:
        try:
            results.append(handle.wait())
        except Exception as error:
            errors.append(error)
    if errors:
        raise errors[0]
    return results


class Signal:
    """Wakes the callers that wait for handles: one for all, for an event each would cost more."""

    def __init__(self, hurry: Callable[[], None]) -> None:
        self._hurry = hurry
        self.lock = threading.Condition()
        self._waiting = 0
        self._pid = os.getpid()

    def wait(self, handle: Handle, timeout: float | None) -> bool:
        """Wait until ``handle`` is done; return whether it is. EngineClosed in a forked child."""
        refuse_forked(self._pid)
        self._hurry()
        deadline = None if timeout is None else time.monotonic() + timeout
        with self.lock:
            self._waiting += 1
            try:
                while not handle.done():
                    left = None if deadline is None else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        return False
                    self.lock.wait(left)
            finally:
                self._waiting -= 1
        return True

    def notify(self) -> None:
        """Let waiting callers look again."""
        # Whoever begins to wait now says so first and then looks whether its handle is done.
        if self._waiting:
            with self.lock:
                self.lock.notify_all()


class Handle:
    """The outcome of an operation that is under way."""

    __slots__ = ("_callbacks", "_done", "_error", "_signal", "mark", "name", "output", "sizes")

    def __init__(self, name: str, signal: Signal) -> None:
        self.name = name
        self.output: Any = _NOTHING
        self.sizes: tuple[int, ...] = ()
        self._signal = signal
        self._done = False
        self.mark: Mark | None = None  # where the operation's work was enqueued, its end
        self._error: Exception | None = None
        self._callbacks: list[Callable[[], None]] | tuple[()] = ()

    def done(self) -> bool:
        """Whether the operation has finished, well or badly."""
        return self._done

    def wait(self, timeout: float | None = None) -> Any:
        """Wait for the operation and return its output: a flat array, or what was declared.

        A tensor on a GPU may be still in the making then; the framework's current stream waits.
        Raises what went wrong, the same on every rank, or TimeoutError after ``timeout`` seconds.
        """
        if not self._done and not self._signal.wait(self, timeout):
            raise TimeoutError(f"{self.name!r} has not finished within {timeout} s")
        if self.mark is not None or self._error is not None:
            collect([] if self.mark is None else [self.mark], self._error)
        return self.output

    def then(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` once the operation is done: now, or on the engine's thread.

        What it raises is logged.
        """
        self._callbacks = [callback]
        if self._done:
            self.tell()

    @property
    def awaited(self) -> bool:
        """Whether ``then`` was called."""
        return bool(self._callbacks)

    def finish(self, error: Exception | None = None) -> None:
        """Let the waiting caller go on, or raise."""
        self._error = error
        self._done = True
        self._signal.notify()
        if self._callbacks:
            self.tell()

    def tell(self) -> None:
        """Make the call that ``then`` asked for; once, whichever thread gets here first."""
        callbacks = self._callbacks
        try:
            callback = callbacks.pop() if isinstance(callbacks, list) else None
        except IndexError:
            return
        if callback is not None:
            try:
                callback()
            except BaseException:  # others wait for this thread, who have no part in it
                log.exception("what was to be called after %r failed", self.name)


class Expected(Handle):
    """The answer to a call that all ranks make; ``detail`` is what its handler needs.

    It is ``abandoned`` where a signal has interrupted the call: nobody waits for it any more.
    """

    __slots__ = ("abandoned", "detail")

    def __init__(self, name: str, signal: Signal) -> None:
        super().__init__(name, signal)
        self.abandoned = False
        self.detail: Any = None


class Work(Handle):
    """One submission: what was asked for, the flat arrays, and who waits for it."""

    __slots__ = ("asked", "compressor", "input", "ready", "request")

    def __init__(
        self,
        request: Request,
        signal: Signal,
        values: Array,
        output: Output,
        compressor: Compressor,
    ) -> None:
        # All of ``Handle``'s too: a call more is a tenth of what a submission takes.
        self.name = request.name
        self.request = request
        self.input = values
        self.output = output
        self.sizes = ()
        self.mark = None
        self._signal = signal
        self._done = False
        self._error = None
        self._callbacks = ()
        self.compressor = compressor
        self.ready: Any = None  # of an ordered place: when the input is
        self.asked = False  # whether other ranks have been told

    def let_go(self, mark: Mark) -> None:
        """Note the end of the work, which keeps the input for as long as it is needed."""
        self.mark, self.input, self.ready = mark, _NOTHING, None

    def complete(self) -> None:
        """Note that the operation is done; the caller learns of it by ``tell`` and a signal."""
        self._done = True
