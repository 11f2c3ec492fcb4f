"""The small members of a bucket in host memory, encoded and decoded in one call for all of them.

A kernel takes a microsecond for a thousand values, and the calls around it take twenty. What is
known before a step, or of a whole member, is computed in arrays over members and not for each.

Kernels take two tables, a line a member, whose columns ``compressors.base.batched`` names. *Rows*
say where a tensor is: values, residual, key, offset. They are made of whole members, once a step,
and moved to where a part's piece begins. *Layouts* say where payloads are: they are made once, with
offsets from the beginning of a part, to which a step adds the address of its buffer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Self

import numpy as np

from ringlet.compressors import Context, PayloadError
from ringlet.compressors.base.batched import (
    COLUMNS,
    KEY,
    LENGTH,
    OWN,
    VALUES,
    Batched,
    Finishing,
    address,
    addresses,
    own_key,
    starts_of,
)
from ringlet.compressors.base.contract import storage
from ringlet.compressors.core.context import KeysByStep, State
from ringlet.compressors.core.payload import padded
from ringlet.fusion.devices.convert import from_float32, to_float32
from ringlet.fusion.errors import CompressionFailed
from ringlet.fusion.planning.member import Member, named
from ringlet.ring.dtypes import FLOATS, Array

MOST = 1 << 16  # elements of a small one: its sum stays in a core's cache, and no threads share it

_GROUP = 1 << 17  # elements that are converted together, and encoded while they are in the cache
_FLOAT = 4  # bytes
_HALVES = ("float16", "bfloat16")

_Range = tuple[int, int]


class _Piece(NamedTuple):
    """What a small member has of a part: its elements ``start`` to ``stop``."""

    member: Member
    start: int
    stop: int

    def input(self) -> Array:
        return self.member.input[self.start : self.stop]

    def output(self) -> Array:
        return self.member.output[self.start : self.stop]


class _Kept(NamedTuple):
    """Rows of tensors that stay what they are while each context's state has the same arrays.

    Columns of keys, of random numbers, are those of a step: ``counters`` count each tensor's.
    """

    rows: Array
    held: Sequence[tuple[State, str, Any]]
    keys: KeysByStep | None = None
    counters: Sequence[State] = ()
    drawn: Sequence[int] = ()

    @classmethod
    def of(cls, rows: Array, contexts: Sequence[Context], names: Sequence[str]) -> Self:
        """Return rows that tell of what states have under some of ``names``."""
        held = [(c.state, name, c.state.get(name)) for name in names for c in contexts]
        return cls(rows, [each for each in held if each[2] is not None])

    def drawing(
        self, contexts: Sequence[Context], members: Sequence[Member], columns: Sequence[int]
    ) -> Self:
        """Return the same, where ``columns`` have keys."""
        counters = [member.counter for member in members]
        return self._replace(keys=KeysByStep(contexts), counters=counters, drawn=columns)

    def now(self) -> Array:
        """Return a copy, as it is in this step."""
        rows = self.rows.copy()
        if self.keys is not None:
            steps = [counter.get("step", 0) for counter in self.counters]
            rows[:, self.drawn] = self.keys.at(steps)[:, None]
        return rows

    def still(self) -> bool:
        """Whether the states have what they had."""
        for state, key, array in self.held:  # noqa: SIM110 (a generator costs a call for each)
            if state.get(key) is not array:
                return False
        return True


class _Sent(NamedTuple):
    """What was encoded of a part, decoded again: what ``finish`` is told. In stage 2 the sum too.

    Both are lent, and values lie piece after piece.
    """

    decoded: Array
    total: Array | None


def kernels_for(members: Sequence[Member]) -> Batched | None:
    """Return the kernels for many tensors a call that all ``members`` have, in host memory."""
    first = members[0]
    if first.place.ordered or len(members) < 2 or not first.encoded:
        return None
    if any(member.compressor != first.compressor for member in members):
        return None
    return first.compressor.batched()


class SmallMembers:
    """Members that have one compressor and the same scales; ``ranges`` are by part.

    ``starts`` are the bytes at which the payloads of all members begin, by part. ``indices`` tells
    which members are small, in each part. ``begin`` has to come before the first call in a step.
    """

    def __init__(
        self,
        members: Sequence[Member],
        ranges: Sequence[Sequence[_Range]],
        starts: Sequence[Sequence[int]],
        kernels: Batched,
    ) -> None:
        first = members[0]
        self._kernels, self._compressor, self._parts = kernels, first.compressor, len(ranges)
        self._workspace = first.workspace
        self._prescale, self._postscale = first.prescale, first.postscale
        small = [
            member.request.dtype in FLOATS and max(b - a for a, b in own) <= MOST
            for member, own in zip(members, zip(*ranges, strict=True), strict=True)
        ]
        self._members = [member for member, taken in zip(members, small, strict=True) if taken]
        self.indices = [
            [i for i, (a, b) in enumerate(part) if small[i] and b > a] for part in ranges
        ]
        self._pieces = [
            [_Piece(members[i], *part[i]) for i in indices]
            for part, indices in zip(ranges, self.indices, strict=True)
        ]
        self._whole = [_Piece(member, 0, member.numel) for member in self._members]
        number = np.cumsum(small) - 1  # of a member among the small ones
        # By part, of each piece: the row of its member, and the elements of that before it.
        self._owners = [number[indices] for indices in self.indices]
        self._before = [
            np.array([piece.start for piece in pieces], np.uint64) for pieces in self._pieces
        ]
        self._layouts = [
            self._lay_out(pieces, [begins[i] for i in indices])
            for pieces, begins, indices in zip(self._pieces, starts, self.indices, strict=True)
        ]
        self._sizes = [begins[-1] for begins in starts]  # bytes of a part
        self._groups = [_grouped(pieces) for pieces in self._pieces]  # staged together
        self._rows: Array | None = None  # of whole members, in this step
        self._kept: dict[tuple[int, int, bool], _Kept] = {}  # by part, stage, whether to finish
        self._sent: dict[tuple[int, int], _Sent] = {}  # by part and stage, where there is finish()
        self._inputs: list[int] = []  # addresses of inputs; empty: they are staged
        self._outs: list[int] | None = None  # of outputs, where it is known; empty as above

    @classmethod
    def of(
        cls,
        members: Sequence[Member],
        ranges: Sequence[Sequence[_Range]],
        starts: Sequence[Sequence[int]],
    ) -> Self | None:
        """Return the small ones of ``members``; None where there are no kernels for many."""
        kernels = kernels_for(members)
        if kernels is None or kernels.varies:
            return None
        return cls(members, ranges, starts, kernels)

    def begin(self) -> None:
        """Forget where the arrays of the step before lay."""
        self._rows = self._outs = None
        self._forget_sent()

    def encode(self, part: int, out: Array) -> Array:
        """Encode this rank's values of ``part`` into ``out``. Raises CompressionFailed.

        Returns the table of its payloads, which tells where they lie there.
        """
        pieces, rows, table = self._pieces[part], self._part_rows(part), self._table(part, out)
        if self._inputs:
            self._call(self._kernels.encode_into, pieces, rows, table)
        else:
            for a, b in self._groups[part]:
                rows[a:b, VALUES] = self._staged(pieces[a:b])
                self._call(self._kernels.encode_into, pieces[a:b], rows[a:b], table[a:b])
        if self._kernels.finishing is not None:
            self._note_sent(part, 1, table)
        return table

    def decode_sum(self, part: int, payloads: Sequence[Array]) -> None:
        """Overwrite the outputs with the scaled sum of everybody's payloads, in rank order."""
        self.decode_tables(part, [self._table(part, payload) for payload in payloads])

    def decode_tables(self, part: int, tables: Sequence[Array]) -> None:
        """Do the same with payloads of which these tables tell. Raises CompressionFailed."""
        self._decode(part, np.stack(tables), self._postscale, stage=1)

    def decode(self, part: int, payload: Array) -> None:
        """Overwrite the outputs of a shard."""
        self._decode(part, self._table(part, payload)[None], 1.0, stage=2)

    def _decode(self, part: int, tables: Array, scale: float, stage: int) -> None:
        pieces, rows = self._pieces[part], self._decode_rows(part, stage)
        decode, found = self._kernels.sum_into, self._outputs(part)
        if found is not None:
            self._call(decode, pieces, found, tables, scale, rows)
            return
        for a, b in self._groups[part]:
            room, outs = self._room(pieces[a:b])
            self._call(decode, pieces[a:b], outs, tables[:, a:b], 1.0, rows[a:b])
            self._deliver(room, pieces[a:b], scale)

    def encode_sum(self, part: int, payloads: Sequence[Array], out: Array) -> None:
        """Encode the scaled sum of everybody's payloads into ``out``. Raises CompressionFailed."""
        pieces, table = self._pieces[part], self._table(part, out)
        tables = np.stack([self._table(part, payload) for payload in payloads])
        drawn, rows = self._decode_rows(part, 1), self._rows_of(pieces, [], part, self._parts, 2)
        sums = []  # where ``finish`` is told of them
        for a, b in self._groups[part]:
            given, (room, outs) = pieces[a:b], self._room(pieces[a:b])
            self._call(
                self._kernels.sum_into, given, outs, tables[:, a:b], self._postscale, drawn[a:b]
            )
            rows[a:b, VALUES] = outs
            self._call(self._kernels.encode_into, given, rows[a:b], table[a:b])
            if self._kernels.finishing is not None:
                sums.append(room.copy())
        if sums:
            self._note_sent(part, 2, table, sums)

    def finish(self) -> Sequence[Member]:
        """Let kernels see the combined results, and what was sent; return the members they saw."""
        finishing = self._kernels.finishing
        if finishing is None or not self._sent:
            return []
        for (part, stage), (decoded, total) in sorted(self._sent.items(), key=_stage):
            pieces, lengths = self._pieces[part], self._lengths(part)
            rows, sent = self._finishing_rows(part, stage), addresses(decoded, starts_of(lengths))
            finish = partial(self._call, finishing.finish)
            if total is not None:
                finish(pieces, rows, lengths, sent, addresses(total, starts_of(lengths)))
            elif (outs := self._outputs(part)) is not None:
                finish(pieces, rows, lengths, outs, sent)
            else:
                for a, b in self._groups[part]:
                    room, outs = self._room(pieces[a:b])
                    self._widen(pieces[a:b], room)
                    finish(pieces[a:b], rows[a:b], lengths[a:b], outs, sent[a:b])
                    self._deliver(room, pieces[a:b], 1.0)
        self._forget_sent()
        return self._members

    # -- inside -------------------------------------------------------------------------------

    def _lay_out(self, pieces: Sequence[_Piece], begins: Sequence[int]) -> Array:
        """Return the payloads' layout, with offsets from the beginning of a part."""
        kernels, rows = self._kernels, []
        for (member, start, stop), begin in zip(pieces, begins, strict=True):
            found, at = {}, begin
            layout = kernels.layout if kernels.varies else member.layout
            for name, dtype, elements in layout(stop - start):
                found[name] = at
                at += padded(storage(dtype).itemsize * elements)
            rows.append(kernels.payload_row(stop - start, [found[name] for name in kernels.names]))
        return np.array(rows, np.uint64).reshape(len(rows), kernels.columns)

    def _table(self, part: int, buffer: Array) -> Array:
        """Return where the payloads of ``part`` lie, which are in ``buffer``."""
        if buffer.size < self._sizes[part]:
            raise PayloadError(
                f"a payload of {buffer.size} bytes is shorter than its {self._sizes[part]}"
            )
        table = self._layouts[part].copy()
        table[:, self._kernels.placed] += np.uint64(address(buffer, buffer.size))
        return table

    def _part_rows(self, part: int) -> Array:
        """Return the rows of a part's pieces: those of whole members, from where pieces begin."""
        if self._rows is None:
            inputs = [member.input for member in self._members] if self._prescale == 1.0 else []
            self._inputs = _addresses(inputs)
            self._rows = self._rows_of(self._whole, self._inputs, 0, 1, stage=1)
        return self._kernels.moved(self._rows[self._owners[part]], self._before[part])

    def _decode_rows(self, part: int, stage: int) -> Array:
        """Return the rows with what is drawn where a part's pieces are decoded; none if nothing."""
        pieces, parts = self._pieces[part], self._parts
        if not self._kernels.keyed:
            return np.zeros((0, COLUMNS), np.uint64)
        rows = [
            self._kernels.decode_row(stop - start, member.context(part, parts, stage))
            for member, start, stop in pieces
        ]
        return np.array(rows, np.uint64).reshape(len(rows), COLUMNS)

    def _outputs(self, part: int) -> Array | None:
        """Return the addresses of the outputs of a part's pieces; None: they are staged."""
        if self._outs is None:
            self._outs = _addresses([member.output for member in self._members])
        if not self._outs:
            return None
        outs: Array = np.array(self._outs, np.uint64)[self._owners[part]]
        outs += self._before[part] * _FLOAT
        return outs

    def _lengths(self, part: int) -> Array:
        """Return how many elements a part's pieces have."""
        return self._layouts[part][:, LENGTH]

    def _note_sent(
        self, part: int, stage: int, table: Array, sums: Sequence[Array] | None = None
    ) -> None:
        """Decode what was encoded, and keep it until the end of the step."""
        pieces, lengths = self._pieces[part], self._lengths(part)
        if not pieces:
            return
        decoded = self._workspace.lend(int(lengths.sum()))
        outs, rows = addresses(decoded, starts_of(lengths)), self._decode_rows(part, stage)
        self._call(self._kernels.sum_into, pieces, outs, table[None], 1.0, rows)
        total = None
        if sums is not None:
            total = self._workspace.lend(decoded.size)
            np.concatenate(sums, out=total)
        self._sent[part, stage] = _Sent(decoded, total)

    def _forget_sent(self) -> None:
        for arrays in self._sent.values():
            for array in arrays:
                if array is not None:
                    self._workspace.back(array)
        self._sent.clear()

    def _finishing_rows(self, part: int, stage: int) -> Array:
        """Return the rows of a part's pieces for ``finish``."""
        finishing, key = self._kernels.finishing, (part, stage, True)
        assert finishing is not None, "what was sent is kept for it"
        kept = self._kept.get(key)
        if kept is None or not kept.still():
            pieces = self._pieces[part]
            contexts = [member.context(part, self._parts, stage) for member, _, _ in pieces]
            rows = self._asked(pieces, contexts, finishing, self._compressor.finish)
            keys = [key for memory in finishing.memories for key in memory.keys]
            kept = self._kept[key] = _Kept.of(rows, contexts, keys)
        return kept.rows

    def _widen(self, pieces: Sequence[_Piece], room: Array) -> None:
        """Bring the outputs of ``pieces`` into scratch."""
        start = 0
        for piece in pieces:
            stop, own = start + piece.stop - piece.start, piece.member.output_dtype
            room[start:stop] = to_float32(piece.output(), own, self._workspace)
            start = stop

    def _rows_of(
        self,
        pieces: Sequence[_Piece],
        places: Sequence[int],
        part: int,
        parts: int,
        stage: int,
    ) -> Array:
        """Return the rows of ``pieces``, of one part; values lie at ``places``, or none.

        Raises CompressionFailed, which names the tensor.
        """
        kernels, key = self._kernels, (part, stage, False)
        if not kernels.asks:
            rows = np.zeros((len(pieces), COLUMNS), np.uint64)
        elif (kept := self._kept.get(key)) is not None and kept.still():
            rows = kept.now()
        else:
            contexts = [member.context(part, parts, stage) for member, _, _ in pieces]
            compressor = self._compressor
            encode = compressor.compress if kernels.varies else compressor.encode_into
            rows = self._asked(pieces, contexts, kernels, encode)
            known = all(memory.keys for memory in kernels.memories)
            if known and (not kernels.draws or kernels.key is own_key):
                names = [name for memory in kernels.memories for name in memory.keys]
                kept = _Kept.of(rows.copy(), contexts, names)
                if drawn := [KEY] * kernels.draws + [OWN] * kernels.draws_own:
                    kept = kept.drawing(contexts, [piece.member for piece in pieces], drawn)
                self._kept[key] = kept
        rows[:, VALUES] = places or 0
        return rows

    def _asked(
        self,
        pieces: Sequence[_Piece],
        contexts: Sequence[Context],
        kernels: Batched | Finishing,
        method: Callable[..., Any],
    ) -> Array:
        """Return rows with what kernels, in the place of ``method``, remember of each piece."""
        rows = np.zeros((len(pieces), COLUMNS), np.uint64)
        row = kernels.row if isinstance(kernels, Finishing) else partial(kernels.row, 0)
        for i, ((member, start, stop), ctx) in enumerate(zip(pieces, contexts, strict=True)):
            try:
                rows[i] = row(stop - start, ctx)
            except BaseException as error:
                what = member.described
                raise CompressionFailed.of(self._compressor, method, what, error) from error
        return rows

    def _room(self, pieces: Sequence[_Piece]) -> tuple[Array, Array]:
        """Return scratch (float32) for the values of ``pieces``, and their addresses."""
        ends = [0, *accumulate(piece.stop - piece.start for piece in pieces)]
        room = self._workspace.array("small", ends[-1])
        begins = np.array(ends[:-1], np.uint64)
        return room, begins * _FLOAT + np.uint64(address(room, room.size))

    def _staged(self, pieces: Sequence[_Piece]) -> Array:
        """Bring the inputs of ``pieces``, prescaled, into scratch; return their addresses."""
        room, places = self._room(pieces)
        dtype, inputs = pieces[0].member.request.dtype, [piece.input() for piece in pieces]
        if dtype in _HALVES:
            joined = self._workspace.array("small16", room.size, inputs[0].dtype)
            np.concatenate(inputs, out=joined)
            to_float32(joined, dtype, self._workspace, "small", self._prescale)
            return places
        np.concatenate(inputs, out=room, casting="same_kind")
        if self._prescale != 1.0:
            np.multiply(room, np.float32(self._prescale), out=room)
        return places

    def _deliver(self, room: Array, pieces: Sequence[_Piece], factor: float) -> None:
        """Write ``factor`` times the values of ``pieces`` to their outputs."""
        start, found = 0, {piece.member.output_dtype for piece in pieces}
        dtype = found.pop()
        if found or dtype not in _HALVES:
            for piece in pieces:
                stop = start + piece.stop - piece.start
                own = piece.member.output_dtype
                from_float32(room[start:stop], piece.output(), own, self._workspace, factor)
                start = stop
            return
        joined = self._workspace.array("small16", room.size, pieces[0].member.output.dtype)
        from_float32(room, joined, dtype, self._workspace, factor)
        for piece in pieces:
            stop = start + piece.stop - piece.start
            piece.output()[...] = joined[start:stop]
            start = stop

    def _call(self, kernels: Callable[..., None], pieces: Sequence[_Piece], *args: Any) -> None:
        """Call kernels; what they raise is told with the tensors' names, as CompressionFailed."""
        try:
            kernels(*args)
        except BaseException as error:
            what = named([piece.member for piece in pieces])
            raise CompressionFailed.of(self._compressor, kernels, what, error) from error


_FLOAT32 = np.dtype(np.float32)


def _stage(sent: tuple[tuple[int, int], _Sent]) -> int:
    return sent[0][1]


def _addresses(arrays: Sequence[Array]) -> list[int]:
    """Return the addresses of arrays; nothing unless all are of float32 and without gaps."""
    if any(array.dtype != _FLOAT32 or not array.flags.c_contiguous for array in arrays):
        return []
    return [address(array, array.size) for array in arrays]


def _grouped(pieces: Sequence[_Piece]) -> list[_Range]:
    """Return runs of pieces of one dtype, of so many elements together at most."""
    ends, total = [0], 0
    for i, (before, piece) in enumerate(pairwise(pieces), 1):
        total += before.stop - before.start
        another = before.member.request.dtype != piece.member.request.dtype
        if another or total + piece.stop - piece.start > _GROUP:
            ends.append(i)
            total = 0
    return list(pairwise([*ends, len(pieces)])) if pieces else []
