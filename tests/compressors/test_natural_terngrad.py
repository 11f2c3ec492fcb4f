"""Powers of two and ternary codes: both random, both checked against their exact distributions."""

import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ringlet.compressors import parse
from ringlet.compressors.testing import check_compressor
from ringlet.compressors.testing.tools.simulate import context, decode, encode

SPECS = ["natural", "natural(bucket=32)", "terngrad", "terngrad(bucket=40, clip=7.0)"]
array_code = types.ModuleType("array_code")  # NumPy under a name that no kernel is chosen for
array_code.__dict__.update(vars(np))

seeds = st.integers(0, 2**32 - 1)
every_float = st.floats(width=32, allow_nan=True, allow_infinity=True)
DRAWS = 4000


def vectors(elements, longest=700):
    return hnp.arrays(np.float32, st.integers(0, longest), elements=elements)


def draws(spec, x, times=DRAWS):
    """Decode ``x`` under many keys; return a row for each."""
    compressor, rows = parse(spec), np.empty((times, x.size), np.float32)
    for step in range(times):
        ctx = context(x, step=step)
        compressor.decompress(encode(compressor, x, ctx), rows[step], ctx)
    return rows.astype(np.float64)


@pytest.mark.parametrize("spec", ["natural | ef", "terngrad(clip=23.0)", "terngrad | ef"])
def test_conformance(spec):
    check_compressor(spec)


@pytest.mark.parametrize("spec", SPECS)
@given(x=vectors(every_float), step=st.integers(0, 5), offset=st.integers(0, 3))
@settings(max_examples=60)
def test_kernels_are_array_code_bit_for_bit(spec, x, step, offset):
    compressor = parse(spec)
    ctx = context(x, step=step, offset=offset * compressor.bucket)
    reference, fast = compressor.compress(x, ctx), encode(compressor, x, ctx)
    for name in fast:
        assert fast[name].tobytes() == reference[name].tobytes(), name
    out = np.empty(x.size, np.float32)
    compressor.decompress(fast, out, context(x, xp=array_code))
    np.testing.assert_array_equal(decode(compressor, fast, x.size, ctx), out)
    summed = np.empty_like(out)
    compressor.sum_into([fast, reference], summed, ctx)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(summed, out + out)


@pytest.mark.parametrize("spec", SPECS)
@given(x=vectors(every_float), seed=seeds)
@settings(max_examples=40)
def test_feedback_kernels_are_array_code_bit_for_bit(spec, x, seed):
    compressor, fast, slow = parse(f"{spec} | ef"), {}, {}
    noise = np.random.default_rng(seed).standard_normal(x.size).astype(np.float32)
    for step, piece in enumerate((x, noise, x)):
        with np.errstate(all="ignore"):
            reference = compressor.compress(piece, context(x, slow, step=step))
        payload = encode(compressor, piece, context(x, fast, step=step))
        assert all(payload[name].tobytes() == reference[name].tobytes() for name in payload)
        np.testing.assert_array_equal(fast["residual"], slow["residual"])
        assert np.isfinite(fast["residual"]).all()


@given(x=vectors(st.floats(-(2.0**127), 2.0**127, width=32)))
def test_natural_takes_a_neighbouring_power_of_two(x):
    ctx = context(x)
    compressor = parse("natural(bucket=32)")
    out = decode(compressor, encode(compressor, x, ctx), x.size, ctx).astype(np.float64)
    wide = x.astype(np.float64)
    fraction, exponent = np.frexp(np.abs(wide))
    below, above = np.ldexp(0.5, exponent), np.ldexp(np.where(fraction > 0.5, 1.0, 0.5), exponent)
    for start in range(0, x.size, 32):
        s = slice(start, start + 32)
        top = max(np.ldexp(2.0, -126), above[s].max() * 2.0**-125 if x.size else 0)
        usual = np.abs(wide[s]) >= top
        size = np.abs(out[s])
        assert ((size == below[s]) | (size == above[s]))[usual].all()
        # Smaller ones go to zero or to the lowest power there is.
        assert (size[~usual] <= top).all()
    assert (np.signbit(out) == np.signbit(x))[out != 0].all()


def test_natural_keeps_powers_of_two():
    x = np.ldexp(np.float32(1), np.arange(-126, 1)).astype(np.float32)
    x = np.concatenate([x, -x, np.zeros(3, np.float32)])
    for step in range(20):
        ctx = context(x, step=step)
        assert (decode(parse("natural"), encode(parse("natural"), x, ctx), x.size, ctx) == x).all()


@pytest.mark.parametrize("scale", [1.0, 1e-19, 1e-30, 1e-38, 1e-41, 3e-44, 1e37])
def test_natural_is_unbiased_with_an_eighth(scale):
    x = (np.random.default_rng(3).standard_normal(200) * scale).astype(np.float32)
    wide, rows = x.astype(np.float64), draws("natural", x)
    unit = 2.0 ** np.ceil(np.log2(np.maximum(np.abs(wide), 2.0**-149)))  # what an error can be
    assert (np.abs(rows.mean(axis=0) - wide) <= 6 * unit / 2 / np.sqrt(DRAWS)).all()
    variance = np.square(rows - wide).sum(axis=1).mean()
    assert variance <= parse("natural").traits().omega * np.square(wide).sum() * 1.02
    if scale > 1e-43:  # the last subnormal numbers are nearly all powers of two
        assert variance >= 0.07 * np.square(wide).sum()  # 0.082 for a Gaussian


