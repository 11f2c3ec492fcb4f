"""Block-scaled 8-bit floats, against every value such a float can have."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlet.compressors import FP8, OptionError, parse

sys.path.insert(0, str(Path(__file__).parent))

from vectors import agrees_with_array_code, context, every_float, moderate, payload_for, vectors

SPECS = ["fp8", 'fp8(format="e5m2")', "fp8(block=8)", 'fp8(format="e5m2", block=128)']


def decoded(compressor, x):
    out = np.full(x.size, 7, np.float32)
    compressor.decompress(compressor.compress(x, context(x.size)), out, context(x.size))
    return out


def values_of(mantissa):
    """Return the 128 non-negative codes' values, from the definition of such a float."""
    bias, values = (7 if mantissa == 3 else 15), []
    for code in range(128):
        exponent, fraction = code >> mantissa, code % (1 << mantissa)
        if exponent:
            values.append((1 + fraction / 2**mantissa) * 2.0 ** (exponent - bias))
        else:
            values.append(fraction / 2**mantissa * 2.0 ** (1 - bias))
    return np.array(values)


@pytest.mark.parametrize("spec", SPECS)
@given(x=vectors(every_float), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_kernels_agree_with_array_code_bit_for_bit(spec, x, seed):
    agrees_with_array_code(parse(spec), x, seed)


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@given(x=vectors(moderate))
@settings(max_examples=60)
def test_every_value_becomes_the_nearest_one_ties_to_even(format, x):
    compressor = FP8(format, block=32)
    payload = compressor.compress(x, context(x.size))
    table = values_of(compressor.mantissa)[: 0x7F if format == "e4m3" else 0x7C]
    for i, value in enumerate(x.astype(np.float64)):
        scale = 2.0 ** (int(payload["scales"][i // 32]) - 127)
        distance = np.abs(table * scale - abs(value))
        code = int(payload["codes"][i])
        assert bool(code & 0x80) == bool(np.signbit(x[i]))
        nearest = np.flatnonzero(distance == distance.min())
        assert code & 0x7F in nearest
        assert len(nearest) == 1 or code % 2 == 0
    out = decoded(compressor, x).astype(np.float64)
    for start in range(0, x.size, 32):
        block = x[start : start + 32].astype(np.float64)
        scale = 2.0 ** (int(payload["scales"][start // 32]) - 127)
        assert np.abs(block).max() <= table[-1] * scale, "the largest value saturates"
        smallest = scale == 2.0**-126 or np.abs(block).max() > table[-1] * scale / 2
        assert smallest, "half the scale would do"
        relative = 2.0 ** -(compressor.mantissa + 1)
        bound = np.maximum(np.abs(block) * relative, table[1] * scale / 2)
        assert (np.abs(out[start : start + 32] - block) <= bound).all()


def test_all_codes_decode_to_their_definition():
    codes = np.arange(256, dtype=np.uint8)
    for format in ("e4m3", "e5m2"):
        compressor = FP8(format, block=32)
        table = values_of(compressor.mantissa)
        payload = {"codes": codes, "scales": np.full(8, 130, np.uint8)}
        out = np.empty(256, np.float32)
        compressor.decompress(payload, out, context(256))
        np.testing.assert_array_equal(out, np.concatenate([table, -table]) * 8)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 3.4e38])
def test_overflow_shows_in_its_block_alone(bad):
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    x[[70, 999]] = bad
    out = decoded(FP8(), x)
    assert np.isnan(out[64:96]).all()
    assert np.isnan(out[992:]).all()
    assert np.isfinite(np.delete(out, [*range(64, 96), *range(992, 1000)])).all()


def test_large_tensors_are_coded_in_ranges():
    x = np.random.default_rng(1).standard_normal(600_011).astype(np.float32)
    fast = payload_for(FP8(), x.size)
    FP8().encode_into(x, fast, context(x.size))
    reference = FP8().compress(x, context(x.size))
    assert all(np.array_equal(reference[name], fast[name]) for name in fast)


def test_options_are_checked():
    for wrong in ("fp8(block=12)", 'fp8(format="e3m4")'):
        with pytest.raises(OptionError):
            parse(wrong)
