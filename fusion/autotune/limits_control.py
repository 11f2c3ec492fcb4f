"""Changing limits on all ranks at one point of the coordinator's order, and the autotuner's end."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ringlet.fusion.limits import Limits

if TYPE_CHECKING:
    from ringlet.fusion.autotune.tuner import Autotuner
    from ringlet.fusion.extensions import Extensions
    from ringlet.fusion.worker import Worker


class LimitsControl:
    """One rank's end. ``changed`` is told of limits that are in effect from now on.

    Declared groups plan anew at a step that no rank has begun, tensors submitted one by one from
    the next batch on, and groups declared later from the start: always alike on all ranks.
    Streams and the cache change at once, whatever others have: they decide when, or by which name,
    not what.
    """

    def __init__(
        self, extensions: Extensions, worker: Worker, changed: Callable[[dict[str, Any]], None]
    ) -> None:
        self._extensions, self._worker, self._changed = extensions, worker, changed
        self.tuner: Autotuner | None = None
        extensions.on_announced("limits", self._change)

    def start(self, limits: Limits) -> None:
        """Tune from now on, on rank 0. Raises ImportError when the search is not installed."""
        from ringlet.fusion.autotune.tuner import Autotuner

        tuner = Autotuner(limits, self.announce, self._finished)
        self.tuner = tuner
        self._extensions.observe(tuner)
        self._extensions.when_over(tuner.close)

    def announce(self, setting: dict[str, Any]) -> None:
        """Let all ranks use ``setting``, by the names of ``Limits``. On rank 0, any thread."""
        self._extensions.call_soon(lambda: self._announce(setting))

    def _announce(self, setting: dict[str, Any]) -> None:
        self._extensions.announce_only("limits", setting)

    def _change(self, argument: Any, all_here: bool) -> None:
        setting = argument
        if not all_here:
            return  # ranks are leaving: nothing to gain any more
        self._changed(setting)
        self._worker.retune(setting)
        if self.tuner is not None and not self.tuner.frozen:
            self.tuner.restart()

    def _finished(self) -> None:
        if self.tuner is not None:
            self._extensions.unobserve(self.tuner)
