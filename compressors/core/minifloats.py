"""Floats of 4 to 8 bits: their formats, and rounding to them in array code.

OCP Microscaling Formats (MX) v1.0, 2023; OCP 8-bit Floating Point (OFP8) v1.0, 2023.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from ringlet.compressors.core.context import Array


class MiniFloat(NamedTuple):
    """A sign, ``exponent`` and ``mantissa`` bits; codes of finite magnitudes go up to ``largest``.

    What lies above that is NaN, but for the first such code where ``has_inf``.
    """

    exponent: int
    mantissa: int
    largest: int
    has_inf: bool = False

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return 1 + self.exponent + self.mantissa

    @property
    def lowest(self) -> int:
        """The smallest normal number's exponent, biased as float32's are."""
        return 129 - (1 << (self.exponent - 1))

    @property
    def emax(self) -> int:
        """The largest number's exponent."""
        return (self.largest >> self.mantissa) - 128 + self.lowest

    @property
    def maximum(self) -> float:
        """The largest number."""
        half = 1 << self.mantissa
        fraction: float = (half + self.largest % half) / half
        return fraction * 2.0**self.emax


E4M3 = MiniFloat(4, 3, 0x7E)
E5M2 = MiniFloat(5, 2, 0x7B, has_inf=True)
E3M2 = MiniFloat(3, 2, 0x1F)
E2M3 = MiniFloat(2, 3, 0x1F)
E2M1 = MiniFloat(2, 1, 0x07)
FORMATS = {"e4m3": E4M3, "e5m2": E5M2, "e3m2": E3M2, "e2m3": E2M3, "e2m1": E2M1}


def encoded(values: Array, form: MiniFloat, noise: Array | None, xp: Any) -> Array:
    """Return the codes (uint8) of float32 ``values``; what is too large saturates.

    To nearest, ties to even; with ``noise`` (32 random bits each) at random, up or down.
    """
    m, lowest = form.mantissa, form.lowest
    bits = values.view("uint32")
    sign, bits = (bits >> 31) << (form.bits - 1), bits & 0x7FFFFFFF
    if noise is None:
        exponent = xp.maximum(bits >> 23, lowest)
        # In the sum with 2**(e + 23 - m), the lowest bits are the rounded mantissa.
        anchor = ((exponent + (23 - m)) << 23).astype("uint32").view("float32")
        rounded = (bits.view("float32") + anchor).view("uint32") & ((4 << m) - 1)
        codes = ((exponent - (lowest - 1)) << m) + rounded - (1 << m)
    else:
        # Noise below the last bit that stays carries as often as it should. A subnormal is made a
        # normal number of the lowest exponent.
        subnormal = (bits >> 23) < lowest
        one = xp.where(subnormal, np.float32(2.0 ** (lowest - 127)), np.float32(0))
        raised = (bits.view("float32") + one).view("uint32") + (noise >> (9 + m))
        codes = (raised >> (23 - m)) - ((subnormal + np.uint32(lowest - 1)) << m)
    whole: Array = (xp.minimum(codes, form.largest) | sign).astype("uint8")
    return whole


def decoded(codes: Array, form: MiniFloat, xp: Any) -> Array:
    """Return the values (float32) of ``codes`` (uint8)."""
    m, lowest = form.mantissa, form.lowest
    wide = codes.astype("uint32")
    rest, sign = wide & ((1 << (form.bits - 1)) - 1), (wide >> (form.bits - 1)) << 31
    subnormal = rest < (1 << m)
    # A subnormal is read as a normal number of the lowest exponent, less that number's one.
    bits = (rest << (23 - m)) + ((np.uint32(lowest - 1) + subnormal) << 23)
    one = xp.where(subnormal, np.float32(2.0 ** (lowest - 127)), np.float32(0))
    bits = (bits.astype("uint32").view("float32") - one).view("uint32")
    if form.bits == 8:
        first = 0x7F800000 if form.has_inf else 0x7FC00000
        beyond = xp.where(rest == form.largest + 1, first, 0x7FC00000)
        bits = xp.where(rest > form.largest, beyond, bits)
    values: Array = (bits.astype("uint32") | sign).view("float32")
    return values
