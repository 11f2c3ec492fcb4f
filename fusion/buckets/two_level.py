"""A bucket over two levels: dense sums inside every host, compressed ones of their shards between.

Each rank compresses its shard of every tensor of the host's sum, with residuals of its own for it.
What it holds back of a whole tensor, from other ranks or hosts before, goes into the next sum.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import cast

import numpy as np

from ringlet.compressors.core.context import SECOND_STAGE, State
from ringlet.compressors.core.shard_name import ShardName, is_shard
from ringlet.compressors.states import whole_residual
from ringlet.fusion.buckets.bucket import Bucket
from ringlet.fusion.codecs.bucket_codec import BucketCodec
from ringlet.fusion.devices.convert import from_float32, to_float32
from ringlet.fusion.peers import Track
from ringlet.fusion.planning.member import Member
from ringlet.fusion.planning.strategy import choose
from ringlet.fusion.recording.recorder import Recorder
from ringlet.fusion.recording.watched_communicator import unwatched
from ringlet.ring.collectives.compressed import Allocate
from ringlet.ring.collectives.two_level import HostShard, room_of, two_level, within
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.ring.pipeline import ALONE, Steps
from ringlet.ring.rank_order import even_counts
from ringlet.ring.transports.hierarchical import HierarchicalCommunicator


class TwoLevelBucket(Bucket):
    """Members whose payloads must be decoded to be added."""

    def __init__(self, members: Sequence[Member], comm: HierarchicalCommunicator) -> None:
        super().__init__(members, comm.size)
        self._seen, self._finishing = bool(self._finishing), []  # of its shard, by the codec
        self._comm, local = comm, comm.local
        self._shares = [even_counts(member.numel, local.size) for member in self.members]
        self._counts = self._lay_out()  # elements of each local rank's shard
        self._starts = [[0, *accumulate(share)] for share in self._shares]
        starts = [
            member.start + at[local.rank]
            for member, at in zip(self.members, self._starts, strict=True)
        ]
        self._names = [
            ShardName.of(comm.cross.origin, start, start + share[local.rank], member.request.numel)
            for member, start, share in zip(self.members, starts, self._shares, strict=True)
        ]
        self._owing: set[int] = set()  # members that paid back, in the step at hand, what they owe
        self._parts = _shard_members(self.members, self._names, comm)
        self._codec = self._codec_of(_parts_between(self.members[0], comm.cross.size))
        self._buffer: Array = np.empty(0, np.float32)
        mine, hosts = self._counts[local.rank], comm.cross.size
        self.arrives = 8 * mine  # bytes of the shard's sum and of the result
        if self._codec.fixed:
            self.arrives += room_of(self._codec, hosts, comm.cross.rank)
        else:  # no payload takes much more than what it stands for
            self.arrives += (1 + hosts) * (5 * mine + 1024 * len(self.members))

    def _lay_out(self) -> list[int]:
        """Decide where shards lie in the fusion buffer; return the elements of each."""
        # One behind the other, each of them tensor after tensor.
        ranks = range(self._comm.local.size)
        sizes = [share[rank] for rank in ranks for share in self._shares]
        self._ends = [0, *accumulate(sizes)]
        return [sum(share[rank] for share in self._shares) for rank in ranks]

    def _codec_of(self, parts: int) -> BucketCodec:
        """Return what encodes this rank's shards, and decodes them, in ``parts``."""
        return _ShardCodec(self._parts, parts)

    def _encode(self) -> int:
        self._codec.unfit = None
        self._buffer = self._lease.allocate(4 * sum(self._counts)).view(np.float32)
        multiply = self.place.xp.multiply
        for i, member in enumerate(self.members):
            request, workspace = member.request, member.workspace
            values = to_float32(member.input, request.dtype, workspace)
            average = request.op is ReduceOp.AVERAGE
            factor = request.prescale / (len(self._counts) if average else 1)
            for here, part in self._pairs(i, values):
                multiply(part, np.float32(factor), out=here)
            owed = self._owed(i)
            if owed is not None:
                for here, part in self._pairs(i, owed):
                    here += part * np.float32(factor / member.prescale)
        return self._buffer.nbytes

    def encode_nothing(self, error: Exception) -> int:
        """Let this rank's shard fail, which all ranks are told of in the exchange."""
        self._buffer = self._lease.allocate(4 * sum(self._counts)).view(np.float32)
        self._codec.unfit = error
        return self._buffer.nbytes

    def _exchange(self, track: Track, sizes: list[int], recorder: Recorder, epoch: int) -> Steps:
        comm, codec, lease = self._comm, self._codec, self._lease
        hosts = comm.cross
        sums, results = self._bind()
        allocate: Allocate = lease.allocate
        if codec.fixed:  # else it is known too late how much, and this has to be alone
            allocate = within(lease.allocate(room_of(codec, hosts.size, hosts.rank)))
        self.fatal = self._seen  # some ranks may have seen the sum of their shard, and others not
        shard, plan = HostShard(codec, sums, results), self.plan_of(epoch)
        lane = partial(_lane, track)
        steps = two_level(lane, self._buffer, self._buffer, self._counts, shard, allocate, plan)
        if not codec.fixed:
            yield ALONE
            lease.use_reserve()
        start_s = time.perf_counter()
        for wire in steps:
            recorder.decompressed(self.trace, start_s)
            yield wire
            start_s = time.perf_counter()
        self.note_sum(self._buffer, "float32")
        self._deliver()
        recorder.decompressed(self.trace, start_s)

    def _bind(self) -> tuple[Array, Array]:
        """Let shards lie in what is allocated for their sums and results, which is returned."""
        local = self._comm.local
        mine, starts = self._counts[local.rank], self._starts_in_shard()
        sums, results = (self._lease.allocate(4 * mine).view(np.float32) for _ in range(2))
        for part, start in zip(self._parts, starts, strict=True):
            own = slice(start, start + part.numel)
            part.input, part.output = sums[own], results[own]
        return sums, results

    def _starts_in_shard(self) -> list[int]:
        """Return where in this rank's shard the members' begin."""
        ends = list(accumulate(part.numel for part in self._parts))
        return [0, *ends[:-1]]

    def _deliver(self) -> None:
        """Copy what the fusion buffer holds to the members' outputs."""
        for i, member in enumerate(self.members):
            dtype = member.output_dtype
            wide = member.output
            if dtype != "float32":
                wide = member.workspace.array("decoded32", member.numel)
            for here, part in self._pairs(i, wide):
                part[...] = here
            if i in self._owing:
                self._paid(member, wide)
            from_float32(wide, member.output, dtype, member.workspace)

    def let_go(self) -> None:
        """Refer to no tensor any more, nor to the fusion buffer."""
        super().let_go()
        for part in self._parts:
            part.forget()

    def settle(self) -> None:
        """Nothing: every step takes up what there is of other shards."""

    def _owed(self, i: int) -> Array | None:
        """Return what this rank holds back of all of member ``i``, as float32; None for nothing.

        Raises CompressionFailed where that is of a tensor of another size.
        """
        member = self.members[i]
        self._owing.discard(i)
        member.reclaim(partial(_is_gone, self._names[i], member))
        whole: Array | None = member.call(whole_residual, member.compressor, member.context(0, 1))
        if whole is None or not member.prescale:
            return None
        self._owing.add(i)
        return whole[member.start : member.start + member.numel]

    def _paid(self, member: Member, result: Array) -> None:
        """Forget what went into ``result``, but for where that is not finite."""
        whole = member.state.get("residual")
        if whole is None:  # other pieces of the tensor have paid all that there was
            return
        whole[member.start : member.start + member.numel][self.place.xp.isfinite(result)] = 0
        if not self.place.to_host(whole.any()):
            del member.state["residual"]

    def _pairs(self, i: int, values: Array) -> Iterator[tuple[Array, Array]]:
        """Yield views of the fusion buffer, and of ``values`` of member ``i``, that are alike."""
        starts, tensors = self._starts[i], len(self.members)
        for rank, at in enumerate(range(i, len(self._ends) - 1, tensors)):
            here, there = slice(*self._ends[at : at + 2]), slice(*starts[rank : rank + 2])
            yield self._buffer[here], values[there]


