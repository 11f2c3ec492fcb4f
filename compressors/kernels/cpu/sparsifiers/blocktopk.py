"""Top-k inside blocks: transform, select, quantise what is kept, and keep what was lost.

Kernels are made for one width of values each; what else does not apply is skipped.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, njit, types

from ringlet.compressors.kernels.cpu.common.copies import copy
from ringlet.compressors.kernels.cpu.common.intrinsics import (
    ROUNDER,
    bf16_to_f32,
    bits_f32,
    f32_to_bf16,
    is_finite,
    magnitude_bits,
    pointer,
)
from ringlet.compressors.kernels.cpu.common.ordered_sums import LANES, fold
from ringlet.compressors.kernels.cpu.common.packing import pack, unpack
from ringlet.compressors.kernels.cpu.quantizers.onebit import nearest_bf16
from ringlet.compressors.kernels.cpu.quantizers.quantize import TINY, round_up_bf16
from ringlet.compressors.kernels.cpu.sparsifiers.topk import select
from ringlet.ring.jit import jit

_NAN = 0x7FC0


@jit
def encode8(values: Any, codes: Any, scales: Any) -> None:
    """Round to 8 bits: code = 127 + round(v / scale)."""
    top = types.int32(0)
    for j in range(values.size):
        top = max(top, magnitude_bits(values[j]))
    extent = bits_f32(types.uint32(top))
    if not is_finite(extent):  # the block decodes to NaN: overflow must not be hidden
        scales[0] = types.uint16(_NAN)
        codes[:] = 0
    elif extent < types.float32(TINY):
        scales[0] = types.uint16(0)
        codes[:] = 127
    else:
        scales[0] = round_up_bf16(extent / types.float32(127.0))
        inverse = types.float32(1.0) / bf16_to_f32(scales[0])
        for j in range(values.size):
            place = (values[j] * inverse + types.float32(ROUNDER)) - types.float32(ROUNDER)
            codes[j] = types.uint8(types.int32(place + types.float32(127.0)))


@jit
def decode8(codes: Any, scales: Any, values: Any) -> None:
    """Undo ``encode8`` up to rounding."""
    scale = bf16_to_f32(scales[0])
    for j in range(values.size):
        values[j] = (types.float32(codes[j]) - types.float32(127.0)) * scale


@jit
def encode2(values: Any, sums: Any, scratch: Any, codes: Any, scales: Any) -> None:
    """Send the sign, and whether a magnitude is below the mean: two means decode them."""
    sums[:] = 0.0
    total, low, high = sums[0], sums[1], sums[2]
    for j in range(values.size):
        total[j % LANES] += types.float64(abs(values[j]))
    mean = fold(total) / values.size
    if not np.isfinite(mean):  # the block decodes to NaN: overflow must not be hidden
        scales[0] = scales[1] = types.uint16(_NAN)
        codes[:] = 0
        return
    above = 0
    for j in range(values.size):
        magnitude = types.float64(abs(values[j]))
        large = magnitude >= mean
        above += large
        high[j % LANES] += magnitude if large else 0.0
        low[j % LANES] += 0.0 if large else magnitude
        negative = types.uint8(values[j] < types.float32(0.0))
        scratch[j] = negative | (types.uint8(large) << types.uint8(1))
    scales[0] = nearest_bf16(types.float32(fold(low) / max(values.size - above, 1)))
    scales[1] = nearest_bf16(types.float32(fold(high) / max(above, 1)))
    pack(scratch[: values.size], 2, codes)


@jit
def decode2(codes: Any, scales: Any, scratch: Any, values: Any) -> None:
    """Undo ``encode2`` up to rounding."""
    unpack(codes, 2, scratch[: values.size])
    low, high = bf16_to_f32(scales[0]), bf16_to_f32(scales[1])
    for j in range(values.size):
        magnitude = high if scratch[j] & 2 else low
        values[j] = -magnitude if scratch[j] & 1 else magnitude


@jit
def encode16(values: Any, codes: Any) -> None:
    """Round to bfloat16."""
    for j in range(values.size):
        codes[j] = f32_to_bf16(values[j])


@jit
def decode16(codes: Any, values: Any) -> None:
    """Widen bfloat16."""
    for j in range(values.size):
        values[j] = bf16_to_f32(codes[j])


@njit(nogil=True)
def _read(values: Any, magnitudes: Any) -> None:
    for i in range(values.size):
        magnitudes[i] = magnitude_bits(values[i])


@njit(inline="always")
def _kept(kept: int, n: int, block: int, rotated: bool) -> Any:
    return kept if rotated or n == block else (kept * n + block - 1) // block


def room_size(block: int) -> int:
    """Return the scratch (int32) that a kernel needs."""
    return 9 * block + 8


@cache
def encoder(bits: int) -> Any:
    """Return the kernel ``encode(x, residual, decay, feedback, block, kept, width, rotated,
    forward, inverse, room, indices, values, scales)``: ``kept`` entries of a full block, indices
    of ``width`` bits. ``residual`` is unused without ``feedback``; ``room`` (int32) is scratch for
    ``room_size`` entries.
    """
    per_block = {8: 1, 2: 2}.get(bits, 0)

    @jit
    def encode(
        x: Any, residual: Any, decay: Any, feedback: bool, block: int, kept: int, width: int,
        rotated: bool, forward: Any, inverse: Any, room: Any, indices: Any, values: Any,
        scales: Any,
    ) -> None:  # fmt: skip
        magnitudes, found = room[:block], room[block : 2 * block]
        maxima, picks = room[2 * block : 3 * block], room[3 * block : 4 * block + 1]
        wide = room[4 * block + 1 :].view(np.float32)
        target, turned = wide[:block], wide[block : 2 * block]
        chosen, decoded = wide[2 * block : 2 * block + kept], wide[3 * block : 3 * block + kept]
        scratch, sums = wide[4 * block :].view(np.uint8)[:kept], np.empty((3, LANES), np.float64)
        stride, step = (kept * width + 7) // 8, (kept * bits + 7) // 8 if bits < 16 else kept
        for b in range((x.size + block - 1) // block):
            piece = x[b * block : (b + 1) * block]
            held = residual[b * block : (b + 1) * block]
            n = piece.size
            k = _kept(kept, n, block, rotated)
            size = block if rotated else n
            if rotated or feedback:
                if feedback:
                    for i in range(n):
                        target[i] = piece[i] + decay * held[i]
                else:
                    copy(piece, target[:n])
                source = target[:n]
                if rotated:
                    target[n:] = 0
                    transform(target, forward, turned)
                    source = turned
                _read(source, magnitudes)
                select(magnitudes[:size], k, picks, found, maxima)
                for j in range(k):
                    chosen[j] = source[picks[j]]
            else:  # without a copy
                _read(piece, magnitudes)
                select(magnitudes[:size], k, picks, found, maxima)
                for j in range(k):
                    chosen[j] = piece[picks[j]]
            pack_indices(picks, k, width, indices[b * stride :])
            out = values[b * step : b * step + ((k * bits + 7) // 8 if bits < 16 else k)]
            scale = scales[b * per_block : (b + 1) * per_block]
            if bits == 8:
                encode8(chosen[:k], out, scale)
            elif bits == 2:
                encode2(chosen[:k], sums, scratch, out, scale)
            elif bits == 16:
                encode16(chosen[:k], out)
            else:
                copy(chosen[:k], out)
            if feedback:
                if bits == 8:
                    decode8(out, scale, decoded[:k])
                elif bits == 2:
                    decode2(out, scale, scratch, decoded[:k])
                elif bits == 16:
                    decode16(out, decoded[:k])
                else:
                    copy(out, decoded[:k])
                if rotated:
                    transform_sparse(picks, decoded[:k], inverse, turned)
                    for i in range(n):
                        lost = target[i] - turned[i]
                        held[i] = lost if is_finite(lost) else held[i]
                else:
                    for j in range(k):  # what of these entries is kept
                        lost = chosen[j] - decoded[j]
                        chosen[j] = lost if is_finite(lost) else held[picks[j]]
                    for i in range(n):
                        held[i] = target[i] if is_finite(target[i]) else held[i]
                    for j in range(k):
                        held[picks[j]] = chosen[j]

    return encode


@cache
def decoder(bits: int) -> Any:
    """Return the kernel ``decode(indices, values, scales, block, kept, width, rotated, inverse,
    add, room, out)``.

    ``add`` accumulates; ``room`` is scratch as in ``encoder``. It returns False when an index lies
    outside its block.
    """
    per_block = {8: 1, 2: 2}.get(bits, 0)

    @jit
    def decode(
        indices: Any, values: Any, scales: Any, block: int, kept: int, width: int, rotated: bool,
        inverse: Any, add: bool, room: Any, out: Any,
    ) -> bool:  # fmt: skip
        picks, scratch = room[:kept], room[block : 2 * block].view(np.uint8)[:kept]
        decoded = room[2 * block : 2 * block + kept].view(np.float32)
        turned = room[3 * block : 4 * block].view(np.float32)
        stride, step = (kept * width + 7) // 8, (kept * bits + 7) // 8 if bits < 16 else kept
        for b in range((out.size + block - 1) // block):
            piece = out[b * block : (b + 1) * block]
            n = piece.size
            k = _kept(kept, n, block, rotated)
            source = values[b * step : b * step + ((k * bits + 7) // 8 if bits < 16 else k)]
            scale = scales[b * per_block : (b + 1) * per_block]
            limit = block if rotated else n
            if not unpack_indices(indices[b * stride :], k, width, limit, picks):
                return False
            if bits == 8:
                decode8(source, scale, decoded[:k])
            elif bits == 2:
                decode2(source, scale, scratch, decoded[:k])
            elif bits == 16:
                decode16(source, decoded[:k])
            else:
                copy(source, decoded[:k])
            if rotated:
                transform_sparse(picks, decoded[:k], inverse, turned)
                for i in range(n):
                    piece[i] = piece[i] + turned[i] if add else turned[i]
            else:
                if not add:
                    piece[:] = 0
                for j in range(k):
                    value = decoded[j]
                    piece[picks[j]] = piece[picks[j]] + value if add else value
        return True

    return decode


@cache
def placed_encoder(bits: int) -> Any:
    """Return the same for many tensors, for ``common.batched.batch_encoder``.

    Options are ``block, kept, width, rotated, forward, inverse, room``.
    """
    one, arrays = encoder(bits), _placed(bits)

    @njit(inline="always")
    def encode(
        x: Any, residual: Any, decay: Any, key: Any, start: Any, places: Any, options: Any
    ) -> None:
        block, kept, width, rotated, forward, inverse, room = options
        feedback = residual.size > 0
        indices, values, scales = arrays(places, x.size, block, kept, width, rotated)
        one(
            x, residual, decay, feedback, block, kept, width, rotated, forward, inverse, room,
            indices, values, scales,
        )  # fmt: skip

    return encode


@cache
def placed_decoder(bits: int) -> Any:
    """Return the same for ``common.batched.batch_decoder``, with the same options."""
    one, arrays = decoder(bits), _placed(bits)

    @njit(inline="always")
    def decode(places: Any, add: bool, out: Any, options: Any) -> Any:
        block, kept, width, rotated, _, inverse, room = options
        indices, values, scales = arrays(places, out.size, block, kept, width, rotated)
        return one(
            indices, values, scales, block, kept, width, rotated, inverse, add, room, out
        )  # fmt: skip

    return decode


@cache
def _placed(bits: int) -> Any:
    """Return what finds a payload's arrays: as many cells as ``BlockTopK.layout`` says."""
    per_block = {8: 1, 2: 2}.get(bits, 0)
    dtype = {32: np.float32, 16: np.uint16}.get(bits, np.uint8)

    @njit(inline="always")
    def arrays(places: Any, n: int, block: int, kept: int, width: int, rotated: bool) -> Any:
        full, last = n // block, n % block
        k = _kept(kept, last, block, rotated) if last else 0
        bytes_of_indices = full * ((kept * width + 7) // 8) + (k * width + 7) // 8
        if bits < 16:
            cells = full * ((kept * bits + 7) // 8) + (k * bits + 7) // 8
        else:
            cells = full * kept + k
        return (
            carray(pointer(places[1]), bytes_of_indices, np.uint8),
            carray(pointer(places[2]), cells, dtype),
            carray(pointer(places[3]), (full + (last > 0)) * per_block, np.uint16),
        )

    return arrays


@jit
def pack_indices(picks: Any, k: int, width: int, out: Any) -> None:
    """Pack ``k`` indices of 8, 12 or 16 bits into bytes, least significant first."""
    if width == 8:
        for j in range(k):
            out[j] = types.uint8(picks[j])
    elif width == 16:
        for j in range(k):
            out[2 * j] = types.uint8(picks[j] & 255)
            out[2 * j + 1] = types.uint8(picks[j] >> 8)
    else:
        for j in range(k // 2):
            both = picks[2 * j] | (picks[2 * j + 1] << 12)
            out[3 * j] = types.uint8(both & 255)
            out[3 * j + 1] = types.uint8((both >> 8) & 255)
            out[3 * j + 2] = types.uint8((both >> 16) & 255)
        if k % 2:
            out[3 * (k // 2)] = types.uint8(picks[k - 1] & 255)
            out[3 * (k // 2) + 1] = types.uint8(picks[k - 1] >> 8)


@jit
def unpack_indices(packed: Any, k: int, width: int, limit: int, picks: Any) -> Any:
    """Undo ``pack_indices``; False if an index is not below ``limit``."""
    if width == 8:
        for j in range(k):
            picks[j] = packed[j]
    elif width == 16:
        for j in range(k):
            picks[j] = types.int32(packed[2 * j]) | (types.int32(packed[2 * j + 1]) << 8)
    else:
        for j in range(k):
            low, high = types.int32(packed[j * 3 // 2]), types.int32(packed[j * 3 // 2 + 1])
            both = low | (high << 8)
            picks[j] = both >> 4 if j % 2 else both & 4095
    top = types.int32(0)
    for j in range(k):
        top = max(top, picks[j])
    return top < limit


@jit
def transform(x: Any, basis: Any, out: Any) -> None:
    """Set ``out`` to the sum of x[j] * basis[j]: every element adds in the same order."""
    out[:] = 0
    full = x.size // 4 * 4
    for j in range(0, full, 4):  # four rows at a time load and store ``out`` once
        a, b, c, d = x[j], x[j + 1], x[j + 2], x[j + 3]
        for i in range(out.size):
            total = (out[i] + a * basis[j, i]) + b * basis[j + 1, i]
            out[i] = (total + c * basis[j + 2, i]) + d * basis[j + 3, i]
    for j in range(full, x.size):
        for i in range(out.size):
            out[i] += x[j] * basis[j, i]


@jit
def transform_sparse(picks: Any, values: Any, basis: Any, out: Any) -> None:
    """Do the same for the given entries alone."""
    out[:] = 0
    full = values.size // 4 * 4
    for j in range(0, full, 4):
        a, b, c, d = values[j], values[j + 1], values[j + 2], values[j + 3]
        e, f, g, h = picks[j], picks[j + 1], picks[j + 2], picks[j + 3]
        for i in range(out.size):
            total = (out[i] + a * basis[e, i]) + b * basis[f, i]
            out[i] = (total + c * basis[g, i]) + d * basis[h, i]
    for j in range(full, values.size):
        for i in range(out.size):
            out[i] += values[j] * basis[picks[j], i]


__all__ = ["decoder", "encoder", "placed_decoder", "placed_encoder", "room_size"]
