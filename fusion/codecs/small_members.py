"""The small members of a bucket in host memory, encoded and decoded in one call for all of them.

A kernel takes a microsecond for a thousand values, and the calls around it take twenty.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Self

from ringlet.compressors import Payload
from ringlet.compressors.base.batched import Batched, address
from ringlet.fusion.errors import CompressionFailed
from ringlet.fusion.planning.member import Member
from ringlet.ring.dtypes import Array

MOST = 1 << 16  # elements of a small one: its sum stays in a core's cache, and no threads share it

_Range = tuple[int, int]


class SmallMembers:
    """Members of float32 that have one compressor and the same scales; ``ranges`` are by part.

    ``places`` tells which members are small, in each part.
    """

    def __init__(
        self, members: Sequence[Member], ranges: Sequence[Sequence[_Range]], kernels: Batched
    ) -> None:
        self._kernels, self._parts = kernels, len(ranges)
        self._workspace, self._postscale = members[0].workspace, members[0].postscale
        taken = [member.request.dtype == "float32" for member in members]
        self.places = [
            [i for i, (a, b) in enumerate(part) if taken[i] and 0 < b - a <= MOST]
            for part in ranges
        ]
        self._small = [
            [(members[i], *part[i]) for i in places]
            for part, places in zip(ranges, self.places, strict=True)
        ]

    @classmethod
    def of(cls, members: Sequence[Member], ranges: Sequence[Sequence[_Range]]) -> Self | None:
        """Return the small ones of ``members``; None where there are no kernels for many."""
        first = members[0]
        if first.place.ordered or first.prescale != 1.0 or len(members) < 2:
            return None
        if any(member.compressor != first.compressor for member in members):
            return None
        kernels = first.compressor.batched()
        return None if kernels is None else cls(members, ranges, kernels)

    def table(self, part: int, payloads: Sequence[Payload]) -> Array:
        """Return where the small members' payloads of ``part`` lie, among those of all members."""
        found = [payloads[i] for i in self.places[part]]
        return self._kernels.table(found, [b - a for _, a, b in self._small[part]])

    def encode(self, part: int, table: Array) -> None:
        """Encode this rank's values of ``part``. Raises CompressionFailed."""
        inputs = [member.input[a:b] for member, a, b in self._small[part]]
        self._encode(part, inputs, table, stage=1)

    def decode_sum(self, part: int, tables: Sequence[Array]) -> None:
        """Overwrite the outputs with the scaled sum of everybody's payloads, in rank order."""
        self._kernels.sum_into(self._outputs(part), tables, self._postscale)

    def encode_sum(self, part: int, tables: Sequence[Array], table: Array) -> None:
        """Encode the scaled sum of everybody's payloads. Raises CompressionFailed."""
        ends = [0, *accumulate(b - a for _, a, b in self._small[part])]
        room = self._workspace.array("sum", ends[-1])
        base = address(room, room.size)
        outs = [base + room.itemsize * end for end in ends[:-1]]
        self._kernels.sum_into(outs, tables, self._postscale)
        sums = [room[a:b] for a, b in pairwise(ends)]
        self._encode(part, sums, table, stage=2)

    def decode(self, part: int, table: Array) -> None:
        """Overwrite the outputs of a shard."""
        self._kernels.sum_into(self._outputs(part), [table])

    def _encode(self, part: int, inputs: Sequence[Array], table: Array, stage: int) -> None:
        rows, values, parts = [], self._kernels.values, self._parts
        for x, (member, _, _) in zip(inputs, self._small[part], strict=True):
            try:
                rows.append(values(x, member.context(part, parts, stage)))
            except BaseException as error:
                compressor, what = member.compressor, member.described
                raise CompressionFailed.of(
                    compressor, compressor.encode_into, what, error
                ) from error
        self._kernels.encode_into(rows, table)

    def _outputs(self, part: int) -> list[int]:
        return [address(member.output[a:b], b - a) for member, a, b in self._small[part]]
