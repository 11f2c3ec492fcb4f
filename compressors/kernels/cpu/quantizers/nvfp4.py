"""Blocks of 16 four-bit floats with an 8-bit float each: NVFP4 (see ``minifloats``).

A run of blocks is rounded to a byte per element and packed then, while it is in the cache.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, njit, types

from ringlet.compressors.core.minifloats import E2M1, E4M3
from ringlet.compressors.kernels.cpu.common.intrinsics import (
    bits_f32,
    f32_bits,
    largest_of_16,
    pointer,
)
from ringlet.compressors.kernels.cpu.common.minifloats import (
    decoded,
    keep_lost,
    nearest,
    rounded_run,
    value_of,
    widened,
    write_scales,
)
from ringlet.compressors.kernels.cpu.common.packing import pack, unpack
from ringlet.compressors.kernels.cpu.common.target import target_at
from ringlet.ring.jit import jit

_BLOCK = 16
_RUN = 2048  # elements that are packed at once
_INF = 0x7F800000
_NAN = 0x7F
_TINY = 2.0**-126
_HIGHEST = 6.0 * 448.0  # the largest element times the largest scale
# What cached kernels use must be plain values: of the elements, and of the scales.
_BITS, _MANTISSA, _LOWEST, _LARGEST, _MAXIMUM = 4, 1, E2M1.lowest, E2M1.largest, E2M1.maximum
_WIDE, _HIGH, _MOST = E4M3.lowest, E4M3.largest, E4M3.maximum


@cache
def largest(feedback: bool) -> Any:
    """Return ``largest(x, residual, decay)``: the largest finite magnitude that is encoded."""

    @jit
    def find(x: Any, residual: Any, decay: Any) -> Any:
        top = types.uint32(0)
        for i in range(x.size):
            bits = f32_bits(target_at(x, residual, decay, i, feedback)) & types.uint32(0x7FFFFFFF)
            top = max(top, bits if bits < types.uint32(_INF) else types.uint32(0))
        return bits_f32(top)

    return find


@njit(inline="always")
def _unit(code: Any, unit: Any) -> Any:
    return value_of(types.uint32(code), 8, 3, _WIDE, _HIGH, 255) * unit


@njit(nogil=True)
def _measure(values: Any, unit: Any, tops: Any, found: Any, units: Any, inverses: Any) -> None:
    """Fill in the scale of every block of a run: its byte, its value and that one's inverse."""
    for b in range(_RUN // _BLOCK):
        tops[b] = largest_of_16(values, types.uint64(b * _BLOCK))
    for b in range(_RUN // _BLOCK):
        top = tops[b]
        bad = top >= types.uint32(_INF)
        ratio = bits_f32(types.uint32(0) if bad else top) / (types.float32(6) * unit)
        code = min(nearest(f32_bits(ratio), 3, _WIDE), types.uint32(_HIGH))
        # The block decodes to NaN: overflow must not be hidden.
        found[b] = types.uint8(types.uint32(_NAN) if bad else code)
        units[b] = _unit(found[b], unit)
        usable = units[b] >= types.float32(_TINY)
        inverses[b] = types.float32(1) / units[b] if usable else types.float32(0)


@cache
def encoder(stochastic: bool, feedback: bool) -> Any:
    """Return the kernel ``encode(x, residual, decay, key, start, codes, scales, unit)``.

    ``residual`` is unused without feedback; ``start`` is the counter of x[0] for random numbers.
    """

    @jit
    def encode(
        x: Any, residual: Any, decay: Any, key: Any, start: Any, codes: Any, scales: Any, unit: Any
    ) -> None:
        blocks = _RUN // _BLOCK
        scratch, wide = np.empty(_RUN, np.uint8), np.zeros(_RUN, np.float32)
        noise, kept = np.empty(_RUN, np.uint32), np.empty(_RUN, np.float32)
        tops, found = np.empty(blocks, np.uint32), np.empty(blocks, np.uint8)
        units, inverses = np.empty(blocks, np.float32), np.empty(blocks, np.float32)
        for begin in range(0, x.size, _RUN):
            size = min(_RUN, x.size - begin)
            values, at = x[begin : begin + size], types.uint64(start + begin)
            if feedback or size < _RUN:
                held = residual[begin : begin + size] if feedback else residual
                widened(values, held, decay, wide, feedback)
                _measure(wide, unit[0], tops, found, units, inverses)
                rounded_run(
                    wide, _BLOCK, units, inverses, key, at, noise, scratch, kept, _BITS,
                    _MANTISSA, _LOWEST, _LARGEST, _MAXIMUM, stochastic, feedback,
                )  # fmt: skip
                if feedback:
                    keep_lost(wide, kept, held)
            else:
                _measure(values, unit[0], tops, found, units, inverses)
                rounded_run(
                    values, _BLOCK, units, inverses, key, at, noise, scratch, kept, _BITS,
                    _MANTISSA, _LOWEST, _LARGEST, _MAXIMUM, stochastic, False,
                )  # fmt: skip
            write_scales(found, _NAN, size, scratch, scales[begin // _BLOCK :])
            pack(scratch[:size], _BITS, codes[begin // 2 :])

    return encode


@cache
def placed_encoder(stochastic: bool, feedback: bool) -> Any:
    """Return the same for many tensors, for ``common.batched.batch_encoder``, without options.

    It fills in the unit as well.
    """
    find, one = largest(feedback), encoder(stochastic, feedback)

    @njit(inline="always")
    def encode(
        x: Any, residual: Any, decay: Any, key: Any, start: Any, places: Any, options: Any
    ) -> None:
        n = x.size
        if n:
            codes = carray(pointer(places[1]), (n + 1) // 2, np.uint8)
            scales = carray(pointer(places[2]), (n + _BLOCK - 1) // _BLOCK, np.uint8)
            unit = carray(pointer(places[3]), 1, np.float32)
            top = find(x, residual, decay)
            unit[0] = max(top / types.float32(_HIGHEST), types.float32(_TINY))
            one(x, residual, decay, key, start, codes, scales, unit)

    return encode


@cache
def decoder(add: bool) -> Any:
    """Return the kernel ``decode(codes, scales, unit, out)``; ``add`` accumulates."""

    @jit
    def decode(codes: Any, scales: Any, unit: Any, out: Any) -> None:
        scratch = np.empty(_RUN, np.uint8)
        for begin in range(0, out.size, _RUN):
            target = out[begin : begin + _RUN]
            unpack(codes[begin // 2 :], _BITS, scratch[: target.size])
            full = target.size // _BLOCK
            for b in range(full):
                scale = _unit(scales[begin // _BLOCK + b], unit[0])
                at = types.uint64(b * _BLOCK)
                decoded(
                    scratch, at, scale, target, at, types.uint32(_BITS), types.uint32(_MANTISSA),
                    types.uint32(_LOWEST), types.uint32(_LARGEST), types.uint32(255), add,
                )  # fmt: skip
            for b in range(full, (target.size + _BLOCK - 1) // _BLOCK):
                scale = _unit(scales[begin // _BLOCK + b], unit[0])
                some = target[b * _BLOCK : (b + 1) * _BLOCK]
                source = scratch[b * _BLOCK : (b + 1) * _BLOCK]
                for i in range(some.size):
                    code = types.uint32(source[i])
                    value = value_of(code, _BITS, _MANTISSA, _LOWEST, _LARGEST, 255) * scale
                    some[i] = some[i] + value if add else value

    return decode


@cache
def placed_decoder() -> Any:
    """Return the same for ``common.batched.batch_decoder``."""
    write, add_to = decoder(False), decoder(True)

    @njit(inline="always")
    def decode(places: Any, add: bool, out: Any, options: Any) -> bool:
        n = out.size
        if n:
            codes = carray(pointer(places[1]), (n + 1) // 2, np.uint8)
            scales = carray(pointer(places[2]), (n + _BLOCK - 1) // _BLOCK, np.uint8)
            unit = carray(pointer(places[3]), 1, np.float32)
            if add:
                add_to(codes, scales, unit, out)
            else:
                write(codes, scales, unit, out)
        return True

    return decode
