"""Scaling between a tensor's own dtype and another array, or in place."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from ringlet.compressors import Workspace
from ringlet.fusion.devices.convert import scale_into

FACTORS = st.floats(2.0**-20, 2.0**20, width=32)


def float32_of(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def bfloat16_of(values):
    """Round float32 to the nearest bfloat16, ties to even; NaN stays NaN."""
    bits = values.view(np.uint32).astype(np.uint64)
    rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), (bits >> 16).astype(np.uint16) | 0x40, rounded)


@given(arrays(np.uint16, st.integers(0, 70)), FACTORS)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bits_are_scaled_in_float32_and_rounded_once(dtype, bits, factor):
    source = bits.view(np.float16) if dtype == "float16" else bits
    with np.errstate(all="ignore"):
        if dtype == "float16":
            expected = (source.astype(np.float32) * np.float32(factor)).astype(np.float16)
        else:
            expected = bfloat16_of(float32_of(source) * np.float32(factor))
    apart, same = np.empty_like(source), source.copy()
    scale_into(source, factor, apart, dtype, Workspace())
    scale_into(same, factor, same, dtype, Workspace())
    assert same.tobytes() == apart.tobytes()
    wide = (lambda x: x.astype(np.float32)) if dtype == "float16" else float32_of
    assert np.array_equal(wide(apart), wide(expected), equal_nan=True)


@given(arrays(np.float32, st.integers(0, 70), elements=st.floats(width=32)), FACTORS)
def test_float32_is_scaled_apart_as_in_place(values, factor):
    apart, same = np.empty_like(values), values.copy()
    with np.errstate(all="ignore"):
        scale_into(values, factor, apart, "float32", Workspace())
        scale_into(same, factor, same, "float32", Workspace())
        expected = values * np.float32(factor)
    assert np.array_equal(apart, expected, equal_nan=True)
    assert np.array_equal(same, expected, equal_nan=True)