@pytest.mark.parametrize("spec", ["int4(stochastic=True)", "int8(stochastic=True)"])
@pytest.mark.parametrize("scale", [1.0, 1e-19, 1e-30, 1e30])
def test_stochastic_int4_and_int8_are_unbiased(spec, scale):
    """Of many draws the mean is the value, and nearest rounding's is not."""
    x = (np.random.default_rng(3).standard_normal(200) * scale).astype(np.float32)
    x[0] = 4 * np.abs(x).max()  # the largest: most others lie between zero and a few levels
    wide, rows = x.astype(np.float64), draws(spec, x)
    level = np.abs(wide).max() / parse(spec).levels * 1.01  # a scale is rounded up
    assert (np.abs(rows.mean(axis=0) - wide) <= 6 * level / 2 / np.sqrt(DRAWS)).all()
    nearest = draws(spec.replace("True", "False"), x, 1)[0]
    assert np.abs(nearest - wide).max() > 0.3 * level


def test_natural_rounds_what_is_below_its_range_without_bias():
    x = np.full(512, 1e-8, np.float32)
    x[0] = 2.0**110  # the lowest power of this bucket is 2**-16
    rows = draws("natural", x, 2000)[:, 1:]
    assert set(np.unique(rows)) == {0.0, 2.0**-16}
    p = 1e-8 * 2.0**16
    assert abs((rows > 0).mean() - p) <= 6 * np.sqrt(p / rows.size)


def test_natural_saturates_only_beyond_its_highest_power():
    x = np.full(100, np.finfo(np.float32).max)
    assert (decode(parse("natural"), encode(parse("natural"), x, context(x)), 100, context(x))
            == 2.0**127).all()  # fmt: skip


@given(x=vectors(st.floats(-(2.0**100), 2.0**100, width=32)), clip=st.sampled_from([1.0, 2.5, 8.0]))
def test_terngrad_sends_three_levels_within_its_clip(x, clip):
    compressor, ctx = parse(f"terngrad(bucket=64, clip={clip})"), context(x)
    out = decode(compressor, encode(compressor, x, ctx), x.size, ctx).astype(np.float64)
    for start in range(0, x.size, 64):
        piece, sent = x[start : start + 64].astype(np.float64), out[start : start + 64]
        s = min(np.abs(piece).max(), clip * np.sqrt(np.square(piece).mean()))
        levels = np.unique(np.abs(sent[sent != 0]))
        assert levels.size <= 1
        if levels.size and s > 1e-36:
            assert s * (1 - 1e-6) <= levels[0] <= s * (1 + 2.0**-7) * (1 + 1e-6)
        assert (sent * piece >= 0).all()
        assert not sent[piece == 0].any()


@pytest.mark.parametrize("scale", [1.0, 1e-25, 1e-38])
@pytest.mark.parametrize("clip", [1.5, 23.0])
def test_terngrad_is_unbiased_on_the_clipped_vector(scale, clip):
    x = (np.random.default_rng(4).standard_t(3, 300) * scale).astype(np.float32)
    rows = draws(f"terngrad(clip={clip})", x)
    s = np.abs(rows).max()
    clipped = np.clip(x.astype(np.float64), -s, s)
    spread = np.sqrt(np.maximum(s * np.abs(clipped) - clipped**2, 0))
    allowed = 6 * spread / np.sqrt(DRAWS) + 2.0**-23 * s + 2.0**-146
    assert (np.abs(rows.mean(axis=0) - clipped) <= allowed).all()
    assert (np.abs(clipped) < np.abs(x)).any() == (clip == 1.5)
    energy, expected = np.square(rows).sum(axis=1), s * np.abs(clipped).sum()
    assert abs(energy.mean() - expected) <= 6 * energy.std() / np.sqrt(DRAWS) + 1e-6 * expected


def test_terngrad_promises_no_bias_only_without_clipping():
    assert parse("terngrad").traits().omega is None
    omega = parse("terngrad(bucket=64, clip=8.0)").traits().omega
    worst = np.full(64, 1 / 9, np.float32)
    worst[0] = 1
    rows = draws("terngrad(bucket=64, clip=8.0)", worst, 2000)
    measured = np.square(rows - worst).sum(axis=1).mean() / np.square(worst).sum()
    assert 0.95 * (np.sqrt(64) - 1) / 2 <= measured <= omega


@pytest.mark.parametrize("spec", ["natural(bucket=64)", "terngrad(bucket=64)"])
@given(seed=seeds, at=st.integers(0, 10))
@settings(max_examples=20)
def test_cutting_at_buckets_changes_nothing(spec, seed, at):
    x = np.random.default_rng(seed).standard_normal(603).astype(np.float32)
    compressor, cut = parse(spec), min(at * 64, x.size)
    whole = encode(compressor, x, context(x))
    left = encode(compressor, x[:cut], context(x))
    right = encode(compressor, x[cut:], context(x, offset=cut))
    for name in whole:
        assert np.concatenate([left[name], right[name]]).tobytes() == whole[name].tobytes()
