"""Blocks of 32 small floats with a power of two each, as in OCP MX (see ``minifloats``).

A run of blocks is rounded to a byte per element and packed then, while it is in the cache.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import njit, types

from ringlet.compressors.core.minifloats import MiniFloat
from ringlet.compressors.kernels.cpu.common.intrinsics import bits_f32, largest_of_32
from ringlet.compressors.kernels.cpu.common.minifloats import (
    LANES,
    decoded,
    keep_lost,
    rounded_run,
    value_of,
    widened,
    write_scales,
)
from ringlet.compressors.kernels.cpu.common.packing import pack, unpack
from ringlet.ring.jit import jit

_BLOCK = 32
_RUN = 2048  # elements that are packed at once
_INF = 0x7F800000
_NAN = 255


@njit(inline="always")
def _scale(byte: Any) -> Any:
    """Return 2**(byte - 127), NaN for 255; the lowest one is subnormal."""
    special = byte == types.uint32(0) or byte == types.uint32(_NAN)
    half = types.uint32(0x400000) if special else types.uint32(0)
    return bits_f32((byte << types.uint32(23)) | half)


@njit(nogil=True)
def _measure(values: Any, emax: Any, tops: Any, found: Any, units: Any, inverses: Any) -> None:
    """Fill in the scale of every block of a run: its byte, its value and that one's inverse."""
    for b in range(_RUN // _BLOCK):
        tops[b] = largest_of_32(values, types.uint64(b * _BLOCK))
    for b in range(_RUN // _BLOCK):
        top = tops[b]
        exponent = types.int32(top >> types.uint32(23)) - types.int32(emax)
        byte = types.uint32(max(exponent, types.int32(0)))
        # The block decodes to NaN: overflow must not be hidden.
        byte = types.uint32(_NAN) if top >= types.uint32(_INF) else byte
        found[b], units[b] = types.uint8(byte), _scale(byte)
        inverses[b] = bits_f32((types.uint32(254) - byte) << types.uint32(23))


@cache
def encoder(form: MiniFloat, stochastic: bool, feedback: bool) -> Any:
    """Return the kernel ``encode(x, residual, decay, key, start, codes, scales)``.

    ``residual`` is unused without feedback; ``start`` is the counter of x[0] for random numbers.
    """
    # What a cached kernel closes over must be plain values.
    bits, mantissa, lowest, largest = form.bits, form.mantissa, form.lowest, form.largest
    maximum, emax = form.maximum, form.emax

    @jit
    def encode(
        x: Any, residual: Any, decay: Any, key: Any, start: Any, codes: Any, scales: Any
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
                _measure(wide, emax, tops, found, units, inverses)
                rounded_run(
                    wide, _BLOCK, units, inverses, key, at, noise, scratch, kept, bits, mantissa,
                    lowest, largest, maximum, stochastic, feedback,
                )  # fmt: skip
                if feedback:
                    keep_lost(wide, kept, held)
            else:
                _measure(values, emax, tops, found, units, inverses)
                rounded_run(
                    values, _BLOCK, units, inverses, key, at, noise, scratch, kept, bits, mantissa,
                    lowest, largest, maximum, stochastic, False,
                )  # fmt: skip
            write_scales(found, _NAN, size, scratch, scales[begin // _BLOCK :])
            pack(scratch[:size], bits, codes[begin * bits // 8 :])

    return encode


@cache
def decoder(form: MiniFloat, add: bool) -> Any:
    """Return the kernel ``decode(codes, scales, out)``; ``add`` accumulates."""
    bits, mantissa, lowest, largest = form.bits, form.mantissa, form.lowest, form.largest
    infinite = largest + 1 if form.has_inf else 255

    @jit
    def decode(codes: Any, scales: Any, out: Any) -> None:
        scratch = np.empty(_RUN, np.uint8)
        for begin in range(0, out.size, _RUN):
            target = out[begin : begin + _RUN]
            unpack(codes[begin * bits // 8 :], bits, scratch[: target.size])
            full = target.size // _BLOCK
            for b in range(full):
                scale = _scale(types.uint32(scales[begin // _BLOCK + b]))
                for i in range(0, _BLOCK, LANES):
                    at = types.uint64(b * _BLOCK + i)
                    decoded(
                        scratch, at, scale, target, at, types.uint32(bits), types.uint32(mantissa),
                        types.uint32(lowest), types.uint32(largest), types.uint32(infinite), add,
                    )  # fmt: skip
            for b in range(full, (target.size + _BLOCK - 1) // _BLOCK):
                scale = _scale(types.uint32(scales[begin // _BLOCK + b]))
                some = target[b * _BLOCK : (b + 1) * _BLOCK]
                source = scratch[b * _BLOCK : (b + 1) * _BLOCK]
                for i in range(some.size):
                    code = types.uint32(source[i])
                    value = value_of(code, bits, mantissa, lowest, largest, infinite) * scale
                    some[i] = some[i] + value if add else value

    return decode
