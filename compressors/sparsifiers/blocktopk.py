"""Top-k inside blocks, with narrow indices and values, and optionally after a cosine transform.

Sarfi et al., "Communication efficient LLM pre-training with SparseLoCo", arXiv:2508.15706; the
transform as in Peng, Quesnelle and Kingma, "DeMo: decoupled momentum optimization",
arXiv:2411.19870.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ringlet.compressors.base.batched import Batched
from ringlet.compressors.base.bucketed import (
    NAN_BITS,
    Bucketed,
    Kernel,
    lane_sums,
    rounded,
    rounded_up,
    widened,
)
from ringlet.compressors.base.contract import Part, Payload, Traits, keeps, storage
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.errors import OptionError
from ringlet.compressors.core.options import option
from ringlet.compressors.core.packing import pack_bits, packed_size, unpack_bits
from ringlet.compressors.sparsifiers.dct import cosines
from ringlet.compressors.specs.registry import register

if TYPE_CHECKING:
    from ringlet.compressors.kernels.cuda.sparsifiers.blocktopk import BlockCodec

_LARGEST_DCT = 512
_TINY = np.float32(1.5e-36)
_NOTHING: Array = np.empty(0, np.uint16)


@register("block_topk")
class BlockTopK(Bucketed):
    """Send the largest entries of every block of the flattened tensor: the same number in each.

    As in SparseLoCo (arXiv:2508.15706). Of a full block max(1, floor(ratio * block)) entries
    travel, of a shorter last one the same share, rounded up; among equals the lowest index wins.
    Unlike ``topk`` it may be cut at blocks, so it can be reduced in shards. An index takes 8, 12
    (up to blocks of 4096) or 16 bits. Values take ``bits``: 32; 16 (bfloat16); 8 with a scale per
    block; or 2, a sign and which of the block's two mean magnitudes. With ``dct`` blocks go
    through an orthonormal cosine transform first, as in DeMo (arXiv:2411.19870): take
    ``block=64``. NaN counts as largest and is sent. Use it with error feedback.
    """

    paper: ClassVar[str] = "Sarfi, arXiv:2508.15706"
    ratio: float = option(0.01, gt=0, le=1, doc="share of a block's entries that travels")
    block: int = option(4096, ge=16, le=65536, doc="elements of a block")
    bits: int = option(32, choices=(32, 16, 8, 2), doc="bits of a value")
    dct: bool = option(False, doc="select among the coefficients of a cosine transform")

    def validate(self) -> None:
        """A transform costs ``block`` multiplications for every element, and block^2 floats."""
        if self.dct and self.block > _LARGEST_DCT:
            raise OptionError(
                f"block_topk: dct needs blocks of at most {_LARGEST_DCT} elements, "
                f"got block={self.block}; block=64 is usual"
            )

    @property
    def kept(self) -> int:
        """How many entries of a full block travel."""
        return min(self.block, max(1, int(self.block * self.ratio * (1 + 1e-12))))

    @property
    def width(self) -> int:
        """Bits of an index."""
        return 8 if self.block <= 256 else 12 if self.block <= 4096 else 16

    def traits(self) -> Traits:
        """Cut at blocks; contracts by the share kept, less what rounding loses of it."""
        share = self.kept / self.block
        spread = self.kept * (1 + 2**-7) ** 2 / (4 * 127**2)
        delta = {
            32: share,
            16: share * (1 - 2**-12),
            8: share * (1 - spread) if spread < 1 else None,
            2: (1 - 2**-12) / self.block,
        }[self.bits]
        slack = 0.99 if self.dct else 1 - 1e-6  # of arithmetic in float32
        return Traits(
            fixed_size=True, granularity=self.block, delta=delta * slack if delta else None
        )

    def layout(self, n: int) -> tuple[Part, ...]:
        """Packed indices, values (or their codes), and the scales of the blocks."""
        full, last = divmod(n, self.block)
        counts = (self.kept, full), (self._count(last), 1)
        indices = sum(packed_size(k * self.width, 1) * blocks for k, blocks in counts)
        values = sum(self._cells(k) * blocks for k, blocks in counts)
        parts = [Part("indices", "uint8", indices), Part(self._name, self._dtype, values)]
        if self.bits < 16:
            parts.append(Part("scales", "bfloat16", (full + (last > 0)) * self._scales))
        return tuple(parts)

    # -- array code: the kernels agree with it bit for bit ------------------------------------

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Select and quantise full blocks as rows, then the last one."""
        if x.size == 0:
            return {p.name: ctx.xp.empty(0, storage(p.dtype)) for p in self.layout(0)}
        full, pieces = x.size // self.block * self.block, []
        if full:
            pieces.append(self._encode_rows(x[:full].reshape(-1, self.block), self.kept, ctx.xp))
        if full < x.size:
            pieces.append(self._encode_rows(x[None, full:], self._count(x.size - full), ctx.xp))
        return {name: ctx.xp.concatenate([p[name] for p in pieces]) for name in pieces[0]}

    def decode_array(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Put the values at their places among zeros, and transform them back."""
        full, last = divmod(out.size, self.block)
        start: dict[str, int] = dict.fromkeys(payload, 0)
        for rows, length, k in (full, self.block, self.kept), (1, last, self._count(last)):
            if rows * length == 0:
                continue
            sizes = {
                "indices": rows * packed_size(k * self.width, 1),
                self._name: rows * self._cells(k),
                "scales": rows * self._scales,
            }
            piece = {name: a[start[name] :][: sizes[name]] for name, a in payload.items()}
            done = out[: full * self.block] if length == self.block else out[full * self.block :]
            done[...] = self._decode_rows(piece, rows, k, ctx.xp)[:, :length].reshape(-1)
            start = {name: start[name] + sizes[name] for name in start}

    def _encode_rows(self, rows: Array, k: int, xp: Any) -> Payload:
        if self.dct:
            padded = xp.zeros((len(rows), self.block), "float32")
            padded[:, : rows.shape[1]] = rows
            with np.errstate(all="ignore"):
                rows = _weighted_sum(padded, xp.asarray(cosines(self.block)[1]), xp)
        bits = (rows.view("uint32") & 0x7FFFFFFF).astype("int32")
        order = xp.argsort(-bits, axis=1, kind="stable")[:, :k]
        picks = xp.sort(order, axis=1)
        with np.errstate(all="ignore"):
            payload = self._quantise(xp.take_along_axis(rows, picks, axis=1), xp)
        return {"indices": _pack_indices(xp, picks, self.width)} | payload

    def _decode_rows(self, payload: Payload, rows: int, k: int, xp: Any) -> Array:
        picks = _unpack_indices(xp, payload["indices"].reshape(rows, -1), self.width, k)
        dense = xp.zeros((rows, self.block), "float32")
        xp.put_along_axis(dense, picks, self._restore(payload, rows, k, xp), axis=1)
        if self.dct:
            with np.errstate(all="ignore"):
                dense = _weighted_sum(dense, xp.asarray(cosines(self.block)[0]), xp)
        return _array(dense)

    def _quantise(self, values: Array, xp: Any) -> Payload:
        """Return the rows of ``values`` as they travel."""
        if self.bits == 32:
            return {"values": values.reshape(-1)}
        if self.bits == 16:
            raw = values.view("uint32")
            nearest = (raw + 0x7FFF + ((raw >> 16) & 1)) >> 16
            codes = xp.where(xp.isnan(values), (raw >> 16) | 0x40, nearest)
            return {"codes": codes.astype("uint16").reshape(-1)}
        magnitudes = xp.abs(values)
        if self.bits == 8:
            top = magnitudes.max(axis=1)
            finite, usable = xp.isfinite(top), xp.isfinite(top) & (top >= _TINY)
            scales = rounded_up(top / np.float32(127), xp)
            scale = widened(xp.where(usable, scales, 0x3F80))[:, None]
            codes = xp.rint(values * (np.float32(1) / scale)) + np.float32(127)
            codes = xp.where(usable[:, None], codes, xp.where(finite, 127, 0)[:, None])
            scales = xp.where(usable, scales, xp.where(finite, 0, NAN_BITS))
            return {"codes": codes.astype("uint8").reshape(-1), "scales": scales.astype("uint16")}
        wide, k = magnitudes.astype("float64"), values.shape[1]
        mean = lane_sums(wide, xp) / k
        finite, large = xp.isfinite(mean), wide >= mean[:, None]
        above = large.sum(axis=1)
        low = lane_sums(xp.where(large, 0, wide), xp) / xp.maximum(k - above, 1)
        high = lane_sums(xp.where(large, wide, 0), xp) / xp.maximum(above, 1)
        scales = rounded(xp.stack([low, high], axis=1).astype("float32"), xp)
        scales = xp.where(finite[:, None], scales, NAN_BITS).astype("uint16").reshape(-1)
        rows = xp.zeros((len(values), -(-k // 4) * 4), "uint8")
        rows[:, :k] = xp.where(finite[:, None], (values < 0) + 2 * large, 0)
        return {"codes": pack_bits(xp, rows.reshape(-1), 2), "scales": scales}

    def _restore(self, payload: Payload, rows: int, k: int, xp: Any) -> Array:
        """Return the values that travelled, as rows."""
        cells = payload[self._name].reshape(rows, -1)
        if self.bits == 16:
            return widened(cells)
        if self.bits == 32:
            return _array(cells)
        scales = widened(payload["scales"]).reshape(rows, -1)
        if self.bits == 8:
            return _array((cells.astype("float32") - np.float32(127)) * scales)
        codes = unpack_bits(xp, cells.reshape(-1), 2, cells.size * 4).reshape(rows, -1)[:, :k]
        magnitudes = xp.where(codes & 2, scales[:, 1:], scales[:, :1])
        return _array(xp.where(codes & 1, -magnitudes, magnitudes))

    # -- kernels ------------------------------------------------------------------------------

    @property
    def granule(self) -> int:
        """The elements of a block."""
        return self.block

    def strides(self) -> dict[str, int]:
        """Bytes of indices, values or bytes of codes, scales."""
        strides = {
            "indices": packed_size(self.kept * self.width, 1),
            self._name: self._cells(self.kept),
        }
        return strides | {"scales": self._scales} if self._scales else strides

    def encoder(self, feedback: bool, ctx: Context) -> Kernel:
        """The kernel of the values' width."""
        from ringlet.compressors.kernels.cpu.sparsifiers.blocktopk import encoder, room_size

        kernel = encoder(self.bits)
        inverse, forward = cosines(self.block if self.dct else 1)
        block, kept, width, dct = self.block, self.kept, self.width, self.dct

        def encode(
            x: Array, held: Array, decay: Any, key: Any, start: int, indices: Array, values: Array,
            scales: Array = _NOTHING,
        ) -> None:  # fmt: skip
            with ctx.workspace.held(room_size(block), np.int32) as room:
                kernel(
                    x, held, decay, feedback, block, kept, width, dct, forward, inverse, room,
                    indices, values, scales,
                )  # fmt: skip

        return encode

    def draws(self) -> bool:
        """Nothing is random."""
        return False

    def batched(self) -> Batched | None:
        """The kernels of the values' width, for many tensors a call."""
        own = keeps(self, BlockTopK, "encoder", "decoder", "measure", "layout", "strides")
        if not (own and self.relies_on_kernels()):
            return None
        from ringlet.compressors.kernels.cpu.sparsifiers import blocktopk as kernels

        inverse, forward = cosines(self.block if self.dct else 1)
        options, room = (self.block, self.kept, self.width, self.dct), kernels.room_size(self.block)
        return self.looped(
            lambda fed: kernels.placed_encoder(self.bits),
            kernels.placed_decoder(self.bits),
            lambda: (*options, forward, inverse, np.empty(room, np.int32)),
        )

    def cuda(self) -> BlockCodec:
        """The kernels of the block and of the values' width."""
        from ringlet.compressors.kernels.cuda.sparsifiers.blocktopk import BlockCodec

        return BlockCodec(
            "sparsifiers/blocktopk", self.bits, self.block, (), self.kept, self.width,
            cosines if self.dct else None,
        )  # fmt: skip

    def decoder(self, add: bool, ctx: Context) -> Kernel:
        """The kernel of the values' width."""
        from ringlet.compressors.kernels.cpu.sparsifiers.blocktopk import decoder, room_size

        kernel = decoder(self.bits)
        inverse, _ = cosines(self.block if self.dct else 1)
        block, kept, width, dct = self.block, self.kept, self.width, self.dct

        def decode(indices: Array, values: Array, *rest: Array) -> bool:
            scales, out = rest if len(rest) == 2 else (_NOTHING, *rest)
            with ctx.workspace.held(room_size(block), np.int32) as room:
                inside = kernel(
                    indices, values, scales, block, kept, width, dct, inverse, add, room, out
                )
            return bool(inside)

        return decode

    def _count(self, n: int) -> int:
        """Return how many entries of a block of ``n`` elements travel."""
        return self.kept if self.dct and n else -(-self.kept * n // self.block)

    def _cells(self, k: int) -> int:
        return packed_size(k, self.bits) if self.bits < 16 else k

    @property
    def _name(self) -> str:
        return "values" if self.bits == 32 else "codes"  # what can be chained, and what not

    @property
    def _dtype(self) -> str:
        return {32: "float32", 16: "bfloat16"}.get(self.bits, "uint8")

    @property
    def _scales(self) -> int:
        return {8: 1, 2: 2}.get(self.bits, 0)


def _weighted_sum(weights: Array, basis: Array, xp: Any) -> Array:
    """Return weights @ basis, adding in the order of the kernels."""
    total: Array = xp.zeros((len(weights), basis.shape[1]), "float32")
    for j in range(len(basis)):
        total += weights[:, j : j + 1] * basis[j]
    return total


def _pack_indices(xp: Any, picks: Array, width: int) -> Array:
    """Pack each row of indices of 8, 12 or 16 bits into bytes, least significant first."""
    rows, k = picks.shape
    wide = xp.zeros((rows, k + k % 2), "uint32")
    wide[:, :k] = picks
    if width == 12:
        first, second = wide[:, 0::2], wide[:, 1::2]
        cells = [first & 255, (first >> 8) | ((second & 15) << 4), second >> 4]
    else:
        cells = [wide & 255, wide >> 8][: width // 8]
    packed = xp.stack(cells, axis=2).astype("uint8").reshape(rows, -1)
    trimmed: Array = packed[:, : packed_size(k * width, 1)].reshape(-1)
    return trimmed


def _unpack_indices(xp: Any, packed: Array, width: int, k: int) -> Array:
    """Return the ``k`` indices that each row holds."""
    wide = packed.astype("int64")
    if width == 8:
        return _array(wide)
    if width == 16:
        return _array(wide[:, 0::2] | (wide[:, 1::2] << 8))
    place = xp.arange(k)
    both = wide[:, place * 3 // 2] | (wide[:, place * 3 // 2 + 1] << 8)
    return _array(xp.where(place % 2 == 1, both >> 4, both & 4095))


def _array(value: Any) -> Array:
    """Tell a type checker what an array module without types returned."""
    array: Array = value
    return array
