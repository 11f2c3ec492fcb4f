"""Whether all ranks change to another list in one step, or one rank does by itself.

Such as the list of gradients that are reduced, or that of parameters that are frozen.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Hashable
from typing import Any

from ringlet.fusion import Group
from ringlet.job.session import Runtime

_CALLS = 1 << 32  # more than there are between two joins
_NONE = object()  # a list that no other is like
_WHY = "another rank reduces another list of gradients in this step"


class ListChanges:
    """The calls of one reducer on this rank, among those of the other ranks.

    Whoever has another list than in the call before says so. Then all ranks compare theirs in that
    call, and a rank that has begun the step of the old list gives it up first. So nobody waits for
    gradients that nobody will hand in, and steps with one list cost nothing.
    """

    def __init__(
        self, runtime: Runtime, label: str, process_set: int, first: Hashable = None
    ) -> None:
        self.call = 0
        self.last: Any = first  # the list of the call before; None: any list may be the first
        self._changes: set[int] = set()  # calls in which some rank has another list
        self._group: Group | None = None  # whose step runs
        self._lock = threading.Lock()
        self._runtime = runtime
        self._extensions = runtime.engine.extensions
        self._action = f"list {process_set} {label}"
        own = weakref.WeakMethod(self._heard)
        self._extensions.on_announced(self._action, lambda call, _: _called(own, call))
        finalizer = weakref.finalize(self, self._extensions.forget_action, self._action)
        finalizer.atexit = False

    def begin(self, slots: Hashable, call: int | None = None) -> None:
        """Begin a call with the list ``slots``, and tell the others if it is another one.

        All ranks number calls alike: ``call``, or one more than the last. Those that joined early
        have called less often: the first call after that is numbered anew, and ranks compare.
        """
        if call is None:
            first = self._runtime.joins * _CALLS
            if self.call < first:
                self._restart(first)
            call = self.call + 1
        with self._lock:
            self.call = call
            changed = self.last is not None and self.last != slots
        if changed:
            self.tell(call)

    def tell(self, call: int) -> None:
        """Tell the others that this rank's list of ``call`` is another one, if nobody has.

        Before what they may end the call without is handed in, or they would not hear in time.
        """
        with self._lock:
            known = call in self._changes
            self._changes.add(call)
        if not known:
            self._extensions.announce_only(self._action, call)

    def enter(self, group: Group) -> bool:
        """Note that the step of ``group`` runs now; False if lists have to be compared before."""
        with self._lock:
            if self.call in self._changes:
                return False
            self._group = group
            return True

    @property
    def changed(self) -> bool:
        """Whether lists have to be compared in this call."""
        with self._lock:
            return self.call in self._changes

    @property
    def first_after_join(self) -> bool:
        """Whether ranks have joined, some of them early, and this is the first call since."""
        joins = self._runtime.joins
        return bool(joins) and self.call == joins * _CALLS + 1

    def end(self, slots: Hashable = None) -> None:
        """End the call; with ``slots`` if all ranks have reduced that list."""
        with self._lock:
            self._group = None
            self._changes = {call for call in self._changes if call > self.call}
            self.last = self.last if slots is None else slots

    def renew(self) -> None:
        """Let the next list count as another one, whichever it is, so that all ranks compare."""
        with self._lock:
            self.last = _NONE if self.call else self.last

    def _restart(self, call: int) -> None:
        with self._lock:
            self.last = _NONE if self.call else self.last
            self.call = call

    def _heard(self, call: int) -> None:
        with self._lock:
            if call < self.call or call in self._changes:  # or another step was let go
                return
            self._changes.add(call)
            if call == self.call and self._group is not None:
                self._group.let_go(_WHY)


class ListTurns(ListChanges):
    """The same where lists take turns: the one that came last after the one before is no change.

    Ranks have the same lists behind them, and so expect the same one. As long as nobody says that
    its own is another one, all have that.
    """

    def __init__(self, runtime: Runtime, label: str, process_set: int) -> None:
        super().__init__(runtime, label, process_set)
        self._before: Hashable = None
        self._followed: dict[Hashable, Hashable] = {}  # by the list before: what came then

    def begin(self, slots: Hashable, call: int | None = None) -> None:
        """Begin a call with the list ``slots``, and tell the others if it is not its turn."""
        self.last = self._followed.get(self._before, self._before)
        super().begin(slots, call)

    def end(self, slots: Hashable = None) -> None:
        """End the call; with ``slots`` if all ranks have reduced that list."""
        super().end(slots)
        if slots is not None:
            self._followed[self._before] = slots
            self._before = slots

    def _restart(self, call: int) -> None:
        super()._restart(call)
        self._before, self._followed = None, {}


def _called(method: weakref.WeakMethod[Any], call: int) -> None:
    found = method()
    if found is not None:
        found(call)
