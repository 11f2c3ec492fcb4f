"""Buckets of compressors that exchange in rounds, such as PowerSGD.

Every member runs a generator. What the members yield in one round is fused into one buffer per
dtype and operation, combined, and handed back. Each round is voted on like a bucket of its own, and
so is the end, so that a generator that raises on one rank becomes an error on all of them. One vote
is enough for the few rounds of Ringlet's own low-rank compressors, say: if these raise, they do it
before their first round.
"""

from __future__ import annotations

import logging
import time
import zlib
from collections.abc import Generator, Sequence
from functools import partial

import numpy as np

from ringlet.compressors import Compressor, CompressorError, Exchange, Modifier, Round
from ringlet.compressors.base.nesting import is_plugin
from ringlet.fusion.buckets.bucket import Bucket
from ringlet.fusion.codecs.small_exchanges import SmallExchanges
from ringlet.fusion.devices.convert import from_float32
from ringlet.fusion.devices.fusion_buffers import Lease
from ringlet.fusion.peers import LANES, Track
from ringlet.fusion.planning.member import Member, named
from ringlet.fusion.recording.recorder import Recorder
from ringlet.ring.communicator import Communicator, ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.ring.errors import ExchangeFailed
from ringlet.ring.pipeline import Steps, Wire

log = logging.getLogger("ringlet")

_WIRE = ("int8", "int16", "int32", "int64", "float32")
_LANES_A_ROUND = 2
_WIDER = {"int16": "int32"}  # where the transport, like NCCL, does not add these
_BYTES = 40  # bits of a vote's size that are bytes; those above tell plugins' rounds apart
_MOST = (1 << _BYTES) - 1


