"""NVFP4 against its definition, written once more in float64 without kernels."""

import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlet.compressors import parse

sys.path.insert(0, str(Path(__file__).parent))

from vectors import (
    agrees_with_array_code,
    context,
    every_float,
    finite,
    moderate,
    payload_for,
    plain,
    vectors,
)

SPECS = ["nvfp4", "nvfp4(stochastic=True)"]
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array(
    [(c % 8 / 8 + (c > 7)) * 2.0 ** (max(c >> 3, 1) - 7) for c in range(127)]  # 127 is NaN
)


def encoded(spec, x, **fields):
    compressor = parse(spec)
    payload = payload_for(compressor, x.size)
    compressor.encode_into(x, payload, context(x.size, **fields))
    return payload


def decoded(spec, x, **fields):
    out = np.full(x.size, 7, np.float32)
    parse(spec).decompress(encoded(spec, x, **fields), out, context(x.size))
    return out


def check_nearest(code, value, table):
    """Assert that ``code`` is of the value in ``table`` nearest to ``value``, ties to even.

    ``value`` went through a division or two of float32: so near to a tie either is right.
    """
    value = min(value, table[-1])
    distance = np.abs(table - value)
    slack = 4 * 2.0**-24 * value
    assert distance[code] <= distance.min() + slack
    close = np.flatnonzero(distance <= distance.min() + slack)
    if len(close) == 2 and distance[close[0]] == distance[close[1]] and value in (0.25, 0.75, 5.0):
        assert code % 2 == 0


@given(x=vectors(finite | moderate))
@settings(max_examples=100)
def test_unit_scales_and_codes_are_those_of_the_definition(x):
    payload = encoded("nvfp4", x)
    if not x.size:
        assert all(array.size == 0 for array in payload.values())
        return
    wide = x.astype(np.float64)
    unit = float(payload["unit"][0])
    assert unit == max(np.float32(np.abs(wide).max() / 2688), np.float32(2.0**-126))
    codes = np.stack([payload["codes"] & 15, payload["codes"] >> 4], 1).reshape(-1)[: x.size]
    np.testing.assert_array_equal(codes >> 3, np.signbit(x))
    expected = np.empty(x.size)
    for b, scale in enumerate(payload["scales"]):
        block = wide[16 * b : 16 * b + 16]
        check_nearest(scale, np.abs(block).max() / 6 / unit, E4M3)
        whole = float(np.float32(E4M3[scale]) * np.float32(unit))
        for i, value in enumerate(block, 16 * b):
            if whole >= 2.0**-126:
                check_nearest(codes[i] & 7, abs(value) / whole, E2M1)
            else:
                assert codes[i] & 7 == 0
            expected[i] = E2M1[codes[i] & 7] * whole * (-1 if codes[i] >> 3 else 1)
    out = decoded("nvfp4", x)
    np.testing.assert_array_equal(out, expected.astype(np.float32))
    assert np.isfinite(out).all()


@pytest.mark.parametrize("spec", SPECS)
@given(x=vectors(every_float), seed=st.integers(0, 99))
@settings(max_examples=60)
def test_kernels_agree_with_array_code_bit_for_bit(spec, x, seed):
    agrees_with_array_code(parse(spec), x, seed)


def test_all_codes_and_scales_decode_to_their_definition():
    scales = np.arange(128, dtype=np.uint8)
    codes = np.tile(np.arange(16, dtype=np.uint8), 128)
    payload = {
        "codes": codes[::2] | codes[1::2] << 4, "scales": scales,
        "unit": np.array([0.25], np.float32),
    }  # fmt: skip
    values = np.concatenate([E2M1, -E2M1])
    expected = np.append(E4M3, np.nan)[:, None] * 0.25 * values
    for xp in (np, plain):
        out = np.empty(2048, np.float32)
        parse("nvfp4").decompress(payload, out, context(2048, xp=xp))
        np.testing.assert_array_equal(out, expected.reshape(-1).astype(np.float32))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_overflow_shows_in_its_block_and_leaves_the_others_their_unit(bad):
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    x[[70, 999]] = bad
    payload = encoded("nvfp4", x)
    assert payload["scales"][[4, 62]].tolist() == [0x7F, 0x7F]
    rest = np.delete(x, [70, 999])
    assert payload["unit"][0] == np.abs(rest).max() / np.float32(2688)
    out = decoded("nvfp4", x)
    assert np.isnan(out[64:80]).all()
    assert np.isnan(out[992:]).all()
    assert np.isfinite(np.delete(out, [*range(64, 80), *range(992, 1000)])).all()


def test_extremes_zeros_and_tails():
    most = np.float32(np.finfo(np.float32).max)
    for value in (most, np.nextafter(most, np.float32(0)), np.float32(3e38)):
        out = decoded("nvfp4", np.full(20, value))
        assert np.isfinite(out).all()
        np.testing.assert_allclose(out, value, 1e-6)
    assert not decoded("nvfp4", np.zeros(100, np.float32)).any()
    assert not decoded("nvfp4", np.full(100, 1e-42, np.float32)).any()
    for n in (1, 15, 17, 40, 513, 2047, 2049):  # the tail has the scale of its own values
        np.testing.assert_allclose(decoded("nvfp4", np.full(n, 3.0, np.float32)), 3.0, 1e-6)
    small = np.ones(32, np.float32)
    small[16:] = 2.0**-21  # a block that the scales' range does not reach
    assert not decoded("nvfp4", small)[16:].any()


def test_random_rounding_is_unbiased_below_saturation():
    draws, x = 1000, np.linspace(0, 2688, 97).astype(np.float32)
    x[::16] = 2688  # all blocks have the largest scale
    total = np.zeros(x.size)
    for step in range(draws):
        out = decoded("nvfp4(stochastic=True)", x, step=step)
        place = np.searchsorted(448 * E2M1, x, side="right") - 1
        low, high = (448 * E2M1[np.minimum(place + i, 7)] for i in (0, 1))
        assert ((out == low) | (out == high)).all(), "not a neighbour"
        total += out
    assert (np.abs(total / draws - x) <= 5 * (high - low) / 2 / np.sqrt(draws) + 1e-9).all()


def test_large_tensors_are_measured_and_coded_in_ranges():
    x = np.random.default_rng(1).standard_normal(600_011).astype(np.float32)
    fast, reference = encoded("nvfp4", x), parse("nvfp4").compress(x, context(x.size))
    assert all(np.array_equal(reference[name], fast[name]) for name in fast)
