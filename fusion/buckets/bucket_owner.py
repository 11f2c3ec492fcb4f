"""Whose buckets ranks vote on: a declared group, or a batch of tensors submitted one by one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from ringlet.fusion.buckets.bucket import Bucket
from ringlet.fusion.peers import Peers
from ringlet.fusion.recording.events import Trace
from ringlet.fusion.recording.recorder import Recorder


class BucketOwner(ABC):
    """Buckets of the ranks ``peers`` that travel by votes, under a ``number`` of the coordinator's.

    ``title`` and ``step`` are what people are told of a bucket. ``turn`` is the step at hand as all
    ranks count it; ``epoch`` counts failures, as far as this rank has heard. ``unplanned`` is why
    the step at hand cannot be encoded, if it cannot. Methods are called by the engine's thread.
    """

    number: int
    epoch: int
    peers: Peers
    buckets: list[Bucket]
    step: int
    turn: int = 0
    title: str = ""
    unplanned: BaseException | None = None

    @property
    def to_vote(self) -> Sequence[int]:
        """The indices of buckets that need a vote, the same on all ranks."""
        return range(len(self.buckets))

    @abstractmethod
    def urgency(self, index: int) -> float:
        """Return how soon a bucket is needed: of those that wait, the largest is encoded first."""

    @abstractmethod
    def begin_bucket(self, index: int) -> Trace:
        """Begin a bucket's work in the step at hand; return where its costs will be."""

    @abstractmethod
    def digest_to_vote(self, index: int) -> int:
        """Return what a vote says of a bucket's earlier sums, for ranks to compare; 0: nothing."""

    @abstractmethod
    def average_over(self, index: int, contributors: int) -> None:
        """Let a bucket's means be over so many ranks, those that have contributed."""

    @abstractmethod
    def observed(self, index: int, recorder: Recorder) -> None:
        """Tell of a bucket that was exchanged, while somebody observes."""

    @abstractmethod
    def bucket_done(self, index: int) -> None:
        """Count a bucket whose outputs are filled."""

    @abstractmethod
    def fail(self, error: Exception, turn: int | None = None) -> None:
        """End the step ``turn`` with ``error``; this one and all later ones if that is None."""
