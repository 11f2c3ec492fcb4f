"""The codec of a bucket at an ordered place whose payloads are of variable size.

How large they are the host learns from the device, for up to 32 tensors at once where the
compressor has kernels for that.
"""

from __future__ import annotations

from collections.abc import Sequence

from ringlet.compressors import Payload, PayloadError
from ringlet.compressors.base.contract import storage
from ringlet.compressors.core.multitensor import Sum
from ringlet.compressors.core.payload import padded
from ringlet.fusion.codecs.bucket_codec import BucketCodec
from ringlet.fusion.codecs.launched_members import TAKEN, Shard, by_dtype, call, in_common, outputs
from ringlet.fusion.planning.member import Member
from ringlet.fusion.requests.request import dumps, loads
from ringlet.ring.dtypes import Array


class DescribedCodec(BucketCodec):
    """Payloads whose arrays lie side by side; ranks tell each other of what arrays they consist."""

    def __init__(self, members: Sequence[Member]) -> None:
        super().__init__(members, 1)
        found = in_common(self.members)
        self._kernels = None if found is None else found[0].multi_varying(found[1])
        self._expected: list[bytes] = []

    def prepare(self) -> None:
        """Compress this step's values: the host waits for their sizes, once for many tensors."""
        if self._kernels is None or any(m.request.dtype not in TAKEN for m in self.members):
            super().prepare()
            return
        made: dict[int, Payload] = {}
        for _, shards in by_dtype(self._shards()):
            given, scale = [shard.encoding() for shard in shards], shards[0].member.prescale
            compress = self._kernels.compress
            payloads = call(shards[0].member.compressor, compress, shards, given, scale)
            for shard, payload in zip(shards, payloads, strict=True):
                made[id(shard.member)] = payload
        self._variable = [made.get(id(member), {}) for member in self.members]

    def decode_sum_into(self, part: int, payloads: Sequence[Array]) -> None:
        """Overwrite the outputs with the scaled sum of everybody's payloads, in rank order."""
        if self._kernels is None:
            super().decode_sum_into(part, payloads)
            return
        received = [self._deserialise(payload) for payload in payloads]
        of_member = zip(*received, strict=True)
        sources = {id(m): found for m, found in zip(self.members, of_member, strict=True)}
        for dtype, shards in by_dtype(self._shards()):
            with outputs(shards, dtype) as outs:
                sums = [
                    Sum(out, sources[id(shard.member)], shard.ctx)
                    for out, shard in zip(outs, shards, strict=True)
                ]
                member, decode = shards[0].member, self._kernels.decode
                call(member.compressor, decode, shards, sums, member.postscale)

    def _shards(self) -> list[Shard]:
        return [Shard(m, 0, m.numel, {}, m.context(0, 1)) for m in self.members]

    def capacity(self, part: int) -> int:
        """Return the bytes of the step at hand."""
        return sum(int(nbytes) for nbytes in self.member_bytes())

    def member_bytes(self) -> list[float]:
        """Return the bytes of each member's payload."""
        return [
            float(sum(padded(array.nbytes) for array in payload.values()))
            for payload in self._variable
        ]

    def description(self) -> bytes:
        """Return what this rank's payloads consist of."""
        return dumps(
            [
                [[name, array.dtype.name, array.size] for name, array in payload.items()]
                for payload in self._variable
            ]
        )

    def expect(self, descriptions: Sequence[bytes]) -> None:
        """Take every rank's description, by rank, for the payloads that are decoded next."""
        self._expected = list(descriptions)

    def _serialise(self, out: Array) -> int:
        end = 0
        for payload in self._variable:
            for array in payload.values():
                out[end : end + array.nbytes].view(array.dtype)[...] = array
                end += padded(array.nbytes)
        return end

    def _deserialise(self, buffer: Array) -> list[Payload]:
        payloads: list[Payload] = []
        end = 0
        for described in _read(self._expected.pop(0), len(self.members)):
            payload: Payload = {}
            for name, dtype, elements in described:
                kind = storage(dtype)
                start, stop = end, end + kind.itemsize * elements
                if stop > buffer.size:
                    raise PayloadError(f"a payload of {buffer.size} bytes ends inside {name!r}")
                payload[name] = buffer[start:stop].view(kind)
                end = start + padded(kind.itemsize * elements)
            payloads.append(payload)
        return payloads


def _read(description: bytes, count: int) -> list[list[tuple[str, str, int]]]:
    """Return what another rank says that its ``count`` payloads consist of.

    It travels beside the payloads, unsealed. Raises PayloadError where it makes no sense.
    """
    try:
        found = [[(name, dtype, n) for name, dtype, n in each] for each in loads(description)]
        arrays = [array for each in found for array in each]
        if len(found) == count and all(
            type(name) is str and type(n) is int and n >= 0 and storage(dtype).kind in "biuf"
            for name, dtype, n in arrays
        ):
            return found
    except (ValueError, TypeError, RecursionError):
        pass
    raise PayloadError(f"a rank says of its payloads what makes no sense: {description[:60]!r}")
