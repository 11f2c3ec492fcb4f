"""One bit per entry: onebit and signsgd, against float64 NumPy."""

import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ringlet.compressors import OneBit, OptionError, parse
from ringlet.compressors.base.contract import empty_payload
from ringlet.compressors.testing import parametrize_with_checks
from ringlet.compressors.testing.tools.simulate import context, decode, encode, simulate

SPECS = ["onebit", "onebit(bucket=40)", "signsgd", "signsgd(scale=0.25, bucket=32)"]
array_code = types.ModuleType("array_code")  # NumPy under a name that no kernel is chosen for
array_code.__dict__.update(vars(np))

seeds = st.integers(0, 2**32 - 1)
every_float = st.floats(width=32, allow_nan=True, allow_infinity=True)
finite = st.floats(-(2.0**100), 2.0**100, width=32)


def vectors(elements, longest=700):
    return hnp.arrays(np.float32, st.integers(0, longest), elements=elements)


@parametrize_with_checks(["onebit", "onebit | ef", "signsgd", "signsgd(scale=0.5)"])
def test_conformance(compressor, check):
    check(compressor)


@pytest.mark.parametrize("spec", SPECS)
@given(x=vectors(every_float), start=st.integers(0, 3))
@settings(max_examples=60)
def test_kernels_are_array_code_bit_for_bit(spec, x, start):
    compressor, x = parse(spec), x[start:]
    reference = compressor.compress(x, context(x))
    fast = encode(compressor, x, context(x))
    for name in fast:
        assert fast[name].tobytes() == reference[name].tobytes(), name
    out = np.empty(x.size, np.float32)
    compressor.decompress(fast, out, context(x, xp=array_code))
    np.testing.assert_array_equal(decode(compressor, fast, x.size, context(x)), out)
    summed = np.empty_like(out)
    compressor.sum_into([fast, reference, fast], summed, context(x))
    with np.errstate(over="ignore"):  # as kernels add: to infinity
        np.testing.assert_array_equal(summed, (out + out) + out)


@pytest.mark.parametrize("spec", SPECS)
@given(x=vectors(every_float), seed=seeds)
@settings(max_examples=40)
def test_feedback_kernels_are_array_code_bit_for_bit(spec, x, seed):
    compressor, fast, slow = parse(spec), np.zeros(x.size, np.float32), np.zeros(x.size, np.float32)
    for piece in x, np.random.default_rng(seed).standard_normal(x.size).astype(np.float32), x:
        payload = empty_payload(compressor, x.size, context(x))
        with np.errstate(all="ignore"):
            reference = compressor.compress_feedback(piece, slow, 1.0, context(x))
        compressor.feedback_into(piece, fast, 1.0, payload, context(x))
        assert all(payload[name].tobytes() == reference[name].tobytes() for name in payload)
        assert fast.tobytes() == slow.tobytes()
        assert np.isfinite(fast).all()


@pytest.mark.parametrize("spec", SPECS)
@given(x=vectors(finite))
@settings(max_examples=30)
def test_bits_are_signs(spec, x):
    packed = encode(parse(spec), x, context(x))["codes"]
    bits = np.unpackbits(packed, bitorder="little")
    assert (bits[: x.size] == (x < 0))[x != 0].all()
    assert not bits[x.size :].any()


@pytest.mark.parametrize("spec", SPECS)
@given(
    seed=seeds, cut=st.integers(0, 20), rank=st.integers(0, 9), xp=st.sampled_from([np, array_code])
)
@settings(max_examples=30)
def test_signs_of_zeros_are_drawn_anew_by_each_rank_in_each_step(spec, seed, cut, rank, xp):
    compressor, x = parse(spec), np.zeros(40_960, np.float32)
    x[::2] = -0.0

    def drawn(start=0, **fields):
        ctx = context(x, seed=seed, offset=start, xp=xp, **fields)
        packed = encode(compressor, x[start:], ctx)["codes"]
        return np.unpackbits(packed, bitorder="little")

    bits = drawn(rank=rank)
    for other in drawn(rank=rank, step=1), drawn(rank=rank + 1):
        assert abs((bits == other).mean() - 0.5) < 6 * 0.5 / np.sqrt(x.size)
    assert abs(bits.mean() - 0.5) < 6 * 0.5 / np.sqrt(x.size)
    start = cut * compressor.bucket
    assert (drawn(start, rank=rank) == bits[start:]).all()


@given(x=vectors(st.floats(-(2.0**100), 2.0**100, width=32)))
def test_onebit_loses_what_the_mean_magnitude_says(x):
    """||x - C||^2 = ||x||^2 - ||x||_1^2 / d, up to the rounding of the scale."""
    compressor = parse("onebit(bucket=64)")
    ctx = context(x)
    out = decode(compressor, encode(compressor, x, ctx), x.size, ctx).astype(np.float64)
    for start in range(0, x.size, 64):
        piece = x[start : start + 64].astype(np.float64)
        mean = np.abs(piece).mean()
        if mean < 1e-36:  # where bfloat16 has fewer bits
            continue
        assert np.abs(np.abs(out[start : start + 64]) - mean).max() <= 2.0**-8 * mean
        energy, gain = np.square(piece).sum(), piece.size * mean**2
        lost = np.square(piece - out[start : start + 64]).sum()
        assert abs(lost - (energy - gain)) <= gain * 2.0**-15 + energy * 1e-12


