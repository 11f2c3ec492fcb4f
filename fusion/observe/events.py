"""What the engine tells its observers, on its own thread: they must be quick and never raise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from ringlet.fusion.bucket import Bucket


class Span(NamedTuple):
    """A stretch of a thread's time, by ``time.perf_counter``, in seconds.

    ``phase`` is "compress", "communicate" or "decompress", or a single collective's name, which
    lies within "communicate"; ``nbytes`` is what a collective moved. ``lane`` is 0 for the engine's
    thread, else the one of those that wait for the wire.
    """

    phase: str
    start: float
    end: float
    nbytes: int = 0
    lane: int = 0


PHASES = ("compress", "communicate", "decompress")


@dataclass(frozen=True)
class BucketDone:
    """A bucket that was reduced.

    ``owner`` is its group's name, or "" for tensors submitted one by one; ``submitted`` holds when
    each member was handed in, as far as that was noted. Bytes are those of ``Stats``.
    """

    owner: str
    step: int
    index: int
    bucket: Bucket
    submitted: Mapping[str, float]
    spans: Sequence[Span]
    seconds: Mapping[str, float]  # by phase
    raw_bytes: float
    wire_bytes: float


@dataclass(frozen=True)
class StepDone:
    """All buckets of a step were reduced, between ``start`` and ``end`` (first submission)."""

    owner: str
    step: int
    start: float
    end: float


class Observer(Protocol):
    """Is told of what the engine does."""

    def encoding(self, owner: str, step: int, bucket: Bucket) -> None:
        """See a bucket whose inputs are complete and not yet compressed."""

    def bucket_done(self, event: BucketDone) -> None:
        """See a bucket whose outputs are filled."""

    def step_done(self, event: StepDone) -> None:
        """See the end of a step."""

    def single_done(self, kind: str, name: str, submitted: float, spans: Sequence[Span]) -> None:
        """See an operation that is not fused, such as a broadcast."""

    def abandoned(self, owner: str, step: int, why: str) -> None:
        """See a step that failed on all ranks."""

    def skipped(self, step: int, why: str) -> None:
        """See a step that was reduced and then not taken."""

    def cycle(self, at: float, tensors: int) -> None:
        """See the engine ask for ``tensors`` that were submitted one by one."""


class Quiet:
    """An observer that does nothing: a base for those that care for some events only."""

    def encoding(self, owner: str, step: int, bucket: Bucket) -> None:
        """Ignore it."""

    def bucket_done(self, event: BucketDone) -> None:
        """Ignore it."""

    def step_done(self, event: StepDone) -> None:
        """Ignore it."""

    def single_done(self, kind: str, name: str, submitted: float, spans: Sequence[Span]) -> None:
        """Ignore it."""

    def abandoned(self, owner: str, step: int, why: str) -> None:
        """Ignore it."""

    def skipped(self, step: int, why: str) -> None:
        """Ignore it."""

    def cycle(self, at: float, tensors: int) -> None:
        """Ignore it."""
