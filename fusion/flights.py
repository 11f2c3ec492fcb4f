"""Puts exchanges into the engine's pipeline, and measures them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ringlet.fusion.meter import Meter, Trace
from ringlet.fusion.peers import Peers
from ringlet.ring.pipeline import Flight, Pipeline, Steps

WIRE_THREAD = "ringlet-wire-"
SMALL = 1 << 16  # bytes up to which handing a collective to another thread costs more than it gains


class Flights:
    """This rank's exchanges, ``depth`` of them under way at once. Used by the engine's thread."""

    def __init__(self, meter: Meter, wake: Callable[[], None], rank: int, depth: int) -> None:
        self._meter = meter
        self.pipeline = Pipeline(wake, depth, name=f"{WIRE_THREAD}{rank}-")

    def launch(
        self,
        steps: Steps,
        trace: Trace,
        peers: Peers,
        nbytes: int,
        done: Callable[[], None],
        counted: bool = True,
    ) -> None:
        """Run ``steps``, which move about ``nbytes``, after all before; then call ``done``.

        Returns before the end if the transport can wait in other threads and that pays. What is
        not ``counted`` is no part of the statistics, which are those of reductions.
        """
        meter, busy = self._meter, self.pipeline.busy
        enter = partial(meter.enter, trace) if meter.observers else None
        timed = partial(meter.communicated, trace) if counted else _ignore
        flight = Flight(steps, done, timed, enter)
        self.pipeline.add(flight, peers.overlaps and (busy or nbytes > SMALL))


def _ignore(start: float, end: float, nbytes: float, lane: int) -> None:
    pass