def _lane(track: Track, number: int) -> HierarchicalCommunicator:
    return cast(HierarchicalCommunicator, unwatched(track.lane(number)))


class _ShardCodec(BucketCodec):
    """Lets compressors see the sum of their shard, as soon as that is decoded."""

    def decode_sum_into(self, part: int, payloads: Sequence[Array]) -> None:
        super().decode_sum_into(part, payloads)
        self._see()

    def decode_into(self, part: int, payload: Array) -> None:
        super().decode_into(part, payload)
        if part == self.parts - 1:
            self._see()

    def _see(self) -> None:
        seen = self.finish()
        for member in self.members:
            if member not in seen:
                member.see()


def _parts_between(member: Member, hosts: int) -> int:
    """Return into how many parts hosts divide a shard: 1, then payloads are gathered."""
    forced, n = member.request.collective, member.request.numel
    chosen = choose(member.compressor, hosts, forced, n, member.link)
    return hosts if chosen == "scatter_reduce" else 1


def _is_gone(own: ShardName, member: Member, key: str) -> bool:
    """Whether ``key`` names a part that nobody uses: one of one level, or where ``own`` is now."""
    if not is_shard(key):
        return key.startswith(SECOND_STAGE)
    name = ShardName.read(key)
    if name is None or name.numel != own.numel:
        return True
    other = name.start < member.start + member.numel and name.stop > member.start
    return other and name != own


def _shard_members(
    members: Sequence[Member], names: Sequence[ShardName], comm: HierarchicalCommunicator
) -> list[Member]:
    """Return this rank's shards of ``members`` as tensors of their own, among the hosts."""
    shards = []
    for member, name in zip(members, names, strict=True):
        request = replace(
            member.request,
            name=f"{member.name}/{comm.local.rank}",
            dtype="float32",
            shape=(name.stop - name.start,),
            prescale=1.0,
        )
        state: State = {}
        cross = comm.cross
        if member.compressor.traits().stateful:
            state = member.state.setdefault(str(name), state)
        shard = Member(
            request,
            member.declared,
            cross.rank,
            cross.size,
            member.seed,
            member.place,
            state,
            clock=member.state,
            however_small=True,
        )
        shards.append(shard)
    return shards
