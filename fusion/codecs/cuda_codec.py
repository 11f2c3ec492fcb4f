"""The codec of a bucket at an ordered place: all of its members in as few launches as there can be.

Parts are noted as the ring asks for them, and then launched together: a small tensor has values in
one part alone, so that part by part most launches would be nearly empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from ringlet.compressors import PayloadError
from ringlet.compressors.core.multitensor import Spaced
from ringlet.fusion.codecs.bucket_codec import BucketCodec
from ringlet.fusion.codecs.launched_members import Launches, Shard
from ringlet.fusion.planning.member import Member
from ringlet.ring.dtypes import Array


class DeviceCodec(BucketCodec):
    """Payloads of fixed size. Without multi-tensor kernels it does what its base does.

    ``launch`` has to follow ``encode_into`` of all parts, and ``decode_into`` of all parts.
    """

    def __init__(self, members: Sequence[Member], parts: int) -> None:
        super().__init__(members, parts)
        self._launches = Launches.of(self.members)
        self._encoded: list[Shard] = []
        self._decoded: list[Shard] = []

    def prepare(self) -> None:
        """Forget what an attempt that failed has noted."""
        super().prepare()
        self._encoded.clear()
        self._decoded.clear()

    def encode_into(self, part: int, out: Array) -> int:
        """Note this rank's values of ``part`` for ``launch``."""
        if self._launches is None:
            return super().encode_into(part, out)
        self._encoded += self._shards(part, out, stage=1)
        return self.capacity(part)

    def decode_into(self, part: int, payload: Array) -> None:
        """Note the outputs of a shard for ``launch``."""
        if self._launches is None:
            super().decode_into(part, payload)
        else:
            self._decoded += self._shards(part, payload, stage=2)

    def launch(self) -> None:
        """Encode and decode what was noted. Raises CompressionFailed."""
        if self._launches is None:
            return
        encoded, self._encoded = self._encoded, []
        decoded, self._decoded = self._decoded, []
        self._launches.encode(encoded)
        self._launches.decode(decoded, scaled=False)

    def decode_sum_into(self, part: int, payloads: Sequence[Array]) -> None:
        """Overwrite the outputs with the scaled sum of everybody's payloads, in rank order."""
        if self._launches is None:
            super().decode_sum_into(part, payloads)
            return
        shards = self._shards(part, payloads[0], stage=1)
        self._launches.decode(shards, scaled=True, spaced=self._spacing(payloads))

    def decode_sum_encode(self, part: int, payloads: Sequence[Array], out: Array) -> int:
        """Sum everybody's payloads of a shard in rank order, scale, and encode the result."""
        if self._launches is None:
            return super().decode_sum_encode(part, payloads, out)
        shards = [
            shard._replace(source=source)
            for shard, source in zip(
                self._shards(part, out, stage=2), self._payloads(part, payloads[0]), strict=True
            )
            if shard.stop > shard.start
        ]
        self._launches.encode_sums(shards, self._spacing(payloads))
        return self.capacity(part)

    def _shards(self, part: int, buffer: Array, stage: int) -> list[Shard]:
        """Return what every member has of ``part``, with its payload in ``buffer``."""
        payloads = self._payloads(part, buffer)
        return [
            Shard(member, start, stop, payload, member.context(part, self.parts, stage))
            for member, (start, stop), payload in zip(
                self.members, self.ranges[part], payloads, strict=True
            )
        ]

    def _spacing(self, payloads: Sequence[Array]) -> Spaced:
        """Return how far apart payloads lie. Raises PayloadError where they differ."""
        sizes = {payload.size for payload in payloads}
        if len(sizes) != 1:
            raise PayloadError(f"payloads of fixed size have {sorted(sizes)} bytes")
        if len(payloads) == 1:
            return Spaced(1, 0)
        starts = [self._place.address(payload) for payload in payloads]
        strides = {after - before for before, after in pairwise(starts)}
        if len(strides) != 1:
            raise PayloadError(f"payloads lie {sorted(strides)} bytes apart, not equally far")
        return Spaced(len(payloads), strides.pop())