class RoundsBucket(Bucket):
    """Members whose compressors declare ``combine="rounds"``."""

    def __init__(self, members: Sequence[Member], size: int) -> None:
        super().__init__(members, size)
        self._running: dict[Member, tuple[Exchange, Array]] = {}
        self._rounds: dict[Member, Round] = {}
        self._buffers: dict[tuple[str, str], Array] = {}
        self._pieces: dict[Member, Array] = {}
        self._outs: dict[Member, Array] = {}  # where later rounds still read the input
        self._small = SmallExchanges.of(self.members)
        self._error: Exception | None = None
        self._one_vote = self._fits_one_exchange()
        self._plugins = any(is_plugin(member.compressor) for member in self.members)

    @property
    def final(self) -> bool:
        """Whether all rounds are over, or will be: ranks vote on nothing after that."""
        return self._one_vote or not self._under_way

    @property
    def _under_way(self) -> bool:
        """Whether a member waits for a round."""
        return bool(self._running or (self._small is not None and self._small.members))

    def abandon(self) -> None:
        """Give buffers back and forget unfinished exchanges."""
        super().abandon()
        for generator, _ in self._running.values():
            try:
                generator.close()
            except BaseException:  # of a step that is over, or given up for a reason of its own
                log.debug("an exchange in rounds cannot be closed", exc_info=True)
        if self._small is not None:
            self._small.abandon()
        self._running.clear()
        self._rounds.clear()
        self._error = None

    def _encode(self) -> int:
        if not self.more:
            self._start()
        if self._error is not None:
            raise self._error
        self._fill()
        if not self._under_way:
            return 0  # the last vote: nothing moves any more
        nbytes = max(1, sum(buffer.nbytes for buffer in self._buffers.values()))
        return nbytes | self._form() << _BYTES if self._plugins else nbytes

    def bytes_of(self, sizes: Sequence[int]) -> int:
        """Return how many bytes ranks bring that have voted with ``sizes``."""
        return sum(size & _MOST for size in sizes)

    def _form(self) -> int:
        """Return bits of what members yield: other operations must not meet in a collective."""
        small = self._small
        together = [] if small is None else [small.key, *small.lengths]
        return zlib.crc32(repr([together, self._yielded()]).encode()) >> 8

    def _yielded(self) -> list[tuple[int, str, str, int]]:
        """Return who yields what: member, operation, dtype and number of values."""
        found = ((i, self._rounds.get(member)) for i, member in enumerate(self.members))
        return [(i, r.op, r.values.dtype.name, r.values.size) for i, r in found if r is not None]

    def _compare(self, track: Track, sizes: Sequence[int]) -> None:
        """Raise ExchangeFailed, on all ranks, where their members yield different rounds."""
        nbytes = [size & _MOST for size in sizes]
        if nbytes.count(nbytes[0]) == len(sizes) and sizes.count(sizes[0]) != len(sizes):
            witness = next(rank for rank, size in enumerate(sizes) if size != sizes[0])
            told = ", ".join(f"{op} of {n} {dtype}" for _, op, dtype, n in self._yielded()[:3])
            raise ExchangeFailed(
                f"compressor {str(self.members[0].compressor)!r} yields {told} for "
                f"{named(self.members)}, and other rounds of as many bytes on rank "
                f"{track.ranks[0]}; operations, dtypes and lengths have to be alike on all ranks",
                witness,
            )
        super()._compare(track, nbytes)

    def _fill(self) -> None:
        """Copy what the members have yielded into buffers, in the order of the members."""
        sizes: dict[tuple[str, str], int] = {}
        starts: dict[Member, int] = {}
        small = self._small
        lengths = dict(zip(small.members, small.lengths, strict=True)) if small else {}
        together = small.key if small else ("", "")
        for member in self.members:
            round_ = self._rounds.get(member)
            if round_ is not None:
                key, n = self._key(round_), round_.values.size
            elif (length := lengths.get(member)) is not None:
                key, n = together, length
            else:
                continue
            starts[member] = sizes.get(key, 0)
            sizes[key] = starts[member] + n
        # What a member yields may lie in the buffer of the round before: release that afterwards.
        before, self._lease = self._lease, Lease(self.place.pool)
        self._buffers = {
            key: self._lease.allocate(n * np.dtype(key[1]).itemsize).view(key[1])
            for key, n in sizes.items()
        }
        for member, round_ in self._rounds.items():
            values, start = round_.values, starts[member]
            piece = self._buffers[self._key(round_)][start : start + values.size]
            piece[...] = values
            self._pieces[member] = piece
        if small is not None and lengths:
            small.write(self._buffers[together], [starts[member] for member in lengths])
        before.release()

    def _key(self, round_: Round) -> tuple[str, str]:
        """Return the operation, and the dtype in which values travel."""
        name = round_.values.dtype.name
        return round_.op, _WIDER.get(name, name) if self.place.ordered else name

    def _exchange(self, track: Track, sizes: list[int], recorder: Recorder, epoch: int) -> Steps:
        self.lanes, self.more = 0, False
        while self._under_way:
            yield from self._combine_round(track, recorder)
            if not self._one_vote:
                self.more = True  # at the end too: ranks vote whether all have come to it
                return
            if self._error is not None:
                raise self._error
            if self._under_way:
                self._fill()

    def _fits_one_exchange(self) -> bool:
        """Whether it is known that all rounds find lanes of their own; the same on all ranks."""
        if self.place.ordered or any(member.foreign for member in self.members):
            return False
        most = max(_most_rounds(member.compressor) for member in self.members)
        return most * _LANES_A_ROUND + bool(self._finishing) <= LANES

    def _combine_round(self, track: Track, recorder: Recorder) -> Steps:
        """Combine one round's values, and hand them to the members."""
        buffers = sorted(self._buffers.items(), key=lambda pair: pair[0])
        # Large sums have a lane of their own, as in other buckets.
        for large in (False, True):
            comm = track.lane(self.lanes)
            chosen = [each for each in buffers if comm.splits(each[1]) is large]
            nbytes = 2 * (self.size - 1) / self.size * sum(each.nbytes for _, each in chosen)
            if chosen or not large:
                yield Wire(partial(_combine, comm, chosen), nbytes)
                self.lanes += 1
        for (op, dtype), buffer in buffers:
            self.note_sum(buffer, dtype, ReduceOp.MAX if op == "max" else ReduceOp.SUM)
        start = time.perf_counter()
        for (op, _), buffer in buffers:
            if op == "mean":
                self.place.xp.multiply(buffer, buffer.dtype.type(1.0 / self.size), out=buffer)
        self._resume()
        recorder.compressed(self.trace, start, time.perf_counter())

    def _start(self) -> None:
        together: set[Member] = set()
        if self._small is not None:
            self._small.begin()
            together.update(self._small.members)
        for member in self.members:
            if member in together:
                continue
            x = member.values()
            if not self.place.xp.may_share_memory(x, member.input):
                x = x.copy()  # scratch would not last until the next round
            out = self._output(member)
            generator = member.call(member.compressor.exchange, x, out, member.context(0, 1))
            member.call(check_generator, member.compressor.label(), generator)
            self._running[member] = (generator, out)
            self._step(member, None)

    def _output(self, member: Member) -> Array:
        if member.output_dtype == "float32" and member.compressor.traits().in_place:
            return member.output
        out = self._outs.get(member)
        if out is None:
            out = self._outs[member] = self.place.xp.empty(member.numel, np.float32)
        member.forewarn(out)
        return out

    def _resume(self) -> None:
        """Hand every member what was combined, up to its next round or its end.

        What it raises is kept: the others are told with the next vote, and do not wait in vain.
        """
        try:
            for member in self._small.resume() if self._small is not None else ():
                self._deliver(member, member.output)
            for member in list(self._running):
                dtype = self._rounds[member].values.dtype
                self._step(member, self._pieces[member].astype(dtype, copy=False))
        except Exception as error:
            self._error = error

    def _step(self, member: Member, combined: Array | None) -> None:
        generator, out = self._running[member]

        def exchange() -> Round | None:
            try:
                return next(generator) if combined is None else generator.send(combined)
            except StopIteration:
                return None

        round_ = member.call(exchange)
        if round_ is None:
            del self._running[member]
            self._rounds.pop(member, None)
            if out is not member.output:
                member.check_written(out, member.compressor.exchange)
            self._deliver(member, out)
        else:
            member.call(check_round, member.compressor.label(), round_)
            self._rounds[member] = round_

    def _deliver(self, member: Member, out: Array) -> None:
        factor = member.postscale * self.size  # an exchange ends with the mean, not the sum
        from_float32(out, member.output, member.output_dtype, member.workspace, factor)


