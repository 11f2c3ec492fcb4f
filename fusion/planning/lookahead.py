"""Look-ahead: pack a queue of tensors into fusion buckets, each stream by itself.

Tensors of different wire types cannot share a collective. Breaking a bucket wherever the type
changes would leave many small ones when FP16 and FP32 gradients interleave; instead the scan
looks past tensors of other streams, within a budget of bytes, for more of its own.

An exchange of its own costs what the network's latency is, however little it moves. So a bucket of
less than a share of the threshold, ``1 / SMALL``, is not closed yet. A tensor that is larger than a
bucket may be, and is not encoded, travels alone and uncopied: small buckets pass it.

Where tensors come one after the other, as backward produces them, the first bucket of a stream is
closed as soon as it is not small, if the rest is not small either: even a model of one bucket then
sends something while backward goes on. Only sums do that. Their bytes are most of their cost; what
is decoded has few, and an exchange more costs more than it hides.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

SMALL = 16


class Packable(Protocol):
    """What the look-ahead needs to know of a tensor."""

    @property
    def stream(self) -> Hashable:
        """What tensors of one buffer have in common; see ``Member._stream``."""

    @property
    def nbytes(self) -> int:
        """What it takes of the byte budgets."""

    @property
    def encoded(self) -> bool:
        """Whether a compressor writes it into a fusion buffer, which it else is copied to."""

    @property
    def summed(self) -> bool:
        """Whether it is added up as it travels."""


T = TypeVar("T", bound=Packable)


def pack(
    queue: Iterable[T], threshold: int, lookahead: int | None = None, early: bool = False
) -> list[list[T]]:
    """Pack ``queue`` into buckets of one stream and at most ``threshold`` bytes each.

    A pure function of its arguments. Nothing is lost or repeated; within a stream the order of the
    queue is kept, across buckets too, but for what travels alone; the head of the queue always
    opens the next bucket, so nothing starves. The scan ends when it has passed ``lookahead`` bytes
    of other streams (default: ``threshold``; 0 turns the look-ahead off).

    A small bucket scans on, and takes an encoded tensor that goes beyond the threshold. Else only a
    single tensor is larger. With ``early`` the first bucket of a stream of sums is a short one.
    """

    budget = threshold if lookahead is None else lookahead
    waiting: deque[_Queued[T]] = deque()
    left: Counter[Hashable] = Counter()  # bytes of streams of sums that have no bucket yet
    for tensor in queue:
        nbytes, encoded = tensor.nbytes, tensor.encoded
        alone = nbytes > threshold and not encoded
        waiting.append(_Queued(tensor, (alone, tensor.stream), nbytes, encoded))
        if early and tensor.summed:
            left[alone, tensor.stream] += nbytes
    buckets: list[list[T]] = []
    while waiting:
        head, stream, size, _ = waiting.popleft()
        bucket = [head]
        passed: list[_Queued[T]] = []
        passed_bytes = 0
        whole = left.pop(stream, 0)
        while waiting:
            candidate = waiting[0]
            small = size * SMALL < threshold
            if not small and (whole - size) * SMALL >= threshold:
                break
            if candidate.stream == stream:
                if size + candidate.nbytes > threshold and not (small and candidate.encoded):
                    break
                size += candidate.nbytes
                bucket.append(waiting.popleft().tensor)
            else:
                passed_bytes += candidate.nbytes
                if budget == 0 or (passed_bytes > budget and not small):
                    break
                passed.append(waiting.popleft())
        waiting.extendleft(reversed(passed))
        buckets.append(bucket)
    return buckets


class _Queued(NamedTuple, Generic[T]):
    """A tensor, and what is asked of it often."""

    tensor: T
    stream: Hashable  # with whether it travels alone
    nbytes: int
    encoded: bool
