"""Binds the compressors of one bucket to the ring's codec protocol.

Values of a bucket are divided into parts (one, or one per rank); a part holds, tensor after
tensor, the payload of each tensor's shard. Fixed-size payloads lie side by side without headers
and compressors write straight into their place; others lie behind their length (8 bytes), as
``core.payload`` serialises them. What travels has a seal behind it (``ring.collectives.seal``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ringlet.compressors import Context, Payload, PayloadError
from ringlet.compressors.base.contract import storage
from ringlet.compressors.core.payload import (
    PREFIX,
    check_payload,
    deserialise,
    padded,
    serialise,
    serialised_size,
)
from ringlet.fusion.codecs.small_members import SmallMembers
from ringlet.fusion.codecs.varying_members import VaryingMembers
from ringlet.fusion.devices.convert import from_float32
from ringlet.fusion.errors import CompressionFailed
from ringlet.fusion.planning.member import Member
from ringlet.ring.dtypes import Array

_CACHED_VIEWS = 4096


class BucketCodec:
    """The tensors of one bucket on one rank, as a ``ringlet.ring.collectives.codec.Codec``."""

    def __init__(self, members: Sequence[Member], parts: int) -> None:
        self.members = list(members)
        self._place = self.members[0].place
        self.parts = parts  # 1, or the number of ranks
        # The elements of each member that belong to each part.
        self.ranges = [[member.shard(part, parts) for member in members] for part in range(parts)]
        self.fixed = all(member.compressor.traits().fixed_size for member in self.members)
        self._variable: list[Payload] = []
        self._slots = [self._lay_out(part) for part in range(parts)] if self.fixed else []
        self._views: dict[tuple[int, int], list[Payload]] = {}
        self._small: SmallMembers | None = None
        self._varying: VaryingMembers | None = None
        if self.fixed:
            self._small = SmallMembers.of(self.members, self.ranges, self._slots)
        else:
            self._varying = VaryingMembers.of(self.members)
        every = range(len(self.members))
        self._single: list[Sequence[int]] = [every] * parts  # members with calls of their own
        if self._small is not None:
            self._single = [sorted({*every} - {*small}) for small in self._small.indices]
        if self._varying is not None:
            self._single = [sorted({*every} - self._varying.taken)]
        self.unfit: Exception | None = None  # why the values of the step at hand cannot be encoded
        self._freed = 0  # by the pool, when views were last known to be of its buffers

    def capacity(self, part: int) -> int:
        """Return the bytes of ``part``; for variable payloads, those of the step at hand."""
        if self.fixed:
            return self._slots[part][-1]
        nbytes = sum(PREFIX + serialised_size(self._variable[i]) for i in self._single[part])
        return nbytes if self._varying is None else nbytes + self._varying.nbytes

    def member_bytes(self) -> list[float]:
        """Return the bytes of each member's payload, in all parts together."""
        if not self.fixed:
            small = {} if self._varying is None else self._varying.member_bytes()
            return [
                small[i] if i in small else float(PREFIX + serialised_size(payload))
                for i, payload in enumerate(self._variable)
            ]
        return [
            float(sum(slots[i + 1] - slots[i] for slots in self._slots))
            for i in range(len(self.members))
        ]

    def prepare(self) -> None:
        """Begin a step: compress its values, where only that tells how many bytes they take."""
        if self.unfit is not None:
            raise self.unfit
        if self.fixed:
            if self._small is not None:
                self._small.begin()
            return
        self._variable = [{} for _ in self.members]
        if self._varying is not None:
            self._varying.compress()
        overlap = self._place.xp.may_share_memory
        for i in self._single[0]:
            member = self.members[i]
            if member.numel == 0:  # of a tensor with fewer elements than ranks share it
                continue
            context = member.context(0, 1)
            values = member.values()
            payload = member.call(member.compressor.compress, values, context)
            member.call(check_payload, member.compressor.label(), payload)
            # What is returned travels later: it must not be the input, which changes.
            self._variable[i] = {
                name: array.copy() if overlap(array, values) else array
                for name, array in payload.items()
            }

    def encode_into(self, part: int, out: Array) -> int:
        """Encode this rank's values of ``part``, residuals included."""
        if not self.fixed:
            return self._serialise(out)
        ranges, payloads = self.ranges[part], self._of_singles(part, [out])[0]
        for i in self._single[part]:
            member, (start, stop) = self.members[i], ranges[i]
            if stop > start:
                context = member.context(part, self.parts)
                encode = member.compressor.encode_into
                member.call(encode, member.values(start, stop), payloads[i], context)
        if self._small is not None:
            self._small.encode(part, out)
        return self.capacity(part)

    def decode_sum_into(self, part: int, payloads: Sequence[Array]) -> None:
        """Overwrite the outputs with the scaled sum of everybody's payloads, in rank order."""
        singles, decoded = self._received(part, payloads)
        for i in singles:
            member = self.members[i]
            total = self._sum(i, part, [payload[i] for payload in decoded])
            start, stop = self.ranges[part][i]
            out, dtype = member.output[start:stop], member.output_dtype
            from_float32(total, out, dtype, member.workspace, member.postscale)
        if self._small is not None:
            self._small.decode_sum(part, payloads)

    def decode_sum_encode(self, part: int, payloads: Sequence[Array], out: Array) -> int:
        """Sum everybody's payloads of a shard in rank order, scale, and encode the result."""
        *decoded, targets = self._of_singles(part, [*payloads, out])
        for i in self._single[part]:
            member = self.members[i]
            total = self._sum(i, part, [payload[i] for payload in decoded], fresh=True)
            if total.size:
                if member.postscale != 1.0:
                    self._place.xp.multiply(total, np.float32(member.postscale), out=total)
                context = member.context(part, self.parts, stage=2)
                member.call(member.compressor.encode_into, total, targets[i], context)
        if self._small is not None:
            self._small.encode_sum(part, payloads, out)
        return self.capacity(part)

    def decode_into(self, part: int, payload: Array) -> None:
        """Overwrite the outputs of a shard."""
        ranges, payloads = self.ranges[part], self._of_singles(part, [payload])[0]
        for i in self._single[part]:
            member, (start, stop), encoded = self.members[i], ranges[i], payloads[i]
            if stop == start:
                continue
            out = member.output[start:stop]
            dtype = member.output_dtype
            direct = dtype == "float32"
            target = out if direct else member.workspace.array("decoded32", out.size)
            context = member.context(part, self.parts, stage=2)
            member.decode(member.compressor.decompress, encoded, target, context)
            from_float32(target, out, dtype, member.workspace)
        if self._small is not None:
            self._small.decode(part, payload)

    def finish(self) -> set[Member]:
        """Let kernels see the combined results; return the members whose they saw."""
        return {m for some in (self._small, self._varying) if some for m in some.finish()}

    # -- inside -------------------------------------------------------------------------------

    def _sum(self, i: int, part: int, payloads: Sequence[Payload], fresh: bool = False) -> Array:
        """Return member i's sum in float32: in the output where that is float32 and not fresh."""
        member, (start, stop) = self.members[i], self.ranges[part][i]
        n = stop - start
        if member.output_dtype == "float32" and not fresh:
            total = member.output[start:stop]
        else:
            total = member.workspace.array("sum", n)
        if n == 0:
            return total
        context = member.context(part, self.parts)
        try:
            member.decode(member.compressor.sum_into, payloads, total, context)
        except CompressionFailed as error:
            sender = _sender(member, payloads, n, context)
            if sender is None or len(payloads) != member.size:
                raise
            among = " of its process set" if member.request.process_set else ""
            told = f"{error}. Only what rank {sender}{among} has sent cannot be decoded"
            raise CompressionFailed(told) from error.__cause__
        return total

    def _lay_out(self, part: int) -> list[int]:
        """Return where each member's payload begins, and the end of the last."""
        starts = [0]
        for member, (start, stop) in zip(self.members, self.ranges[part], strict=True):
            layout = member.layout(stop - start) if stop > start else ()
            size = sum(padded(storage(p.dtype).itemsize * p.elements) for p in layout)
            starts.append(starts[-1] + size)
        return starts

    def _of_singles(self, part: int, buffers: Sequence[Array]) -> list[list[Payload]]:
        """Return the members' payloads in each buffer, unless all members share calls."""
        if not self._single[part]:
            return [[] for _ in buffers]
        return [self._payloads(part, buffer) for buffer in buffers]

    def _received(
        self, part: int, payloads: Sequence[Array]
    ) -> tuple[Sequence[int], Sequence[Sequence[Payload] | Mapping[int, Payload]]]:
        """Return whose sum is still to be decoded, and everybody's payloads by member.

        Those of small members that vary are decoded by now, unless they make no sense.
        """
        if self._varying is None:
            return self._single[part], self._of_singles(part, payloads)
        begins = self._varying.decode_sum(payloads)
        if begins is None:
            return range(len(self.members)), [self._deserialise(payload) for payload in payloads]
        singles = self._single[part]
        return singles, [
            {i: deserialise(payload[starts[i] : starts[i + 1] - PREFIX]) for i in singles}
            for payload, starts in zip(payloads, begins, strict=True)
        ]

    def _payloads(self, part: int, buffer: Array) -> list[Payload]:
        """Return the members' payloads as views of ``buffer``."""
        if not self.fixed:
            return self._deserialise(buffer)
        # Pooled buffers come back at the same addresses, so the views can be kept. They hold the
        # memory: those of a buffer that the pool has given up would keep it for good.
        if self._freed != self._place.pool.freed:
            self._freed = self._place.pool.freed
            self._views.clear()
        key = (part, self._place.address(buffer))
        views = self._views.get(key)
        if views is None or buffer.size < self._slots[part][-1]:
            views = [
                self._view(member, end - begin, buffer, start)
                for member, (begin, end), start in zip(
                    self.members, self.ranges[part], self._slots[part], strict=False
                )
            ]
            if len(self._views) * max(len(self.members), 1) > _CACHED_VIEWS:
                self._views.clear()
            self._views[key] = views
        return views

    def _view(self, member: Member, n: int, buffer: Array, start: int) -> Payload:
        payload: Payload = {}
        for name, dtype, elements in member.layout(n) if n else ():
            kind = storage(dtype)
            size = kind.itemsize * elements
            if start + size > buffer.size:
                raise PayloadError(f"a payload of {buffer.size} bytes ends inside {name!r}")
            payload[name] = buffer[start : start + size].view(kind)
            start += padded(size)
        return payload

    def _serialise(self, out: Array) -> int:
        end, small = 0, self._varying
        for i, payload in enumerate(self._variable):
            if small is not None and i in small.taken:
                run = small.written.get(i)  # of those from here on
                if run is not None:
                    out[end : end + run.size] = run
                    end += run.size
                continue
            length = serialise(payload, out[end + PREFIX :])
            out[end : end + PREFIX].view(np.uint64)[0] = length
            end += PREFIX + length
        return end

    def _deserialise(self, buffer: Array) -> list[Payload]:
        payloads: list[Payload] = []
        start = 0
        for _ in self.members:
            if start + PREFIX > buffer.size:
                raise PayloadError(f"a payload of {buffer.size} bytes ends too early")
            length = int(buffer[start : start + PREFIX].view(np.uint64)[0])
            start += PREFIX
            payloads.append(deserialise(buffer[start : start + length]))
            start += length
        return payloads


def _sender(member: Member, payloads: Sequence[Payload], n: int, context: Context) -> int | None:
    """Return which of ``payloads`` alone cannot be decoded; None where that is not just one."""
    bad = []
    for i, payload in enumerate(payloads):
        out = member.workspace.array("alone", n)
        try:
            member.decode(member.compressor.decompress, payload, out, context)
        except CompressionFailed:
            bad.append(i)
    return bad[0] if len(bad) == 1 < len(payloads) else None
