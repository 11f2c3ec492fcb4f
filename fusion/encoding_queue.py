"""Buckets that have all of their tensors, and wait to be encoded."""

from __future__ import annotations

from collections import deque
from typing import NamedTuple

from ringlet.fusion.buckets.bucket_owner import BucketOwner


class CompleteBucket(NamedTuple):
    """A bucket of a group's step, or of a batch, that has all of its tensors.

    ``bucket`` is its index, ``number`` and ``epoch`` are its owner's from when it was complete: a
    batch has another number each time that it serves, and its epochs begin anew.
    """

    owner: BucketOwner
    number: int
    bucket: int
    epoch: int

    @property
    def current(self) -> bool:
        """Whether the step or batch is still the same, and has not failed."""
        owner, number, _, epoch = self
        return epoch == owner.epoch and number == owner.number


class EncodingQueue:
    """Complete buckets. Any thread adds to them; the engine's thread takes from them."""

    def __init__(self) -> None:
        self._waiting: deque[CompleteBucket] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, owner: BucketOwner, index: int, epoch: int) -> None:
        """Add a bucket of ``owner``, by its index. From any thread."""
        self._waiting.append(CompleteBucket(owner, owner.number, index, epoch))

    def first(self) -> CompleteBucket:
        """Return what is to be encoded next. IndexError if nothing is.

        That is what the next forward pass needs first: of the layers declared first.
        """
        waiting = self._waiting
        if len(waiting) == 1:
            return waiting[0]
        return max(waiting.copy(), key=lambda found: found.owner.urgency(found.bucket))

    def take(self) -> CompleteBucket:
        """Remove and return ``first``, which may not be ``current`` any more."""
        chosen = self.first()
        self._waiting.remove(chosen)
        return chosen
