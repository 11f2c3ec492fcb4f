"""Turns what the engine tells into Chrome's trace events.

A rank is a process with two threads: the engine's, where compressing, moving and decompressing lie
one behind the other, and the program's, with marks for tensors handed in. Every bucket has a track
of its own from its first tensor to its result, in stages; operations that are not fused share one,
which has as many rows as there are under way at a time. Operations, their negotiation and cycles
have the names that Horovod gives them, for whoever searches its timelines by program.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from ringlet.fusion.observe.merge import CLOCK
from ringlet.fusion.peers import MOST_LANES, TRACKS
from ringlet.fusion.recording.events import BucketDone, Span, StepDone

Event = dict[str, Any]
_LANES = ("first", "second", "third", "fourth", "fifth", "sixth", "seventh", "eighth")
_SINGLES = "operations that are not fused"  # the track that they share
ENGINE, PROGRAM, WIRE = 1, 2, 10  # threads of the trace; lanes count on from WIRE


class Single(NamedTuple):
    """An operation that was not fused."""

    kind: str
    name: str
    submitted: float
    spans: Sequence[Span]


class Instant(NamedTuple):
    """Something that happened at once: a cycle, an abandoned step."""

    name: str
    at: float
    detail: dict[str, Any]


class Stretch(NamedTuple):
    """A stretch of the program's time that it named itself."""

    name: str
    start: float
    end: float


class Clock(NamedTuple):
    """How far this rank's clock was from rank 0's."""

    at: float
    offset: float
    uncertainty: float
    epoch: float  # seconds since 1970, at that moment


