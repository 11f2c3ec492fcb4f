"""Starts the exchanges of buckets and batches in the pipeline, and measures them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial

from ringlet.fusion.peers import Track
from ringlet.fusion.recording.events import Trace
from ringlet.fusion.recording.recorder import Recorder
from ringlet.fusion.recording.watched_communicator import unwatched
from ringlet.ring.communicator import Communicator
from ringlet.ring.pipeline import Pipeline, PipelinedExchange, Steps

WIRE_THREAD = "ringlet-wire-"
SMALL = 1 << 16  # bytes up to which handing a collective to another thread costs more than it gains


class Exchanges:
    """This rank's exchanges, ``depth`` of them under way at once. Used by the engine's thread."""

    def __init__(self, recorder: Recorder, wake: Callable[[], None], rank: int, depth: int) -> None:
        self._recorder = recorder
        self._under_way: Counter[Communicator] = Counter()
        self.pipeline = Pipeline(wake, depth, name=f"{WIRE_THREAD}{rank}-")

    def launch(
        self,
        steps: Steps,
        trace: Trace,
        track: Track,
        nbytes: int,
        done: Callable[[], None],
        counted: bool = True,
    ) -> None:
        """Run ``steps``, which move about ``nbytes`` on ``track``, then call ``done``.

        Exchanges begin in order. Returns before the end if the transport can wait in other threads
        and that pays. What is not ``counted`` is no part of the statistics, which are those of
        reductions.
        """
        recorder, busy = self._recorder, self.pipeline.busy
        enter = partial(recorder.enter, trace) if recorder.observers else None
        timed = partial(recorder.communicated, trace) if counted else _ignore
        comm = unwatched(track.comm)

        def ended() -> None:
            self._under_way[comm] -= 1
            if not self._under_way[comm]:  # which nobody may use any more
                del self._under_way[comm]
            done()

        self._under_way[comm] += 1
        exchange = PipelinedExchange(steps, ended, timed, enter, track.first_lane)
        pays = busy or track.all_far or nbytes > SMALL
        self.pipeline.add(exchange, track.overlaps and pays)

    def severed(self) -> list[int]:
        """Return the ranks to which a connection has ended that exchanges under way need."""
        return sorted({rank for comm in self._under_way for rank in comm.severed()})


def _ignore(start: float, end: float, nbytes: float, lane: int) -> None:
    pass
