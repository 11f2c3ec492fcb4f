"""What a worker measures: counters always, and spans of time when somebody observes."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Mapping

from ringlet.fusion.recording.events import (
    PHASES,
    BucketDone,
    ObservedBucket,
    Observer,
    Span,
    StepDone,
    Trace,
)
from ringlet.fusion.recording.stats import Stats

log = logging.getLogger("ringlet")


class Recorder:
    """Used by the engine's thread, but for ``note`` and ``enter``.

    While ``observers`` is empty, no spans are kept.
    """

    def __init__(self) -> None:
        self.stats = Stats()
        self.observers: tuple[Observer, ...] = ()
        self.submitted: dict[Hashable, float] = {}  # single submissions, by request key
        self._at_hand = threading.local()

    # -- what buckets measure -------------------------------------------------------------------

    def compressed(self, trace: Trace, start: float, end: float) -> None:
        """Count time spent compressing, or copying into a fusion buffer."""
        self.stats.compress_s += end - start
        trace.compress_s += end - start
        if self.observers:
            trace.spans.append(Span("compress", start, end))

    def communicated(
        self, trace: Trace, start: float, end: float, sent: float, lane: int = 0
    ) -> None:
        """Count a collective that sent ``sent`` bytes."""
        self.stats.wire_bytes += sent
        self.stats.communicate_s += end - start
        trace.wire_bytes += sent
        trace.communicate_s += end - start
        if self.observers:
            trace.spans.append(Span("communicate", start, end, round(sent), lane))

    def decompressed(self, trace: Trace, start: float, step: str = "") -> None:
        """Count the time since ``start``, spent decompressing or copying out.

        ``step`` names what it was, where that is not all of it.
        """
        end = time.perf_counter()
        self.stats.decompress_s += end - start
        trace.decompress_s += end - start
        if self.observers:
            trace.spans.append(Span("decompress", start, end))
            if step:
                trace.spans.append(Span(step, start, end))

    def enter(self, trace: Trace, lane: int = 0) -> None:
        """Let what this thread notes belong to ``trace`` from now on."""
        self._at_hand.trace, self._at_hand.lane = trace, lane

    def note(self, span: Span) -> None:
        """Keep a span that no counter needs, such as one collective's."""
        trace: Trace | None = getattr(self._at_hand, "trace", None)
        if self.observers and trace is not None:
            trace.spans.append(span._replace(lane=self._at_hand.lane))

    # -- what happens to buckets, while somebody observes ---------------------------------------

    def encoding(self, owner: str, step: int, bucket: ObservedBucket) -> None:
        """Tell of a bucket that is complete, unless it is at its next round."""
        if not bucket.more:
            self._tell(lambda observer: observer.encoding(owner, step, bucket))

    def exchanged(
        self,
        owner: str,
        step: int,
        index: int,
        bucket: ObservedBucket,
        submitted: Mapping[str, float],
    ) -> None:
        """Tell of a bucket, if it is done."""
        if bucket.done:
            trace = bucket.trace
            spans = sorted(trace.spans, key=lambda span: span.start)
            costs = trace.compress_s, trace.communicate_s, trace.decompress_s
            seconds = dict(zip(PHASES, costs, strict=True))
            event = BucketDone(
                owner,
                step,
                index,
                bucket,
                submitted,
                spans,
                seconds,
                bucket.raw_bytes,
                trace.wire_bytes,
            )
            self._tell(lambda observer: observer.bucket_done(event))

    def step_done(self, owner: str, step: int, start: float) -> None:
        """Tell of a step that is done."""
        event = StepDone(owner, step, start, time.perf_counter())
        self._tell(lambda observer: observer.step_done(event))

    def single_done(self, kind: str, key: Hashable, name: str, trace: Trace) -> None:
        """Tell of an operation that is not fused."""
        spans = trace.spans
        at = self.submitted.pop(key, spans[0].start if spans else time.perf_counter())
        self._tell(lambda observer: observer.single_done(kind, name, at, spans))

    def abandoned(self, owner: str, step: int, why: str) -> None:
        """Count a step that failed on all ranks, and tell of it."""
        self.stats.abandoned_steps += 1
        self._tell(lambda observer: observer.abandoned(owner, step, why))

    def skipped(self, step: int, why: str) -> None:
        """Count a step that was reduced and then not taken, and tell of it."""
        self.stats.skipped_steps += 1
        self._tell(lambda observer: observer.skipped(step, why))

    def waited(self, text: str) -> None:
        """Tell of a warning of ranks that others wait for."""
        self._tell(lambda observer: observer.waited(text))

    def cycle(self, tensors: int) -> None:
        """Tell that ``tensors`` were asked for."""
        at = time.perf_counter()
        self._tell(lambda observer: observer.cycle(at, tensors))

    def _tell(self, call: Callable[[Observer], None]) -> None:
        for observer in self.observers:
            try:
                call(observer)
            except BaseException:  # an observer's fault is no reason to stop training
                log.warning("an observer failed and is dropped", exc_info=True)
                self.observers = tuple(o for o in self.observers if o is not observer)
