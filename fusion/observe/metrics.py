"""Metrics: a record a step of what travelled and what it took, for files, exporters and callbacks.

Records are plain dicts with a ``kind``:

- ``run``: what ran, and the network as it was measured, once;
- ``step``: bytes and seconds of one step of one group; ``loose``: those of tensors submitted one by
  one, about once a second;
- ``layers``: bytes by layer, and in sampled steps norms and relative errors;
- ``abandoned`` and ``skipped``: steps that failed or were not taken;
- ``waiting``: what was warned of, that others waited for a rank.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from ringlet.fusion.observe import layers
from ringlet.fusion.observe.probe import Network
from ringlet.fusion.recording.events import PHASES, BucketDone, ObservedBucket, Quiet, StepDone

Record = dict[str, Any]

_LOOSE_EVERY = 1.0  # seconds
_ESTIMATES = ("uncompressed_s", "uncompressed_most_s")  # the least, and an upper bound


class Metrics(Quiet):
    """Makes records out of what the engine tells, and gives them to ``emit``.

    ``sample_every`` is in steps; 0 measures no layer's error. ``network`` lets a step say how long
    it would have taken uncompressed.
    """

    def __init__(
        self,
        emit: Callable[[Record], None],
        sample_every: int = 0,
        network: Network | None = None,
    ) -> None:
        if sample_every < 0:
            raise ValueError(f"sample_every is a number of steps, or 0, not {sample_every}")
        self._emit, self._every, self._network = emit, sample_every, network
        self._sums: dict[str, Record] = {}
        self._layers: dict[str, list[Record]] = {}
        self._losses: dict[str, dict[str, dict[str, float]]] = {}
        self._described: set[str] = set()
        self._flushed = time.monotonic()

    def encoding(self, owner: str, step: int, bucket: ObservedBucket) -> None:
        """Measure the layers of a sampled step before their gradients are overwritten."""
        if self._sampled(owner, step):
            self._losses.setdefault(owner, {}).update(layers.losses(bucket))

    def bucket_done(self, event: BucketDone) -> None:
        """Add a bucket to its step."""
        sums = self._sums.setdefault(event.owner, _nothing())
        sums["raw_bytes"] += event.raw_bytes
        sums["wire_bytes"] += event.wire_bytes
        sums["buckets"] += 1
        sums["tensors"] += len(event.bucket.members)
        for phase in PHASES:
            sums[f"{phase}_s"] += event.seconds[phase]
        if self._network is not None:
            tensor_bytes = sum(member.nbytes for member in event.bucket.members)
            for name, pace in zip(_ESTIMATES, self._network, strict=True):
                sums[name] += pace.seconds(event.raw_bytes, tensor_bytes)
        if not event.owner:
            self._flush_loose()
        elif event.owner not in self._described or self._sampled(event.owner, event.step):
            self._add_layers(event)

    def step_done(self, event: StepDone) -> None:
        """Tell of a step."""
        sums = self._sums.pop(event.owner, _nothing())
        head = {"group": event.owner, "step": event.step, "seconds": event.end - event.start}
        self._tell("step", head | self._finished(sums))
        found = self._layers.pop(event.owner, [])
        if found:
            self._described.add(event.owner)
            self._losses.pop(event.owner, None)
            head = {"group": event.owner, "step": event.step}
            self._tell("layers", head | {"layers": found})

    def abandoned(self, owner: str, step: int, why: str) -> None:
        """Tell of a step that failed."""
        self._sums.pop(owner, None)
        self._layers.pop(owner, None)
        self._losses.pop(owner, None)
        self._tell("abandoned", {"group": owner, "step": step, "why": why})

    def skipped(self, step: int, why: str) -> None:
        """Tell of a step that was not taken."""
        self._tell("skipped", {"step": step, "why": why})

    def waited(self, text: str) -> None:
        """Tell of ranks that others waited for."""
        self._tell("waiting", {"text": text})

    def describe(self, facts: Record) -> None:
        """Tell what runs."""
        network = None if self._network is None else self._network.as_record()
        self._tell("run", facts | {"network": network})

    def flush(self) -> None:
        """Tell what was added up and belongs to no step."""
        self._flushed = 0.0
        self._flush_loose()

    def _sampled(self, owner: str, step: int) -> bool:
        return bool(self._every and owner and step % self._every == 0)

    def _add_layers(self, event: BucketDone) -> None:
        measured = self._losses.get(event.owner, {})
        found = self._layers.setdefault(event.owner, [])
        for member, facts in zip(
            event.bucket.members, layers.sizes(event.bucket, event.wire_bytes), strict=True
        ):
            held = layers.residual_norm(member)
            facts |= measured.get(facts["name"], {})
            found.append(facts if held is None else facts | {"residual_norm": held})

    def _flush_loose(self) -> None:
        now = time.monotonic()
        if now - self._flushed >= _LOOSE_EVERY and "" in self._sums:
            self._flushed = now
            self._tell("loose", self._finished(self._sums.pop("")))

    def _finished(self, sums: Record) -> Record:
        wire = sums["wire_bytes"]
        sums["ratio"] = sums["raw_bytes"] / wire if wire else 1.0
        if self._network is None:
            for name in _ESTIMATES:
                del sums[name]
        return sums

    def _tell(self, kind: str, record: Record) -> None:
        self._emit({"kind": kind, "time": time.time()} | record)


def _nothing() -> Record:
    sums: Record = {"raw_bytes": 0.0, "wire_bytes": 0.0, "buckets": 0, "tensors": 0}
    return sums | dict.fromkeys((*(f"{phase}_s" for phase in PHASES), *_ESTIMATES), 0.0)