class Renderer:
    """Renders one rank's items; used by its writer's thread."""

    def __init__(self, rank: int, host: str) -> None:
        self._rank, self._host = rank, host
        self._ids = itertools.count()
        self._raw = self._wire = 0.0
        self._begun = False
        self._rows: list[float] = []  # until when each is taken

    def __call__(self, item: Any) -> Iterator[Event]:
        """Yield the events of one item."""
        if not self._begun:
            self._begun = True
            yield from self._names()
        if isinstance(item, BucketDone):
            yield from self._bucket(item)
        elif isinstance(item, StepDone):
            detail = {"step": item.step}
            yield self._whole(f"step of {item.owner}", item.start, item.end, PROGRAM, detail)
        elif isinstance(item, Single):
            yield from self._single(item)
        elif isinstance(item, Instant):
            yield self._instant(item.name, item.at, ENGINE, item.detail)
        elif isinstance(item, Stretch):
            yield self._whole(item.name, item.start, item.end, PROGRAM + 1, {})
        elif isinstance(item, Clock):
            found = {"offset_us": item.offset * 1e6, "uncertainty_us": item.uncertainty * 1e6}
            found["epoch_us"] = item.epoch * 1e6
            yield self._instant(CLOCK, item.at, ENGINE, found)

    def _names(self) -> Iterator[Event]:
        process = f"rank {self._rank} ({self._host})"
        yield self._meta("process_name", 0, {"name": process})
        yield self._meta("process_sort_index", 0, {"sort_index": self._rank})
        threads = {ENGINE: "engine", PROGRAM: "tensors handed in, steps", PROGRAM + 1: "program"}
        for track in range(TRACKS):
            wire = f"wire {track + 1}" if track else "wire"
            lanes = enumerate(_LANES, WIRE + 1 + MOST_LANES * track)
            threads |= {tid: f"{wire}, {which} collectives" for tid, which in lanes}
        for tid, name in threads.items():
            yield self._meta("thread_name", tid, {"name": name})
            yield self._meta("thread_sort_index", tid, {"sort_index": tid})

    def _bucket(self, done: BucketDone) -> Iterator[Event]:
        name = f"{done.owner or 'batch'}/{done.index}"
        members = done.bucket.members
        detail = {
            "step": done.step,
            "tensors": [member.name for member in members[:20]],
            "count": len(members),
            "compressor": str(members[0].compressor),
            "collective": members[0].strategy,
            "dtype": members[0].request.dtype,
            "raw_bytes": round(done.raw_bytes),
            "wire_bytes": round(done.wire_bytes),
        }
        for tensor, at in done.submitted.items():
            yield self._instant(f"allreduce.{tensor}", at, PROGRAM, {"step": done.step})
        for span in done.spans:
            extra = {"bytes": span.nbytes} if span.nbytes else {}
            yield self._span(span, {"bucket": name} | extra)
        yield from self._stages(name, done, detail)
        self._raw += done.raw_bytes
        self._wire += done.wire_bytes
        counted = {"uncompressed": round(self._raw), "sent": round(self._wire)}
        yield self._counter("bytes", done.spans[-1].end if done.spans else 0.0, counted)

    def _stages(self, name: str, done: BucketDone, detail: Event) -> Iterator[Event]:
        """Yield a bucket's own track: gather, queue, compress, wait, exchange."""
        encoded = [span for span in done.spans if span.phase == "compress"]
        moved = [span for span in done.spans if span.phase not in ("compress", "encode")]
        if not encoded or not moved:
            return
        first = min(done.submitted.values(), default=encoded[0].start)
        last = max(done.submitted.values(), default=encoded[0].start)
        go, end = moved[0].start, max(span.end for span in done.spans)
        number = f"{self._rank}.{next(self._ids)}"
        yield self._async("b", name, first, number, detail)
        yield self._async("b", "NEGOTIATE_ALLREDUCE", first, number)
        stages = [
            ("gather tensors", first, last),
            ("wait for the engine", last, encoded[0].start),
            ("compress", encoded[0].start, encoded[0].end),
            ("wait for ranks", encoded[0].end, go),
        ]
        for stage, start, stop in stages:
            if stop > start:
                yield self._async("b", stage, start, number)
                yield self._async("e", stage, stop, number)
        yield self._async("e", "NEGOTIATE_ALLREDUCE", go, number)
        yield self._async("b", "ALLREDUCE", go, number)
        yield self._async("e", "ALLREDUCE", end, number)
        yield self._async("e", name, end, number)

    def _single(self, item: Single) -> Iterator[Event]:
        detail = {"tensor": item.name, "kind": item.kind}
        for span in item.spans:
            extra = {"bytes": span.nbytes} if span.nbytes else {}
            yield self._span(span, detail | extra)
        if item.spans:
            kind, name = item.kind.upper(), f"{item.kind}.{item.name}"
            go, end = item.spans[0].start, item.spans[-1].end
            number = f"{self._rank}.single.{self._row(item.submitted, end)}"
            yield self._async("b", _SINGLES, item.submitted, number)
            yield self._async("b", name, item.submitted, number, detail)
            yield self._async("b", f"NEGOTIATE_{kind}", item.submitted, number)
            yield self._async("e", f"NEGOTIATE_{kind}", go, number)
            yield self._async("b", kind, go, number)
            yield self._async("e", kind, end, number)
            yield self._async("e", name, end, number)
            yield self._async("e", _SINGLES, end, number)

    def _row(self, start: float, end: float) -> int:
        """Return a row of the track of operations that are not fused: the first that is free."""
        free = (row for row, until in enumerate(self._rows) if until <= start)
        row = next(free, len(self._rows))
        self._rows[row : row + 1] = [end]
        return row

    # -- one event each -------------------------------------------------------------------------

    def _span(self, span: Span, detail: Event) -> Event:
        tid = WIRE + span.lane if span.lane else ENGINE
        return self._whole(span.phase, span.start, span.end, tid, detail)

    def _whole(self, name: str, start: float, end: float, tid: int, detail: Event) -> Event:
        where = {"pid": self._rank, "tid": tid}
        times = {"ts": _us(start), "dur": _us(end - start)}
        return {"ph": "X", "name": name, **where, **times, "args": detail}

    def _instant(self, name: str, at: float, tid: int, detail: Event) -> Event:
        where = {"pid": self._rank, "tid": tid, "ts": _us(at), "s": "t"}
        return {"ph": "i", "name": name, **where, "args": detail}

    def _counter(self, name: str, at: float, values: Event) -> Event:
        return {"ph": "C", "name": name, "pid": self._rank, "ts": _us(at), "args": values}

    def _async(
        self, ph: str, name: str, at: float, number: str, detail: Event | None = None
    ) -> Event:
        where = {"cat": "bucket", "id": number, "pid": self._rank, "tid": PROGRAM, "ts": _us(at)}
        return {"ph": ph, "name": name, **where, "args": detail or {}}

    def _meta(self, name: str, tid: int, detail: Event) -> Event:
        return {"ph": "M", "name": name, "pid": self._rank, "tid": tid, "args": detail}


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 3)
