"""Fusion buckets on a GPU.

Everything is enqueued by the engine's thread. Payloads travel as they are, without seals; where
their size varies, what they consist of travels over the host, which knows it once the GPU has told.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial

from ringlet.fusion.buckets.bucket import CompressedBucket, SumBucket
from ringlet.fusion.codecs.cuda_codec import DeviceCodec
from ringlet.fusion.codecs.cuda_varying_codec import DescribedCodec
from ringlet.fusion.codecs.launched_members import Launches, Shard
from ringlet.fusion.peers import Track
from ringlet.fusion.planning.member import Member
from ringlet.fusion.recording.recorder import Recorder
from ringlet.ring.collectives import compressed, compressed_gpu
from ringlet.ring.pipeline import Steps, Wire


class DeviceSumBucket(SumBucket):
    """Payloads that add up, encoded and decoded many a launch where there are kernels for that."""

    def __init__(self, members: Sequence[Member], size: int) -> None:
        super().__init__(members, size)
        self._launches = Launches.of(self.members)

    def _encode(self) -> int:
        if self._launches is None:
            return super()._encode()
        self._allocate()
        self._launches.encode(self._shards())
        return self._nbytes

    def _decode_all(self) -> None:
        if self._launches is None:
            super()._decode_all()
        else:
            self._launches.decode(self._shards(), scaled=True)

    def _shards(self) -> list[Shard]:
        """Return the members with their payloads in the buffer."""
        return [
            Shard(member, 0, member.numel, {name: self._buffer[span]}, member.context(0, 1))
            for member, name, span in self._slots
        ]


class DeviceBucket(CompressedBucket):
    """Payloads that must be decoded to be added: gathered whole, or reduced shard by shard."""

    def __init__(self, members: Sequence[Member], size: int) -> None:
        super().__init__(members, size)
        if self.codec.fixed:
            self.codec = self._fixed = DeviceCodec(self.members, self.codec.parts)
        else:
            self.codec = self._described = DescribedCodec(self.members)

    def _encode(self) -> int:
        self._encoded = compressed.encode(self.codec, self._lease.allocate, room=0)
        if self.codec.fixed:
            self._fixed.launch()
        return self._encoded.nbytes

    def _exchange(self, track: Track, sizes: list[int], recorder: Recorder, epoch: int) -> Steps:
        comm, codec, allocate = track.comm, self.codec, self._lease.allocate
        if self._scattered:
            steps = compressed_gpu.scatter_reduce(comm, codec, self._encoded, allocate)
        else:
            steps = compressed_gpu.allgather_reduce(comm, codec, self._encoded, sizes, allocate)
        if not codec.fixed:
            yield Wire(partial(self._describe, track))
        start = time.perf_counter()
        for wire in steps:
            recorder.decompressed(self.trace, start)
            yield wire
            start = time.perf_counter()
        if codec.fixed:
            self._fixed.launch()
        recorder.decompressed(self.trace, start)

    def _describe(self, track: Track) -> None:
        own = self._described.description()
        self._described.expect(track.comm.allgather_bytes(own))
