"""A fusion bucket of uncompressed tensors: copied together, reduced as they are, copied apart."""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import partial
from itertools import accumulate

from ringlet.fusion.buckets.bucket import Bucket
from ringlet.fusion.devices.convert import combined_as, scale_into
from ringlet.fusion.peers import Peers, Track
from ringlet.fusion.planning.member import Member
from ringlet.fusion.recording.recorder import Recorder
from ringlet.ring.collectives.adasum import adasum
from ringlet.ring.collectives.checksum import SPAN, is_due
from ringlet.ring.collectives.reduce import allreduce_steps
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import FLOATS, Array, storage
from ringlet.ring.pipeline import Steps, Wire


class PlainBucket(Bucket):
    """Members of one dtype, operation and scale, which is applied to all of them at once.

    They stay on one level unless ``hierarchical``.
    """

    def __init__(self, members: Sequence[Member], size: int, hierarchical: bool = True) -> None:
        super().__init__(members, size)
        self._hierarchical = hierarchical
        first = self.members[0]
        self._dtype, self._op = first.request.dtype, first.request.op
        self._wire = combined_as(self._dtype, self._op)
        self._scales = first.prescale, first.postscale, first.divisor
        self._scratch = first.workspace
        self._ends = [0, *accumulate(member.numel for member in self.members)]
        self._nbytes = self._ends[-1] * storage(self._wire).itemsize
        bounds = zip(self._ends, self._ends[1:], strict=False)
        self._slots = [slice(start, end) for start, end in bounds]  # of members, in the buffer
        self._spans = self._cut()
        self._buffer: Array = self.members[0].output

    def _cut(self) -> list[tuple[slice, list[tuple[Member, slice, slice]]]]:
        """Return spans of the buffer, and what lies in each: a member, where in it, and where.

        What was read to be compared is still in a core's cache to be scaled.
        """
        total = self._ends[-1]
        ordered = self.place.ordered
        length = max(1, total) if ordered else SPAN // storage(self._wire).itemsize
        spans, pieces, end = [], [], length
        for member, slot in zip(self.members, self._slots, strict=True):
            start = slot.start
            while start < slot.stop:
                stop = min(slot.stop, end)
                piece = slice(start - slot.start, stop - slot.start)
                pieces.append((member, piece, slice(start, stop)))
                start = stop
                if stop == end:
                    spans.append((slice(end - length, end), pieces))
                    pieces, end = [], end + length
        if pieces:
            spans.append((slice(end - length, total), pieces))
        return spans

    def among(self, peers: Peers) -> Peers:
        """Return ``peers``, on one level unless more were asked for."""
        return peers if self._hierarchical else peers.flat

    def let_go(self) -> None:
        """Refer to no tensor any more, which a fusion buffer may be."""
        super().let_go()
        self._buffer = self.members[0].output

    def _encode(self) -> int:
        prescale = self._scales[0]
        as_they_are = self._wire == self._dtype
        if len(self.members) == 1 and as_they_are:
            member = self.members[0]  # alone, a tensor needs no fusion buffer
            same = member.output_dtype == self._dtype
            self._buffer = member.output if same else member.input
            scale_into(member.input, prescale, self._buffer, self._dtype, self._scratch)
            return self._nbytes
        self._buffer = self._lease.allocate(self._nbytes).view(storage(self._wire))
        if prescale == 1.0 and as_they_are:
            self.place.xp.concatenate([member.input for member in self.members], out=self._buffer)
            return self._nbytes
        for member, slot in zip(self.members, self._slots, strict=True):
            scale_into(member.input, prescale, self._buffer[slot], self._dtype, self._scratch)
        return self._nbytes

    def _exchange(self, track: Track, sizes: list[int], recorder: Recorder, epoch: int) -> Steps:
        comm, buffer = track.comm, self._buffer
        if self._op is ReduceOp.ADASUM:
            sent = 2 * (self.size - 1) / self.size * self._nbytes
            yield Wire(partial(adasum, comm, buffer, self._ends, self._dtype), sent)
        else:
            op = ReduceOp.SUM if self._op is ReduceOp.AVERAGE else self._op
            allocate = self._lease.allocate
            yield from allreduce_steps(track.lane, buffer, op, self._wire, allocate)
        start = time.perf_counter()
        compared = self._op is not ReduceOp.ADASUM and self.verify
        alike = self._scaled_alike()
        for number, (span, pieces) in enumerate(self._spans):
            if compared and is_due(number, self._nbytes, compared, self.turn):
                self.note_sum(buffer[span], self._wire, self._op)
            if alike and len(pieces) > 1:
                summed, factor = buffer[span], self._scales[1]
                scale_into(summed, factor, summed, self._dtype, self._scratch)
                for member, piece, here in pieces:
                    member.output[piece] = buffer[here]
                continue
            for member, piece, here in pieces:
                _, postscale, divisor = self._scales
                if member.contributors:  # of all of them, or of none
                    postscale, divisor = member.rescaling(member.contributors)
                out = member.output[piece]
                values = out if buffer is member.output else buffer[here]
                scale_into(values, postscale, out, self._dtype, self._scratch, divisor)
        recorder.decompressed(self.trace, start)

    def _scaled_alike(self) -> bool:
        """Whether small members may be scaled in the buffer, with one call for many of them."""
        if self._dtype not in FLOATS or self.place.ordered or self.members[0].contributors:
            return False
        # The result of 16 bits may be float32.
        return {member.output.dtype for member in self.members} == {self._buffer.dtype}

    def _count(self) -> None:
        pass  # no compressor remembers anything

    def _make_up(self) -> None:
        pass  # done