def test_onebit_holds_for_the_largest_numbers():
    x = np.full(100, np.finfo(np.float32).max)
    out = decode(parse("onebit"), encode(parse("onebit"), x, context(x)), 100, context(x))
    assert np.isfinite(out).all()
    assert (out > 0.99 * x).all()


@given(
    votes=hnp.arrays(
        np.float32,
        st.tuples(st.integers(1, 9), st.integers(1, 100)),
        elements=st.sampled_from([-2.5, -1e-40, -0.0, 0.0, 1e-40, 3.0]),
    ),
    seed=seeds,
    scale=st.sampled_from([1.0, 0.125, 2.0**-30, 2.0**40]),
)
def test_the_majority_wins(votes, seed, scale):
    compressor = parse(f"signsgd(bucket=32, scale={scale!r})")
    balance, undecided = np.sign(votes).sum(axis=0), (votes == 0).sum(axis=0)
    order, step = np.random.default_rng(seed).permutation(len(votes)), seed % 5
    tie = np.where((np.arange(balance.size) + step) % 2, -1, 1)
    for ranks in votes, votes[order]:
        for out in simulate(compressor, list(ranks), step=step):
            assert (np.abs(out) == np.float32(scale)).all()
            decided = np.abs(balance) > undecided
            assert (np.sign(out) == np.sign(balance))[decided].all()
            tied = (balance == 0) & (undecided == 0)
            assert (np.sign(out) == tie)[tied].all()


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("known", [0.0, 1.0])
def test_what_is_undecided_does_not_drift(size, known):
    """Zeros on all ranks, and as many votes for either side of an element."""
    compressor, total = parse("signsgd"), np.zeros(2000)
    gradients = [np.full(2000, known * (-1) ** rank, np.float32) for rank in range(size)]
    if size % 2 and known:
        gradients[-1][:] = 0
    for step in range(200):
        total += simulate(compressor, gradients, step=step)[0]
    assert np.abs(total).max() <= 6 * np.sqrt(200)
    assert abs(total.mean()) <= 6 * np.sqrt(200 / 2000)


@given(
    sums=vectors(st.sampled_from([-2.0, -0.0, 0.0, 1.0, np.nan])), step=st.integers(0, 9),
    start=st.integers(0, 9),
)  # fmt: skip
def test_votes_are_counted_by_kernels_as_in_array_code(sums, step, start):
    compressor, other = parse("signsgd(scale=0.5)"), sums.copy()
    compressor.finish(sums, context(sums, step=step, offset=start))
    compressor.finish(other, context(other, step=step, offset=start, xp=array_code))
    assert sums.tobytes() == other.tobytes()


@given(votes=st.integers(1, 8).flatmap(lambda w: st.tuples(st.just(w), seeds)))
@settings(max_examples=30)
def test_reducing_shards_gives_the_same_vote(votes):
    """Scatter-reduce encodes the sum of a shard again: signs of a sum of signs. But for ties."""
    size, seed = votes
    compressor = parse("signsgd(bucket=32)")
    gradients = np.random.default_rng(seed).integers(-1, 2, (size, 200)).astype(np.float32)
    contexts = [context(x, rank=rank, size=size) for rank, x in enumerate(gradients)]
    total = np.empty(200, np.float32)
    payloads = [encode(compressor, x, c) for x, c in zip(gradients, contexts, strict=True)]
    compressor.sum_into(payloads, total, contexts[0])
    total /= size
    out = decode(compressor, encode(compressor, total, contexts[0]), 200, contexts[0])
    compressor.finish(out, contexts[0])
    assert (np.abs(out) == 1).all()
    decided = total != 0
    assert (out == simulate(compressor, list(gradients))[0])[decided].all()


def test_onebit_is_as_small_as_it_says():
    x = np.ones(1 << 20, np.float32)
    sent = parse("onebit").compress(x, context(x))
    times = x.nbytes / sum(array.nbytes for array in sent.values())
    assert f" {times:.1f} times smaller than float32" in OneBit.__doc__


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_vote_with_overflow_shows_it(bad):
    gradients = [np.ones(100, np.float32) for _ in range(3)]
    gradients[1][40] = bad
    for out in simulate(parse("signsgd(bucket=32)"), gradients):
        assert np.isnan(out[32:64]).all()
        assert (out[:32] == 1).all()


@pytest.mark.parametrize("scale", [3.0, 0.1, 2.0**-120, 2.0**101])
def test_votes_must_be_powers_of_two(scale):
    with pytest.raises(OptionError, match="power of two"):
        parse(f"signsgd(scale={scale!r})")
