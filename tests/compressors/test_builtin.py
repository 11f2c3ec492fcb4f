"""What every built-in compressor promises, against float64 NumPy."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ringlet.compressors import Context, InputError, TopK, parse
from ringlet.compressors.base.contract import storage
from ringlet.compressors.testing.tools.simulate import decode, encode

SPECS = [
    "none",
    "fp16",
    "bf16",
    "int8",
    "int8(bucket=32)",
    "int8(stochastic=True)",
    "int4",
    "int4(bucket=40, stochastic=True)",
    "maxnorm(bits=2, bucket=32)",
    "maxnorm(bits=3, bucket=32, stochastic=True)",
    "maxnorm(bits=7)",
    "minmax",
    "minmax(bits=1, bucket=32)",
    "minmax(bits=6, bucket=64, stochastic=True)",
    "minmax(bits=8, bucket=64)",
    "qsgd",
    "qsgd(bits=4, bucket=128)",
    "topk",
    "topk(ratio=0.3)",
    "topk(ratio=0.3) | int8(bucket=32)",
    "topk(ratio=0.5) | fp16",
]
WITH_FEEDBACK = [
    *(f"{spec} | ef" for spec in SPECS if spec != "none" and not parse(spec).divergence()),
    "int8 | ef(decay=0.5)",
    "qsgd(bits=4, bucket=128) | scaled | ef",
]

lengths = st.one_of(st.integers(0, 200), st.sampled_from([511, 512, 513, 1024, 5000, 40000]))
seeds = st.integers(0, 2**32 - 1)
BIG = 2.0**100
finite = st.floats(-BIG, BIG, width=32)
every_float = st.floats(width=32, allow_nan=True, allow_infinity=True)


def vectors(elements):
    return hnp.arrays(np.float32, st.integers(0, 700), elements=elements)


def payload_for(compressor, n):
    return {p.name: np.zeros(p.elements, storage(p.dtype)) for p in compressor.layout(n)}


def context(x, state=None, **kw):
    return Context(shape=x.shape, numel=x.size, state={} if state is None else state, **kw)


def round_trip(compressor, x, ctx=None):
    ctx = ctx or context(x)
    out = np.full(x.size, 7.0, np.float32)
    compressor.decompress(compressor.compress(x, ctx), out, ctx)
    return out


def same_bits(a, b):
    return a.dtype == b.dtype and a.tobytes() == b.tobytes()


@pytest.mark.parametrize("spec", SPECS)
@given(x=vectors(every_float))
@settings(max_examples=60)
def test_kernels_agree_with_array_code_bit_for_bit(spec, x):
    compressor = parse(spec)
    reference = compressor.compress(x, context(x))
    fast = payload_for(compressor, x.size)
    compressor.encode_into(x, fast, context(x))
    assert reference.keys() == fast.keys()
    for name in fast:
        if fast[name].dtype.kind == "f":  # any NaN is as good as another
            np.testing.assert_array_equal(reference[name], fast[name])
        else:
            assert same_bits(reference[name], fast[name]), name


@pytest.mark.parametrize("spec", SPECS)
@given(n=lengths, seed=seeds)
@settings(max_examples=25)
def test_large_and_odd_lengths_agree_too(spec, n, seed):
    x = np.random.default_rng(seed).standard_normal(n).astype(np.float32)
    compressor = parse(spec)
    reference = compressor.compress(x, context(x))
    fast = payload_for(compressor, n)
    compressor.encode_into(x, fast, context(x))
    assert all(same_bits(reference[name], fast[name]) for name in fast)


@pytest.mark.parametrize("spec", SPECS)
@given(x=vectors(finite))
@settings(max_examples=40)
def test_input_is_untouched_and_output_is_filled(spec, x):
    before = x.copy()
    compressor = parse(spec)
    payload = compressor.compress(x, context(x))
    assert same_bits(x, before)
    assert not any(np.shares_memory(array, x) for array in payload.values() if array.size)
    out = np.full(x.size, np.nan, np.float32)
    compressor.decompress(payload, out, context(x))
    assert not np.isnan(out).any()


@pytest.mark.parametrize("spec", SPECS)
@given(x=vectors(st.floats(-1e4, 1e4, width=32)))
@settings(max_examples=40)
def test_accumulating_is_decoding_and_adding(spec, x):
    compressor = parse(spec)
    payload = compressor.compress(x, context(x))
    out = np.ones(x.size, np.float32)
    compressor.accumulate(payload, out, context(x))
    assert same_bits(out, np.float32(1) + round_trip(compressor, x))


@pytest.mark.parametrize("spec", SPECS)
def test_zeros_stay_zeros(spec):
    x = np.zeros(1000, np.float32)
    assert not round_trip(parse(spec), x).any()


@given(x=vectors(st.floats(-60000, 60000, width=32)))
def test_fp16_rounds_to_nearest(x):
    out = round_trip(parse("fp16"), x)
    assert np.array_equal(out, x.astype(np.float16).astype(np.float32))


@given(x=vectors(st.floats(-BIG, BIG, width=32, allow_subnormal=False)))
def test_bf16_is_within_half_a_unit_of_its_eight_bits(x):
    out = round_trip(parse("bf16"), x).astype(np.float64)
    assert (np.abs(out - x) <= np.abs(x.astype(np.float64)) * 2.0**-8).all()


@given(x=vectors(finite))
def test_int8_is_within_half_a_level_of_its_bucket(x):
    out = round_trip(parse("int8(bucket=64)"), x).astype(np.float64)
    for start in range(0, x.size, 64):
        piece = x[start : start + 64].astype(np.float64)
        # The scale is a bfloat16, rounded up: at most one part in 128 larger than max|x| / 127.
        level = np.abs(piece).max() / 127 * (1 + 2**-7)
        assert (np.abs(out[start : start + 64] - piece) <= 0.5001 * level + 1.5e-36).all()


@given(x=vectors(finite), cut=st.integers(0, 20))
def test_int8_may_be_cut_at_buckets(x, cut):
    compressor = parse("int8(bucket=32)")
    at = min(cut * 32, x.size)
    whole = compressor.compress(x, context(x))
    left = compressor.compress(x[:at], context(x))
    right = compressor.compress(x[at:], context(x, offset=at))
    for name in whole:
        assert same_bits(whole[name], np.concatenate([left[name], right[name]]))


@given(x=vectors(finite), ratio=st.floats(0.001, 1.0))
def test_topk_keeps_exactly_the_largest(x, ratio):
    compressor = TopK(ratio)
    out = round_trip(compressor, x)
    k = compressor.count(x.size)
    if x.size == 0:
        return
    payload = compressor.compress(x, context(x))
    kept = payload["indices"].astype(np.int64)
    assert kept.size == k == len(set(kept.tolist()))
    left = np.setdiff1d(np.arange(x.size), kept)
    smallest = np.abs(x[kept]).min()
    assert (np.abs(x[left]) <= smallest).all()
    # Among equals the lowest index wins.
    tied = np.flatnonzero(np.abs(x) == smallest)
    taken = np.isin(tied, kept)
    assert (np.diff(taken.astype(int)) <= 0).all()
    energy = np.square(x.astype(np.float64)).sum()
    lost = np.square(x.astype(np.float64) - out).sum()
    assert lost <= (1 - k / x.size) * energy * (1 + 1e-12) + 1e-300
    assert same_bits(round_trip(compressor, out), out)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("spec", SPECS)
def test_overflow_is_never_hidden(spec, bad):
    x = np.random.default_rng(0).standard_normal(2000).astype(np.float32)
    x[777] = bad
    assert not np.isfinite(round_trip(parse(spec), x)).all()


@pytest.mark.parametrize("spec", WITH_FEEDBACK)
@given(seed=seeds, n=st.sampled_from([1, 33, 700]), steps=st.integers(1, 20))
@settings(max_examples=20)
def test_feedback_telescopes(spec, seed, n, steps):
    """What was sent plus what is held back is what went in, weighted by the decay."""
    compressor = parse(spec)
    rng = np.random.default_rng(seed)
    fast, slow = {}, {}
    for step in range(steps):
        x = rng.standard_normal(n).astype(np.float32)
        before = fast.get("residual", np.zeros(n, np.float32)).astype(np.float64)
        payload = payload_for(compressor, n)
        compressor.encode_into(x, payload, context(x, fast, step=step))
        out = np.empty(n, np.float32)
        compressor.decompress(payload, out, context(x))
        target = x + compressor.decay * before
        np.testing.assert_allclose(out + fast["residual"].astype(np.float64), target, atol=2e-6)
        reference = compressor.compress(x, context(x, slow, step=step))
        assert all(same_bits(reference[name], payload[name]) for name in payload)
        assert same_bits(slow["residual"], fast["residual"])


@pytest.mark.parametrize("spec", WITH_FEEDBACK)
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_one_overflow_does_not_poison_the_residual(spec, bad):
    compressor = parse(spec)
    rng = np.random.default_rng(1)
    state: dict = {}
    for step in range(6):
        x = rng.standard_normal(3000).astype(np.float32)
        if step == 2:
            x[[5, 1234]] = bad
        payload = payload_for(compressor, x.size)
        compressor.encode_into(x, payload, context(x, state))
        out = np.empty(x.size, np.float32)
        compressor.decompress(payload, out, context(x))
        assert np.isfinite(state["residual"]).all()
        assert np.isfinite(out).all() == (step != 2)


@pytest.mark.parametrize("spec", ["topk(ratio=0.1) | ef", "int8 | ef", "fp16 | ef"])
def test_the_residual_stays_bounded(spec):
    compressor, state = parse(spec), {}
    rng = np.random.default_rng(2)
    norms = []
    for _ in range(300):
        x = rng.standard_normal(1000).astype(np.float32)
        payload = payload_for(compressor, x.size)
        compressor.encode_into(x, payload, context(x, state))
        norms.append(float(np.linalg.norm(state["residual"])))
    # Karimireddy et al., 2019: ||e||^2 <= 4 (1 - d) / d^2 G^2, here with d = 0.1.
    assert max(norms) <= np.sqrt(4 * 0.9 / 0.1**2) * np.sqrt(1100)


@pytest.mark.parametrize("spec", ["int8", "topk", "fp16", "topk | int8", "int8 | ef"])
@pytest.mark.parametrize(
    ("x", "what"),
    [
        (np.arange(10), "int64[10]"),
        (np.zeros(4, np.complex64), "complex64[4]"),
        (np.zeros(4), "float64[4]"),
        (np.zeros((2, 2), np.float32), "float32[2, 2]"),
        (np.zeros(8, np.float32)[::2], "float32[4] with gaps"),
        ([1.0, 2.0], "list[]"),
    ],
)
def test_other_inputs_are_refused_with_a_way_out(spec, x, what):
    with pytest.raises(InputError) as caught:
        parse(spec).compress(x, Context())
    assert what in str(caught.value)
    assert "ascontiguousarray" in str(caught.value)


@pytest.mark.parametrize(
    "spec", ["int8(stochastic=True)", "int4(stochastic=True)", "qsgd", "minmax(stochastic=True)"]
)
def test_random_rounding_is_fair_down_to_the_last_of_its_16_bits(spec):
    """What the documentation says: values less than 2**-16 of a level above one stay there."""
    compressor, n = parse(spec), 1 << 18
    bucket, drawn = compressor.bucket, {}
    for share in (2.0**-4, 2.0**-13, 2.0**-17):
        x = np.zeros(n, np.float32)
        x[::bucket] = 127.0 if spec.startswith("minmax") else 1.0
        level = _level(compressor, x)
        x[x == 0] = share * level
        x[1::bucket] = 0
        out = decode(compressor, encode(compressor, x, context(x)), n, context(x))
        drawn[share] = out[(x > 0) & (x < level)] > 0.5 * level
    for share in (2.0**-4, 2.0**-13):
        count = drawn[share].size
        assert abs(drawn[share].mean() - share) < 6 * np.sqrt(share / count) + 2.0**-16
    assert not drawn[2.0**-17].any()


def _level(compressor, x):
    """Return the distance of two neighbouring levels of a bucket."""
    bits = encode(compressor, x, context(x))["scales"][0]
    return (np.uint32(bits) << 16).view(np.float32)
