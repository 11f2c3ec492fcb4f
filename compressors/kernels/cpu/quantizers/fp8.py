"""Block-scaled 8-bit floats by integer arithmetic, without a branch per element.

A float y of exponent e, rounded to m mantissa bits, is y + C - C with C = 2**(e + 23 - m): the sum
has no room for smaller bits, and its lowest ones are the rounded mantissa. Exponents below the
smallest normal one count as that one, which makes subnormals right as well.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import njit, types

from ringlet.compressors.kernels.cpu.common.intrinsics import bits_f32, f32_bits
from ringlet.ring.jit import jit

# Magnitude bits from which a rounded value may exceed float32: 1.875 * 2**127.
OVERFLOW = 0x7F700000
_SIGN = 0x80000000
_REST = 0x7FFFFFFF


@njit(inline="always")
def _scale_byte(top: Any, emax: Any) -> Any:
    """Return the smallest exponent byte for which no value of magnitude bits ``top`` saturates."""
    above = (top & types.uint32(0x7FFFFF)) > types.uint32(0x600000)
    byte = types.int32(top >> types.uint32(23)) - types.int32(emax) + types.int32(above)
    return types.uint32(max(byte, types.int32(1)))


@njit(inline="always")
def _encode(
    x: Any, residual: Any, decay: Any, codes: Any, scales: Any, b: int, first: Any, count: int,
    mantissa: int, feedback: bool,
) -> None:  # fmt: skip
    """Encode the ``count`` values from ``first`` on: block ``b``."""
    emax, lowest = (8, 121) if mantissa == 3 else (15, 113)
    half, extra = 1 << mantissa, 23 - mantissa
    top = types.uint32(0)
    for i in range(count):
        at = first + types.uint64(i)
        value = x[at] + decay * residual[at] if feedback else x[at]
        top = max(top, f32_bits(value) & types.uint32(_REST))
    bad = top >= types.uint32(OVERFLOW)
    byte = _scale_byte(top, emax)
    scales[b] = types.uint8(255) if bad else types.uint8(byte)
    if bad:
        for i in range(count):
            codes[first + types.uint64(i)] = 0
    else:
        scale = bits_f32(byte << types.uint32(23))
        inverse = bits_f32((types.uint32(254) - byte) << types.uint32(23))
        for i in range(count):
            at = first + types.uint64(i)
            value = x[at] + decay * residual[at] if feedback else x[at]
            bits = f32_bits(value * inverse)
            sign = bits & types.uint32(_SIGN)
            bits &= types.uint32(_REST)
            exponent = max(bits >> types.uint32(23), types.uint32(lowest))
            anchor = bits_f32((exponent + types.uint32(extra)) << types.uint32(23))
            total = bits_f32(bits) + anchor
            code = ((exponent - types.uint32(lowest - 1)) << types.uint32(mantissa)) + (
                (f32_bits(total) & types.uint32(4 * half - 1)) - types.uint32(half)
            )
            codes[at] = types.uint8(code | (sign >> types.uint32(24)))
            if feedback:
                kept = bits_f32(f32_bits(total - anchor) | sign)
                residual[at] = value - kept * scale


@cache
def encoder(mantissa: int, block: int, feedback: bool) -> Any:
    """Return the kernel ``encode(x, residual, decay, key, start, codes, scales)``.

    ``mantissa`` bits: 3 for e4m3, 2 for e5m2. ``residual`` is unused without feedback, and what
    random numbers would need always.
    """

    @jit
    def encode(
        x: Any, residual: Any, decay: Any, key: Any, start: Any, codes: Any, scales: Any
    ) -> None:
        full = x.size // block
        for b in range(full):
            # Unsigned places spare the handling of negative indices, which keeps vectors away; so
            # would a length that is not known.
            first = types.uint64(b * block)
            _encode(x, residual, decay, codes, scales, b, first, block, mantissa, feedback)
        if full * block < x.size:
            first, left = types.uint64(full * block), x.size - full * block
            _encode(x, residual, decay, codes, scales, full, first, left, mantissa, feedback)

    return encode


@cache
def decoder(mantissa: int, block: int, add: bool) -> Any:
    """Return the kernel ``decode(codes, scales, out)``; ``add`` accumulates."""
    lowest = 121 if mantissa == 3 else 113
    half, shift = 1 << mantissa, 23 - mantissa

    @jit
    def decode(codes: Any, scales: Any, out: Any) -> None:
        # A subnormal is read as a normal number of the lowest exponent, less that number's one.
        one = bits_f32(types.uint32(lowest << 23))
        for b in range(scales.size):
            first = types.uint64(b * block)
            count = min(block, out.size - b * block)
            bits = types.uint32(scales[b]) << types.uint32(23)
            if scales[b] == types.uint8(255):
                bits |= types.uint32(0x400000)
            scale = bits_f32(bits)
            for i in range(count):
                at = first + types.uint64(i)
                code = types.uint32(codes[at])
                rest = code & types.uint32(0x7F)
                subnormal = rest < types.uint32(half)
                bias = types.uint32(lowest) if subnormal else types.uint32(lowest - 1)
                value = bits_f32((rest << types.uint32(shift)) + (bias << types.uint32(23)))
                value -= one if subnormal else types.float32(0)
                value = bits_f32(
                    f32_bits(value) | ((code & types.uint32(0x80)) << types.uint32(24))
                )
                if add:
                    out[at] += value * scale
                else:
                    out[at] = value * scale

    return decode
