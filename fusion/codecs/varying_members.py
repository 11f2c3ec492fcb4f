"""The small members of a bucket in host memory whose payloads are of variable size, together.

They are encoded run by run, as they stand beside each other, into scratch that a core's cache
holds; what was used of it becomes bytes, which travel. ``SmallMembers`` makes the calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple, Self

import numpy as np

from ringlet.compressors.base.batched import Batched
from ringlet.compressors.base.payload_bytes import PayloadBytes, split
from ringlet.compressors.core.payload import padded
from ringlet.compressors.core.traits import storage
from ringlet.fusion.codecs.small_members import MOST, SmallMembers, kernels_for
from ringlet.fusion.errors import CompressionFailed
from ringlet.fusion.planning.member import Member
from ringlet.ring.dtypes import FLOATS, Array

_RUN = 1 << 17  # elements that are encoded before they become bytes


class _Run(NamedTuple):
    """Members from ``start`` to ``stop``, by place, whose payloads take ``room`` bytes at most."""

    start: int
    stop: int
    lengths: Array
    room: int
    small: SmallMembers


class VaryingMembers:
    """Members that have one compressor and the same scales.

    ``taken`` tells which of them are small, by place. ``written`` holds what was encoded, by the
    place of each run's first: payloads as bytes, each behind its length.
    """

    def __init__(self, members: Sequence[Member], kernels: Batched) -> None:
        self._members, self._format = members, PayloadBytes(kernels.layout(1))
        self._runs = [_run(members, start, stop, kernels) for start, stop in _runs(members)]
        self.taken = {i for run in self._runs for i in range(run.start, run.stop)}
        self.written: dict[int, Array] = {}
        self._ends: dict[int, Array] = {}

    @classmethod
    def of(cls, members: Sequence[Member]) -> Self | None:
        """Return the small ones of ``members``; None where there are no kernels for many."""
        kernels = kernels_for(members)
        return None if kernels is None or not kernels.varies else cls(members, kernels)

    def compress(self) -> None:
        """Encode this step's values. Raises CompressionFailed."""
        workspace = self._members[0].workspace
        for run in self._runs:
            run.small.begin()
            table = run.small.encode(0, workspace.array("varying", run.room, np.uint8))
            self.written[run.start], self._ends[run.start] = self._format.write(table)

    @property
    def nbytes(self) -> int:
        """The bytes of what was encoded, lengths included."""
        return sum(array.size for array in self.written.values())

    def member_bytes(self) -> dict[int, float]:
        """Return the bytes of each one's payload, with its length."""
        found: dict[int, float] = {}
        for start, ends in self._ends.items():
            found |= enumerate(np.diff(ends, prepend=0).astype(float).tolist(), start)
        return found

    def decode_sum(self, payloads: Sequence[Array]) -> list[Array] | None:
        """Overwrite outputs with the scaled sum of everybody's payloads, in rank order.

        Returns where in each of ``payloads`` those of all members begin. None where one of them is
        none that these kernels write: whoever reads them one by one finds out what it is.
        """
        starts = [split(payload, len(self._members)) for payload in payloads]
        found = [each for each in starts if each is not None]
        if len(found) < len(payloads):
            return None
        for run in self._runs:
            within = slice(run.start, run.stop + 1)
            tables = [
                self._format.read(payload, each[within], run.lengths)
                for payload, each in zip(payloads, found, strict=True)
            ]
            known = [table for table in tables if table is not None]
            if len(known) < len(tables):
                return None
            try:
                run.small.decode_tables(0, known)
            except CompressionFailed:
                return None
        return found

    def finish(self) -> list[Member]:
        """Let kernels see the combined results; return the members whose they saw."""
        return [member for run in self._runs for member in run.small.finish()]


def _runs(members: Sequence[Member]) -> list[tuple[int, int]]:
    """Return where members begin and end that stand together and are small."""
    runs: list[tuple[int, int]] = []
    total = 0
    for i, member in enumerate(members):
        n = member.numel
        if member.request.dtype not in FLOATS or not 0 < n <= MOST:
            total = 0
        elif total and total + n <= _RUN:
            total += n
            runs[-1] = (runs[-1][0], i + 1)
        else:
            total = n
            runs.append((i, i + 1))
    return runs


def _run(members: Sequence[Member], start: int, stop: int, kernels: Batched) -> _Run:
    own = members[start:stop]
    sizes = [
        sum(padded(storage(p.dtype).itemsize * p.elements) for p in kernels.layout(member.numel))
        for member in own
    ]
    ends = [0, *accumulate(sizes)]
    whole = [(0, member.numel) for member in own]
    small = SmallMembers(own, [whole], [ends], kernels)
    return _Run(start, stop, np.array([m.numel for m in own], np.uint64), ends[-1], small)
