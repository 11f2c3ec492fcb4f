"""Switching metrics on and off on one rank."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ringlet.fusion.observe.metrics import Metrics, Record
from ringlet.fusion.observe.probe import Network, measure
from ringlet.fusion.observe.sinks import Dispatcher, Sink

if TYPE_CHECKING:
    from ringlet.fusion.extensions import Extensions


class MetricsControl:
    """One rank's end; metrics may be on for any ranks. Each ``start`` makes a recording.

    ``network`` is None until somebody has measured it.
    """

    def __init__(self, extensions: Extensions, network: Network | None = None) -> None:
        self._extensions, self._network = extensions, network
        self._recordings: list[Recording] = []
        extensions.on_announced("network.measure", self._measure)
        extensions.before_shutdown(self._stop_all)
        extensions.when_over(self._stop_all)

    def start(
        self,
        sinks: Sequence[Sink],
        sample_every: int = 0,
        facts: Record | None = None,
        network: bool = True,
    ) -> Recording:
        """Give records to ``sinks`` from now on; see ``Metrics`` for what is in them.

        ``sample_every`` steps the relative error of every layer is measured, at the price of
        compressing it twice; 0 stands for never. ``facts`` describe the run. With ``network`` it
        is measured first, once, by all ranks, within a second or so.
        """
        if network and self._network is None:
            self._extensions.announce("network", "network.measure", None).wait()
        recording = Recording(self._extensions, sinks, sample_every, self._network, facts or {})
        self._recordings.append(recording)
        return recording

    def _measure(self, _: Any, all_here: bool) -> None:
        if self._network is None and all_here:  # on all ranks or on none
            self._network = measure(self._extensions.comm)
        self._extensions.answer("network")

    def _stop_all(self) -> None:
        while self._recordings:
            self._recordings.pop().stop()


class Recording:
    """Metrics that are being recorded."""

    def __init__(
        self,
        extensions: Extensions,
        sinks: Sequence[Sink],
        sample_every: int,
        network: Network | None,
        facts: Record,
    ) -> None:
        self._extensions = extensions
        self._dispatcher = Dispatcher(sinks)
        self._metrics = Metrics(self._dispatcher.put, sample_every, network)
        comm = extensions.comm
        about = {"rank": comm.rank, "size": comm.size, "transport": comm.base.name}
        self._metrics.describe(about | facts)
        extensions.observe(self._metrics)
        self._on, self._stopping = True, threading.Lock()

    def stop(self) -> None:
        """Record no more; return once the sinks have everything. Idempotent."""
        with self._stopping:  # the engine may be at it: other ranks have left
            if not self._on:
                return
            self._on = False
            self._extensions.unobserve(self._metrics)
            self._extensions.settle()
            self._metrics.flush()
            self._dispatcher.close()
