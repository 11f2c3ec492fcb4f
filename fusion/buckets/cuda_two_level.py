"""A bucket on a GPU that goes over two levels: as in host memory, but enqueued and not waited for.

Payloads travel without seals. Ranks agree once, over the host, that all could begin to encode their
host's sum; what fails later ends the job, as it does on one level.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from itertools import accumulate

from ringlet.fusion.buckets.two_level import TwoLevelBucket
from ringlet.fusion.codecs.cuda_codec import DeviceCodec
from ringlet.fusion.peers import Track
from ringlet.fusion.recording.recorder import Recorder
from ringlet.ring.collectives import compressed, compressed_gpu
from ringlet.ring.collectives.agreement import agree
from ringlet.ring.collectives.two_level import room_of, within
from ringlet.ring.dtypes import Array
from ringlet.ring.pipeline import Steps, Wire


class DeviceTwoLevelBucket(TwoLevelBucket):
    """Members whose payloads must be decoded to be added, and are of fixed size."""

    def _lay_out(self) -> list[int]:
        # All shards are as long, and begin alike: so NCCL moves them in one operation, and a tensor
        # is copied in two, however many ranks a host has.
        self._offsets = [0, *accumulate(max(share) for share in self._shares)]
        return [self._offsets[-1]] * self._comm.local.size

    def _codec_of(self, parts: int) -> DeviceCodec:
        self._device = DeviceCodec(self._parts, parts)
        return self._device

    def _starts_in_shard(self) -> list[int]:
        return self._offsets[:-1]

    def _pairs(self, i: int, values: Array) -> Iterator[tuple[Array, Array]]:
        shards = self._buffer.reshape(self._comm.local.size, self._offsets[-1])
        least, longer = divmod(self.members[i].numel, len(shards))
        start, longest = self._offsets[i], least + 1
        if longer:
            first = values[: longer * longest].reshape(longer, longest)
            yield shards[:longer, start : start + longest], first
        if least:
            rest = values[longer * longest :].reshape(-1, least)
            yield shards[longer:, start : start + least], rest

    def _exchange(self, track: Track, sizes: list[int], recorder: Recorder, epoch: int) -> Steps:
        comm, codec, cross = self._comm, self._device, self._comm.cross
        sums, results = self._bind()
        allocate = within(self._lease.allocate(room_of(codec, cross.size, cross.rank)))
        yield Wire(partial(comm.reduce_within, self._buffer, sums, self._counts))
        start = time.perf_counter()
        encoded, failure = compressed.Encoded(results[:0], []), None
        try:
            encoded = compressed.encode(codec, allocate, room=0)
            codec.launch()
        except Exception as error:
            failure = error
        recorder.compressed(self.trace, start, time.perf_counter())
        yield from agree(comm, failure, "could not encode its host's sum")
        if codec.parts > 1:
            steps = compressed_gpu.scatter_reduce(cross, codec, encoded, allocate)
        else:
            known = [encoded.nbytes] * cross.size
            steps = compressed_gpu.allgather_reduce(cross, codec, encoded, known, allocate)
        start = time.perf_counter()
        for wire in steps:
            recorder.decompressed(self.trace, start)
            yield wire
            start = time.perf_counter()
        codec.launch()
        for part in self._parts:
            part.see()
        recorder.decompressed(self.trace, start)
        yield Wire(partial(comm.gather_within, results, self._buffer, self._counts))
        start = time.perf_counter()
        self._deliver()
        recorder.decompressed(self.trace, start)
