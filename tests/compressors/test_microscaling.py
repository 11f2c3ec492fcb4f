"""Block floating point against the specification, written once more in float64 without kernels."""

import math
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlet.compressors import Context, OptionError, parse

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

MX = ["mxfp8", "mxfp8(format='e5m2')", "mxfp6", "mxfp6(format='e3m2')", "mxfp4"]
FORMATS = {  # bits of exponent and mantissa, bias, codes that are finite, as the tables of MX say
    "mxfp8": (4, 3, 7, 0x7F), "mxfp8(format='e5m2')": (5, 2, 15, 0x7C),
    "mxfp6": (2, 3, 1, 0x20), "mxfp6(format='e3m2')": (3, 2, 3, 0x20), "mxfp4": (2, 1, 1, 0x08),
}  # fmt: skip


def decoded(compressor, x, **fields):
    out = np.full(x.size, 7, np.float32)
    compressor.decompress(
        compressor.compress(x, context(x.size, **fields)), out, context(x.size, **fields)
    )
    return out


def magnitudes(spec):
    """Return the finite magnitudes of a format by code, in float64, from its definition."""
    exponents, mantissa, bias, count = FORMATS[spec]
    values = []
    for code in range(count):
        exponent, fraction = code >> mantissa, (code % (1 << mantissa)) / (1 << mantissa)
        assert exponent < 1 << exponents
        power = 2.0 ** (max(exponent, 1) - bias)
        values.append((fraction + (exponent > 0)) * power)
    return np.array(values)


def unpacked(codes, bits, n):
    """Return codes out of bytes, least significant bits first."""
    stream = np.unpackbits(codes, bitorder="little")[: n * bits].reshape(n, bits)
    return stream @ (1 << np.arange(bits))


def nearest(value, table):
    """Return the code of the magnitude in ``table`` nearest to ``value``; of two, the even one."""
    distance = np.abs(table - value)
    found = np.flatnonzero(distance == distance.min())
    return next(code for code in found if len(found) == 1 or code % 2 == 0)


def specified(spec, x):
    """Return (codes with their sign bit, exponent bytes) of finite ``x`` as MX v1.0 says."""
    table = magnitudes(spec)
    emax = math.floor(math.log2(table[-1]))
    sign_bit = 1 << (sum(FORMATS[spec][:2]))
    codes, scales = [], []
    for start in range(0, x.size, 32):
        block = x[start : start + 32].astype(np.float64)
        largest = np.abs(block).max()
        shared = math.frexp(largest)[1] - 1 - emax if largest else -127
        shared = min(max(shared, -127), 127)
        scales.append(shared + 127)
        for value in block:
            scaled = min(abs(value) / 2.0**shared, table[-1])  # too large: the largest
            codes.append(nearest(scaled, table) | (sign_bit if np.signbit(value) else 0))
    return np.array(codes, int), np.array(scales, int)


@pytest.mark.parametrize("spec", MX)
@given(x=vectors(finite | moderate))
@settings(max_examples=40)
def test_codes_and_scales_are_those_of_the_specification(spec, x):
    compressor = parse(spec)
    payload = payload_for(compressor, x.size)
    compressor.encode_into(x, payload, context(x.size))
    codes, scales = specified(spec, x)
    np.testing.assert_array_equal(payload["scales"], scales)
    bits = 1 + sum(FORMATS[spec][:2])
    np.testing.assert_array_equal(unpacked(payload["codes"], bits, x.size), codes)
    table = magnitudes(spec)
    signs = np.where(codes >> (bits - 1), -1.0, 1.0)
    values = signs * table[codes & ((1 << (bits - 1)) - 1)]
    expected = values * 2.0 ** (scales.repeat(32)[: x.size] - 127.0)
    out = np.empty(x.size, np.float32)
    compressor.decompress(payload, out, context(x.size))
    np.testing.assert_array_equal(out, expected)
    np.testing.assert_array_equal(np.signbit(out), np.signbit(x))