def _combine(comm: Communicator, buffers: Sequence[tuple[tuple[str, str], Array]]) -> None:
    for (op, _), buffer in buffers:
        comm.allreduce(buffer, ReduceOp.MAX if op == "max" else ReduceOp.SUM)


def _most_rounds(compressor: Compressor) -> int:
    """Return how many rounds one of Ringlet's own makes at most; too many where it does not say."""
    while isinstance(compressor, Modifier):  # which make none of their own
        compressor = compressor.wrapped_compressor
    return int(getattr(type(compressor), "most_rounds", LANES))


def check_generator(label: str, made: object) -> None:
    """Raise CompressorError unless ``exchange`` has made rounds to come."""
    if not isinstance(made, Generator):
        raise CompressorError(
            f"{label}.exchange is no generator: ranks combine nothing; write p = yield "
            "Round(values, 'mean')"
        )


def check_round(label: str, round_: object) -> None:
    """Raise CompressorError unless ranks can combine what ``label`` has yielded."""
    if not isinstance(round_, Round):
        raise CompressorError(
            f"{label}.exchange yields an object of type {type(round_).__name__}; yield "
            "Round(values, 'mean'), or 'sum' or 'max'"
        )
    values = round_.values
    if not hasattr(values, "dtype") or values.ndim != 1:
        shape = list(values.shape) if hasattr(values, "dtype") else type(values).__name__
        raise CompressorError(
            f"{label}.exchange yields a Round of {shape}; yield a flat array: .reshape(-1)"
        )
    if values.dtype.name not in _WIRE:
        raise CompressorError(
            f"{label}.exchange yields a Round of {values.dtype}, which no wire adds up; yield "
            "float32 or a signed integer: values.astype('float32')"
        )
