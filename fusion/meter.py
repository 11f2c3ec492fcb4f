"""What a participant measures: counters always, and spans of time when somebody observes."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING

from ringlet.fusion.observe.events import PHASES, BucketDone, Observer, Span, StepDone
from ringlet.fusion.stats import Stats

if TYPE_CHECKING:
    from ringlet.fusion.bucket import Bucket

log = logging.getLogger("ringlet")


class Meter:
    """Used by the engine's thread. While ``observers`` is empty, only ``stats`` are kept."""

    def __init__(self) -> None:
        self.stats = Stats()
        self.observers: tuple[Observer, ...] = ()
        self.submitted: dict[Hashable, float] = {}  # single submissions, by request key
        self._spans: list[Span] = []
        self._before: tuple[float, ...] = (0.0, 0.0, 0.0)

    # -- what buckets measure -------------------------------------------------------------------

    def compressed(self, start: float, end: float) -> None:
        """Count time spent compressing, or copying into a fusion buffer."""
        self.stats.compress_s += end - start
        if self.observers:
            self._spans.append(Span("compress", start, end))

    def communicated(self, start: float, end: float, sent: float, codec: float = 0.0) -> None:
        """Count a collective that sent ``sent`` bytes, of which ``codec`` s went to decoding."""
        self.stats.wire_bytes += sent
        self.stats.communicate_s += end - start - codec
        self.stats.decompress_s += codec
        if self.observers:
            self._spans.append(Span("communicate", start, end, round(sent)))

    def decompressed(self, start: float, end: float) -> None:
        """Count time spent decompressing, or copying out of a fusion buffer."""
        self.stats.decompress_s += end - start
        if self.observers:
            self._spans.append(Span("decompress", start, end))

    def note(self, span: Span) -> None:
        """Keep a span that no counter needs, such as one collective's."""
        if self.observers:
            self._spans.append(span)

    # -- what happens to buckets, while somebody observes ---------------------------------------

    def encoding(self, owner: str, step: int, bucket: Bucket) -> None:
        """Begin to collect a bucket's spans, or go on with its next round."""
        if not bucket.more:
            bucket.spans, bucket.costs = [], (0.0, 0.0, 0.0)
            self._tell(lambda observer: observer.encoding(owner, step, bucket))
        self._spans = bucket.spans

    def exchanging(self, bucket: Bucket) -> None:
        """Go on collecting a bucket's spans."""
        self._spans, self._before = bucket.spans, self._costs()

    def exchanged(
        self,
        owner: str,
        step: int,
        index: int,
        bucket: Bucket,
        submitted: Mapping[str, float],
    ) -> None:
        """Tell of a bucket that is done, or add up until it is."""
        changes = zip(bucket.costs, self._costs(), self._before, strict=True)
        # Counters that were reset meanwhile must not make a cost negative.
        bucket.costs = tuple(sum_ + max(0.0, now - before) for sum_, now, before in changes)
        spans, self._spans = bucket.spans, []
        if bucket.done:
            wire, communicate, decompress = bucket.costs
            compress = sum(span.end - span.start for span in spans if span.phase == "compress")
            seconds = dict(zip(PHASES, (compress, communicate, decompress), strict=True))
            event = BucketDone(
                owner, step, index, bucket, submitted, spans, seconds, bucket.raw_bytes, wire
            )
            self._tell(lambda observer: observer.bucket_done(event))

    def step_done(self, owner: str, step: int, start: float) -> None:
        """Tell of a step that is done."""
        event = StepDone(owner, step, start, time.perf_counter())
        self._tell(lambda observer: observer.step_done(event))

    def single_begins(self) -> None:
        """Begin to collect the spans of an operation that is not fused."""
        self._spans = []

    def single_done(self, kind: str, key: Hashable, name: str) -> None:
        """Tell of an operation that is not fused."""
        spans, self._spans = self._spans, []
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

    def cycle(self, tensors: int) -> None:
        """Tell that ``tensors`` were asked for."""
        at = time.perf_counter()
        self._tell(lambda observer: observer.cycle(at, tensors))

    def _costs(self) -> tuple[float, ...]:
        stats = self.stats
        return stats.wire_bytes, stats.communicate_s, stats.decompress_s

    def _tell(self, call: Callable[[Observer], None]) -> None:
        for observer in self.observers:
            try:
                call(observer)
            except Exception:  # an observer's fault is no reason to stop training
                log.warning("an observer failed and is dropped", exc_info=True)
                self.observers = tuple(o for o in self.observers if o is not observer)