@pytest.mark.parametrize("spec", [*MX, "mxfp8(stochastic=True)", "mxfp4(stochastic=True)"])
@given(x=vectors(every_float), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_kernels_agree_with_array_code_bit_for_bit(spec, x, seed):
    agrees_with_array_code(parse(spec), x, seed)


@pytest.mark.parametrize("spec", MX)
def test_all_codes_decode_to_their_definition(spec):
    compressor, table = parse(spec), magnitudes(spec)
    bits = 1 + sum(FORMATS[spec][:2])
    codes = np.arange(1 << bits)
    stream = (codes[:, None] >> np.arange(bits)) & 1
    packed = np.packbits(stream.astype(np.uint8).reshape(-1), bitorder="little")
    beyond = {"mxfp8": [np.nan], "mxfp8(format='e5m2')": [np.inf, *[np.nan] * 3]}.get(spec, [])
    half = np.concatenate([table, beyond])
    for byte in (0, 1, 100, 127, 130):
        payload = {"codes": packed, "scales": np.full(-(-codes.size // 32), byte, np.uint8)}
        expected = np.concatenate([half, -half]) * 2.0 ** (byte - 127)
        for xp in (np, plain):
            out = np.empty(codes.size, np.float32)
            compressor.decompress(payload, out, context(codes.size, xp=xp))
            np.testing.assert_array_equal(out, expected.astype(np.float32))
    payload["scales"][:] = 255
    compressor.decompress(payload, out, context(codes.size))
    assert np.isnan(out).all()


@pytest.mark.parametrize("spec", MX)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_overflow_shows_in_its_block_alone(spec, bad):
    x = np.random.default_rng(0).standard_normal(1000).astype(np.float32)
    x[[70, 999]] = bad
    payload = parse(spec).compress(x, context(1000))
    assert payload["scales"][[2, 31]].tolist() == [255, 255]
    out = decoded(parse(spec), x)
    assert np.isnan(out[64:96]).all()
    assert np.isnan(out[992:]).all()
    assert np.isfinite(np.delete(out, [*range(64, 96), *range(992, 1000)])).all()


@pytest.mark.parametrize("spec", MX)
def test_the_largest_and_the_smallest_numbers_and_tails(spec):
    compressor, table = parse(spec), magnitudes(spec)
    most = np.finfo(np.float32).max
    x = np.zeros(70, np.float32)
    x[0], x[33], x[64:] = most, 1e-45, -np.float32(2.0**-149)
    out = decoded(compressor, x)
    emax = math.floor(math.log2(table[-1]))
    assert out[0] == np.float32(table[-1] * 2.0 ** (127 - emax))  # saturates
    smallest = table[1] * 2.0**-127
    expected = smallest if smallest / 2 < 2.0**-149 else 0.0
    assert out[33] == np.float32(expected)
    assert not out[1:33].any()
    # The tail has the scale of its own six values, whatever lies behind it in memory.
    for n in (1, 31, 33, 40, 513, 2047, 2049):
        y = np.full(n, 3.0, np.float32)
        assert decoded(compressor, y).tolist() == [3.0] * n
        assert compressor.compress(y, context(n))["scales"].tolist() == [128 - emax] * -(-n // 32)


@pytest.mark.parametrize("spec", MX)
def test_random_rounding_is_unbiased_below_saturation_and_keeps_what_fits(spec):
    name = spec.split("(")[0]
    options = spec[len(name) + 1 : -1]
    compressor = parse(f"{name}({options + ', ' if options else ''}stochastic=True)")
    table, draws = magnitudes(spec), 1000
    scaled = np.linspace(0, table[-1], 31)  # a block whose scale is one
    x = np.append(scaled, table[-1]).astype(np.float32)
    total, seen = np.zeros(32), set()
    for step in range(draws):
        out = decoded(compressor, x, step=step)
        low = np.searchsorted(table, x.astype(np.float64), side="right") - 1
        high = np.minimum(low + (table[low] != x), table.size - 1)
        assert ((out == table[low]) | (out == table[high])).all(), "not a neighbour"
        total += out
        seen.add(out.tobytes())
    gap = table[high] - table[low]
    assert (np.abs(total / draws - x) <= 5 * gap / 2 / math.sqrt(draws) + 1e-12).all()
    assert len(seen) > 1
    for step in range(20):  # what is an element stays
        few = np.resize(table, 64).astype(np.float32)
        few[::32] = table[-1]
        assert decoded(compressor, few, step=step).tolist() == few.tolist()


def test_random_numbers_are_those_of_the_place():
    compressor = parse("mxfp4(stochastic=True)")
    x = np.random.default_rng(3).standard_normal(2000).astype(np.float32)
    whole = decoded(compressor, x, name="w")
    for cut in (32, 640, 1984):
        piece = x[cut:].copy()
        at = Context(name="w", shape=(2000,), numel=2000, offset=cut)
        payload, out = payload_for(compressor, piece.size), np.empty_like(piece)
        compressor.encode_into(piece, payload, at)
        compressor.decompress(payload, out, at)
        np.testing.assert_array_equal(out, whole[cut:])


@pytest.mark.parametrize("spec", MX)
def test_large_tensors_are_coded_in_ranges(spec):
    compressor = parse(spec)
    x = np.random.default_rng(1).standard_normal(600_011).astype(np.float32)
    fast = payload_for(compressor, x.size)
    compressor.encode_into(x, fast, context(x.size))
    reference = compressor.compress(x, context(x.size))
    assert all(np.array_equal(reference[name], fast[name]) for name in fast)


def test_options_are_checked():
    for wrong in ("mxfp8(format='e3m2')", "mxfp6(format='e4m3')", "mxfp4(format='e2m1')"):
        with pytest.raises(OptionError):
            parse(wrong)
