"""The members of a bucket at an ordered place, such as a GPU, encoded and decoded many a launch.

Inputs and outputs of 16 bits go into the kernels, and come out of them, as they are; those of other
dtypes are converted member by member.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Self, TypeVar

from ringlet.compressors import Compressor, Context, Payload
from ringlet.compressors.core.multitensor import Decoding, Encoding, MultiTensor, Spaced
from ringlet.fusion.devices.convert import from_float32
from ringlet.fusion.errors import CompressionFailed
from ringlet.fusion.planning.member import Member, named
from ringlet.ring.dtypes import Array

Result = TypeVar("Result")

TAKEN = ("float32", "float16", "bfloat16")  # dtypes that kernels read and write


class Shard(NamedTuple):
    """Elements ``start`` to ``stop`` of a member, their payload, and its context at this step.

    ``source`` is the first of the payloads of a sum that becomes ``payload``.
    """

    member: Member
    start: int
    stop: int
    payload: Payload
    ctx: Context
    source: Payload | None = None

    def encoding(self) -> Encoding:
        """Return the values as what is to be encoded."""
        x = self.member.input[self.start : self.stop]
        return Encoding(x, self.stop - self.start, self.payload, self.ctx)


class Launches:
    """Multi-tensor kernels for members that have one compressor and the same scales."""

    def __init__(self, members: Sequence[Member], kernels: MultiTensor) -> None:
        first = members[0]
        self._kernels, self._compressor = kernels, first.compressor
        self._prescale, self._postscale = first.prescale, first.postscale

    @classmethod
    def of(cls, members: Sequence[Member]) -> Self | None:
        """Return the launches of ``members``; None where their compressor has no such kernels."""
        found = in_common(members)
        kernels = None if found is None else found[0].multi_tensor(found[1])
        return None if kernels is None else cls(members, kernels)

    def encode(self, shards: Sequence[Shard]) -> None:
        """Encode inputs, prescaled. Raises CompressionFailed, as all methods do."""
        for dtype, some in by_dtype(shards):
            if dtype in TAKEN:
                given = [shard.encoding() for shard in some]
                call(self._compressor, self._kernels.encode, some, given, None, self._prescale)
                continue
            for shard in some:  # values() gives them in scratch memory that is used again
                member = shard.member
                encode, values = self._compressor.encode_into, member.values(*shard[1:3])
                member.call(encode, values, shard.payload, shard.ctx)

    def encode_sums(self, shards: Sequence[Shard], spaced: Spaced) -> None:
        """Encode the postscaled sums of what ``source`` and those behind it decode to."""
        if shards:
            given = [Encoding(None, s.stop - s.start, s.payload, s.ctx, s.source) for s in shards]
            call(self._compressor, self._kernels.encode, shards, given, spaced, self._postscale)

    def decode(self, shards: Sequence[Shard], scaled: bool, spaced: Spaced | None = None) -> None:
        """Overwrite outputs with what payloads decode to, or their sums: postscaled, if wanted."""
        scale = self._postscale if scaled else 1.0
        for dtype, some in by_dtype(shards):
            with outputs(some, dtype) as outs:
                given = [Decoding(out, s.payload, s.ctx) for out, s in zip(outs, some, strict=True)]
                call(self._compressor, self._kernels.decode, some, given, spaced, scale)


def in_common(members: Sequence[Member]) -> tuple[Compressor, Context] | None:
    """Return the compressor of all ``members``, and what it is to be asked for kernels with."""
    first = members[0]
    if any(member.compressor != first.compressor for member in members):
        return None
    return first.compressor, Context(xp=first.place.xp, workspace=first.workspace)


def call(
    compressor: Compressor, function: Callable[..., Result], shards: Sequence[Shard], *args: Any
) -> Result:
    """Call kernels; what they raise is told with the tensors' names, as CompressionFailed."""
    try:
        return function(*args)
    except BaseException as error:
        what = named([shard.member for shard in shards])
        raise CompressionFailed.of(compressor, function, what, error) from error


@contextmanager
def outputs(shards: Sequence[Shard], dtype: str) -> Iterator[list[Array]]:
    """Lend what kernels can write to, of shards of one dtype; it is converted at the end."""
    outs = [s.member.output[s.start : s.stop] for s in shards]
    if dtype in TAKEN:
        yield outs
        return
    ends, workspace = [0, *accumulate(out.size for out in outs)], shards[0].member.workspace
    room = workspace.array("outputs", ends[-1])
    wide = [room[a:b] for a, b in pairwise(ends)]
    yield wide
    for source, out in zip(wide, outs, strict=True):
        from_float32(source, out, dtype, workspace)


def by_dtype(shards: Iterable[Shard]) -> Iterable[tuple[str, list[Shard]]]:
    """Return the shards that are not empty, by the dtype of their tensors."""
    found: dict[str, list[Shard]] = {}
    for shard in shards:
        if shard.stop > shard.start:
            found.setdefault(shard.member.request.dtype, []).append(shard)
    return found.items()
