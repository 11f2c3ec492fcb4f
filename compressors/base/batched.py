"""Many tensors a call in host memory: what a small one costs is mostly the calls around its kernel.

What is computed for a tensor does not depend on what shares its call: results are those of the
methods that take a single tensor, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.errors import CompressorError, PayloadError
from ringlet.compressors.core.lengths import check_parts
from ringlet.compressors.core.traits import Part, Payload

Kernel = Callable[..., bool | None]
Key = Callable[[int, Context], int]
# By column: where values and the residual lie, the key, the offset, where a second memory lies, and
# the tensor's own key, for what draws besides.
Row = tuple[int, int, int, int, int, int]
VALUES, RESIDUAL, KEY, OFFSET, SECOND, OWN = range(6)
COLUMNS = 6
LENGTH = 0  # the first column of a payload's row; the others are where its arrays lie
ARRAYS = 4  # that a payload of fixed size has at most

_RUN = 1 << 17  # elements that kernels made of others take at once, while they are in the cache


def own_key(n: int, ctx: Context) -> int:
    """Return the key of the tensor's own random numbers."""
    return ctx.key()


class RowMemory(NamedTuple):
    """An array of a context's state of which rows tell.

    ``of(n, ctx)`` returns what ``n`` elements have of it, or None in a stage that has none; that is
    ``width`` bytes for each ``block`` of elements. ``keys`` name the entries of the state in which
    ``of`` may find it, where nothing else but the stage decides about that: it need not be asked
    again while the state has the same arrays.
    """

    of: Callable[[int, Context], Array | None]
    keys: tuple[str, ...] = ()
    width: int = 4
    block: int = 1

    def place(self, n: int, ctx: Context) -> int:
        """Return where it lies; 0 where there is none."""
        held = self.of(n, ctx)
        return 0 if held is None else address(held, -(-n // self.block))


class Finishing(NamedTuple):
    """What ``Compressor.finish`` does with what is combined, for many tensors a call.

    ``finish(rows, lengths, received, sent)`` is given a row of ``row`` for each, how many elements
    it has (uint64), and where two arrays (float32) lie, both of which it may change. In stage 1
    these are the combined result, and what this rank's own payload decodes to; in stage 2, at the
    owner of a shard, what the sum's payload decodes to, and the sum. ``memories`` are two.
    """

    memories: tuple[RowMemory, ...]
    finish: Callable[[Array, Array, Array, Array], None]

    def row(self, n: int, ctx: Context) -> Row:
        """Return a tensor's row: where memories lie."""
        first, second = (memory.place(n, ctx) for memory in self.memories)
        return 0, first, 0, 0, second, 0


class Batched(NamedTuple):
    """Kernels for any number of tensors (flat float32) a call; all of one stage.

    ``encode(tensors, payloads, decay)`` and ``decode(outs, payloads, scale)`` take tables of
    addresses as ``kernels.cpu.common.batched`` has them, and ``encode_fed`` renews residuals
    too; where there is none, feedback is what ``Compressor.feedback_into`` makes of the other two.
    ``decode`` returns False where a payload has an index beyond its tensor. ``names`` are the
    payload's arrays, four at most, in the kernels' order. ``key`` tells the key of a tensor's
    random numbers; kernels that draw none are given 0. ``memories`` are the residual, if there is
    one, and perhaps one more. Where ``draws_own``, something draws by the tensor's own key as well.
    Where ``keyed``, decoding draws: ``decode`` is given a fourth table, rows with keys and offsets.

    Where sizes vary with the values (``varies``), a payload's row has two columns for each array,
    as many as there are: where it lies, and how many elements it has. ``encode`` fills in the
    latter, and there is room for as many as ``layout`` says, which is the most.

    Where there is ``finishing``, it does what the compressor's ``finish`` does, of tensors that
    these kernels have encoded, and those of a shard.

    A row for a whole tensor serves its pieces too, at the granularity that traits promise: what
    begins ``n`` elements later has its values, its memories and its offset ``n`` elements later.
    """

    label: Callable[[], str]  # of the compressor
    layout: Callable[[int], Sequence[Part]]
    names: tuple[str, ...]
    encode: Kernel
    encode_fed: Kernel | None
    decode: Kernel
    draws: bool = False
    memories: tuple[RowMemory, ...] = ()
    decay: float = 1.0
    key: Key = own_key
    keyed: bool = False
    draws_own: bool = False
    varies: bool = False
    finishing: Finishing | None = None

    def table(self, payloads: Sequence[Payload], lengths: Sequence[int]) -> Array:
        """Return where payloads of so many elements lie; of use as long as they are there.

        Raises PayloadError for one that is not of its layout, unless sizes vary.
        """
        rows, names = [], self.names
        for payload, n in zip(payloads, lengths, strict=True):
            if not self.varies:
                check_parts(self.label, self.layout(n), payload)
            sizes = [len(payload[p]) for p in names]
            places = [address(payload[p], size) for p, size in zip(names, sizes, strict=True)]
            rows.append(self.payload_row(n, places, sizes))
        return np.array(rows, np.uint64).reshape(len(rows), self.columns)

    @property
    def columns(self) -> int:
        """How many columns a payload's row has."""
        return 1 + (2 * len(self.names) if self.varies else ARRAYS)

    @property
    def placed(self) -> slice:
        """The columns that tell where the arrays of a payload lie."""
        return slice(1, self.columns, 2) if self.varies else slice(1, 1 + len(self.names))

    def payload_row(self, n: int, places: Sequence[int], sizes: Sequence[int] = ()) -> list[int]:
        """Return the row of a payload of ``n`` elements, whose arrays lie at ``places``."""
        row = [n, *[0] * (self.columns - 1)]
        row[self.placed] = places
        if self.varies:
            row[2::2] = sizes or [0] * len(places)
        return row

    @property
    def asks(self) -> bool:
        """Whether a row depends on the context: on what is remembered, or drawn."""
        return self.draws or bool(self.memories)

    def values(self, x: Array, ctx: Context) -> Row:
        """Return a tensor's row for ``encode_into``.

        It tells where ``x`` and memories lie, which have to stay there. Raises CompressorError for
        arrays with gaps, and where what is remembered does not fit.
        """
        return self.row(address(x, x.size), x.size, ctx)

    def row(self, at: int, n: int, ctx: Context) -> Row:
        """Return the same of ``n`` values that lie ``at`` an address."""
        residual, second, *_ = (*(memory.place(n, ctx) for memory in self.memories), 0, 0)
        key, own = self.key(n, ctx) if self.draws else 0, ctx.key() if self.draws_own else 0
        return at, residual, key, ctx.offset, second, own

    def decode_row(self, n: int, ctx: Context) -> Row:
        """Return a tensor's row for ``sum_into``, with what is drawn where it is decoded."""
        return 0, 0, self.key(n, ctx), ctx.offset, 0, 0

    def moved(self, rows: Array, before: Array) -> Array:
        """Return the rows (uint64) of what begins so many elements (uint64) after each of them."""
        found = rows.copy()
        found[:, VALUES] += before * np.uint64(4)
        found[:, OFFSET] += before
        for column, memory in zip((RESIDUAL, SECOND), self.memories, strict=False):
            if rows[:1, column].any():  # all have one, or none
                found[:, column] += before // np.uint64(memory.block) * np.uint64(memory.width)
        return found

    def encode_into(self, rows: Sequence[Row] | Array, payloads: Array) -> None:
        """Encode what ``values`` told of each tensor, into the payloads of a ``table``."""
        if not len(rows):
            return
        tensors = np.ascontiguousarray(rows, np.uint64)
        kernel = self.encode_fed if tensors[0, RESIDUAL] else self.encode
        if kernel is None:
            raise CompressorError(f"{self.label()} has no kernel that renews residuals")
        kernel(tensors, payloads, np.float32(self.decay))

    def sum_into(
        self,
        outs: Sequence[int] | Array,
        tables: Sequence[Array] | Array,
        scale: float = 1.0,
        rows: Sequence[Row] | Array = (),
    ) -> None:
        """Overwrite outputs, which lie at ``outs``, with scale * the sum of payloads, in order.

        ``rows`` are those of ``decode_row``, of use where kernels are ``keyed``. Raises
        PayloadError for an index beyond a tensor's elements.
        """
        if len(outs):
            given = (np.ascontiguousarray(table, np.uint64) for table in (outs, tables, rows))
            places, payloads, drawn = given
            if self.decode_rows(places, payloads, np.float32(scale), drawn) is False:
                raise PayloadError(f"{self.label()} received an index beyond a tensor's elements")

    def decode_rows(
        self, outs: Array, payloads: Array, scale: np.float32, rows: Array
    ) -> bool | None:
        """Call ``decode``, with ``rows`` where it takes them."""
        if self.keyed:
            return self.decode(outs, payloads, scale, rows)
        return self.decode(outs, payloads, scale)


class Exchanged(NamedTuple):
    """One tensor of many that exchange in rounds: the mean of ``x`` goes to ``out``.

    Both are flat float32 without gaps, and may be the same array. ``residual`` is error feedback's.
    """

    x: Array
    out: Array
    ctx: Context
    residual: Array | None = None


class RoundOfMany(NamedTuple):
    """What all ranks combine: ``lengths[i]`` values for tensor ``i``, of one ``dtype``.

    ``write(places)`` writes each tensor's values to its address (uint64). ``op`` and ``dtype`` are
    as in a ``Round``.
    """

    lengths: Sequence[int]
    write: Callable[[Array], None]
    op: str = "mean"
    dtype: str = "float32"


# Is sent the addresses at which combined values lie, until the next ``write`` is over.
ExchangeOfMany = Generator[RoundOfMany, Array, None]


class BatchedRounds(NamedTuple):
    """Exchanges in rounds of any number of tensors together.

    ``takes(shape)`` tells whether a tensor of that shape can be among them. The number of rounds,
    and the lengths in each, depend on shapes and steps alone: another rank may exchange tensor by
    tensor.
    Where there is ``exchange_fed``, it is given residuals and their decay, and renews them.
    """

    takes: Callable[[tuple[int, ...]], bool]
    exchange: Callable[[Sequence[Exchanged]], ExchangeOfMany]
    exchange_fed: Callable[[Sequence[Exchanged], float], ExchangeOfMany] | None = None


def runs(lengths: Array) -> list[slice]:
    """Return the rows, in order, that fit a core's cache together; a long one is by itself."""
    at = np.cumsum(lengths, dtype=np.int64) // _RUN
    ends = [0, *(np.flatnonzero(np.diff(at)) + 1).tolist(), len(lengths)]
    return [slice(start, stop) for start, stop in pairwise(ends)]


def addresses(array: Array, starts: Sequence[int] | Array) -> Array:
    """Return where the elements ``starts`` of an array without gaps lie (uint64)."""
    offsets = np.asarray(starts).astype(np.uint64) * np.uint64(array.itemsize)
    return offsets + np.uint64(address(array, array.size))


def starts_of(lengths: Sequence[int] | Array) -> Array:
    """Return where pieces of so many elements start that lie one behind the other."""
    return np.cumsum(np.concatenate([[0], lengths[:-1]]), dtype=np.int64)


def address(array: Any, n: int) -> int:
    """Return where the ``n`` elements of an array lie, one behind the other."""
    seen = array.__array_interface__
    if seen["strides"] is not None or seen["shape"] != (n,):
        raise CompressorError(f"kernels take flat arrays without gaps, not {list(seen['shape'])}")
    address: int = seen["data"][0]
    return address
