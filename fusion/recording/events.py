"""What the engine tells its observers, on its own thread: they must be quick and never raise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from ringlet.fusion.planning.member import Member


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


@dataclass
class Trace:
    """What one bucket, or one operation that is not fused, has cost so far."""

    spans: list[Span] = field(default_factory=list)  # while somebody observes
    wire_bytes: float = 0.0
    compress_s: float = 0.0
    communicate_s: float = 0.0
    decompress_s: float = 0.0


class ObservedBucket(Protocol):
    """What observers may see of a fusion bucket."""

    trace: Trace

    @property
    def members(self) -> Sequence[Member]:
        """Its tensors."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    @property
    def more(self) -> bool:
        """Whether it has another round to exchange."""

    @property
    def done(self) -> bool:
        """Whether its outputs are filled."""

    @property
    def raw_bytes(self) -> float:
        """What an uncompressed allreduce would have sent."""

    def shares(self) -> Sequence[float]:
        """Return how much of what was sent is each member's, as any multiple."""


@dataclass(frozen=True)
class BucketDone:
    """A bucket that was reduced.

    ``owner`` is its group's name, or "" for tensors submitted one by one; ``submitted`` holds when
    each member was handed in, as far as that was noted. Bytes are those of ``Stats``.
    """

    owner: str
    step: int
    index: int
    bucket: ObservedBucket
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

    def encoding(self, owner: str, step: int, bucket: ObservedBucket) -> None:
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

    def waited(self, text: str) -> None:
        """See, on rank 0, a warning of ranks that others wait for."""

    def cycle(self, at: float, tensors: int) -> None:
        """See the engine ask for ``tensors`` that were submitted one by one."""


class Quiet:
    """An observer that does nothing: a base for those that care for some events only."""

    def encoding(self, owner: str, step: int, bucket: ObservedBucket) -> None:
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

    def waited(self, text: str) -> None:
        """Ignore it."""

    def cycle(self, at: float, tensors: int) -> None:
        """Ignore it."""
