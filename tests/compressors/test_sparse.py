"""Threshold, random-k, and top-k by estimated thresholds."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ringlet.compressors import PayloadError, parse
from ringlet.compressors.core.threads import limited
from ringlet.compressors.kernels.cpu.sparsifiers import topk
from ringlet.compressors.sparsifiers.randomk import first_places
from ringlet.compressors.sparsifiers.topk import largest_into
from ringlet.compressors.testing import check_compressor
from ringlet.compressors.testing.tools.simulate import context, decode, encode, simulate

seeds = st.integers(0, 2**32 - 1)
every_float = st.floats(width=32, allow_nan=True, allow_infinity=True)
ESTIMATES = ["topk_sampled(ratio=0.1)", "sidco(ratio=0.1)", "sidco(ratio=0.3, stages=1)"]


def vectors(elements, longest=700):
    return hnp.arrays(np.float32, st.integers(0, longest), elements=elements)


def drawn(n, seed, kind):
    rng = np.random.default_rng(seed)
    x = {
        "gauss": lambda: rng.standard_normal(n),
        "laplace": lambda: rng.laplace(size=n),
        "heavy": lambda: rng.standard_t(2, n),
        "spikes": lambda: rng.standard_normal(n) * (rng.random(n) < 0.004),
        "ties": lambda: rng.integers(-3, 4, n),
        "equal": lambda: np.ones(n),
    }[kind]()
    return x.astype(np.float32)


kinds = st.sampled_from(["gauss", "laplace", "heavy", "spikes", "ties", "equal"])


@pytest.mark.parametrize(
    "spec",
    [
        "threshold(value=0.1, cap=0.3) | ef",
        "randomk(ratio=0.2)",
        "topk_sampled | ef",
        "sidco(ratio=0.1)",
        "sidco | int8",
    ],
)
def test_conformance(spec):
    check_compressor(spec)


# -- threshold ------------------------------------------------------------------------------------


@given(x=vectors(every_float), value=st.floats(2.0**-149, 2.0**127, width=32))
def test_threshold_sends_everything_from_its_value_on(x, value):
    compressor = parse(f"threshold(value={value!r})")
    payload = compressor.compress(x, context(x))
    expected = np.flatnonzero(~(np.abs(x) < np.float32(value)))
    assert payload["indices"].tolist() == expected.tolist()
    assert payload["values"].tobytes() == x[expected].tobytes()
    reference = compressor.reference(x, context(x))
    assert all(reference[name].tobytes() == payload[name].tobytes() for name in payload)


@given(x=vectors(every_float), cap=st.floats(0.01, 1.0), value=st.sampled_from([0.5, 1e-30]))
def test_threshold_sends_the_largest_when_capped(x, cap, value):
    compressor = parse(f"threshold(value={value!r}, cap={cap!r})")
    payload = compressor.compress(x, context(x))
    reference = compressor.reference(x, context(x))
    assert all(reference[name].tobytes() == payload[name].tobytes() for name in payload)
    limit = compressor.limit(x.size)
    assert limit <= max(1, cap * x.size * (1 + 1e-9))
    above = np.flatnonzero(~(np.abs(x) < np.float32(value)))
    sent = payload["indices"]
    assert sent.size == min(limit, above.size)
    bits = x.view(np.uint32) & 0x7FFFFFFF
    left = np.setdiff1d(above, sent)
    if left.size:
        assert bits[left].max() <= bits[sent].min()
        tied = bits[sent] == bits[left].max()  # the lowest index among equals
        assert not tied.any() or sent[tied].max() < left[bits[left] == bits[left].max()].min()


@pytest.mark.parametrize("spec", ["threshold", "topk_sampled", "sidco"])
def test_indices_beyond_the_tensor_are_refused(spec):
    payload = {"indices": np.array([9], np.uint32), "values": np.ones(1, np.float32)}
    out = np.zeros(9, np.float32)
    for method in parse(spec).decompress, parse(spec).accumulate:
        with pytest.raises(PayloadError, match="beyond"):
            method(payload, out, context(out))


# -- estimated thresholds -------------------------------------------------------------------------


@pytest.mark.parametrize("spec", ESTIMATES)
@given(n=st.sampled_from([0, 1, 5, 33, 999, 5000, 20001]), seed=seeds, kind=kinds)
@settings(max_examples=40)
def test_estimates_send_about_k_and_always_the_largest(spec, n, seed, kind):
    compressor, x = parse(spec), drawn(n, seed, kind)
    payload = compressor.compress(x, context(x))
    reference = compressor.reference(x, context(x))
    assert all(reference[name].tobytes() == payload[name].tobytes() for name in payload)
    k, sent = compressor.count(n), payload["indices"]
    assert k == math.ceil(round(n * compressor.ratio, 6))
    assert 0.8 * k <= sent.size <= 1.3 * k
    assert (np.diff(sent.astype(np.int64)) > 0).all()
    assert payload["values"].tobytes() == x[sent].tobytes()
    left = np.setdiff1d(np.arange(n), sent)
    if left.size and sent.size:
        assert np.abs(x[left]).max() <= np.abs(x[sent]).min()
        energy, lost = (np.square(v.astype(np.float64)).sum() for v in (x, x[left]))
        assert lost <= (1 - compressor.traits().delta) * energy


@pytest.mark.parametrize("spec", ESTIMATES)
@given(x=vectors(every_float))
@settings(max_examples=40)
def test_estimates_survive_every_float(spec, x):
    compressor = parse(spec)
    with np.errstate(all="ignore"):
        payload = compressor.compress(x, context(x))
        reference = compressor.reference(x, context(x))
    assert all(reference[name].tobytes() == payload[name].tobytes() for name in payload)
    assert np.isfinite(payload["values"]).all() == np.isfinite(x).all()


def estimated(compressor, x, step=0):
    threshold = compressor.estimate(x, compressor.count(x.size), context(x, step=step), fast=True)
    return (np.abs(x) >= threshold).sum() / compressor.count(x.size)


def test_sidco_is_right_about_laplacian_gradients():
    x = drawn(400_000, 1, "laplace")
    for stages in range(1, 6):
        for ratio in (0.1, 0.01):
            share = estimated(parse(f"sidco(ratio={ratio}, stages={stages})"), x)
            assert abs(share - 1) < 6 / math.sqrt(ratio * x.size) + 0.02, (stages, ratio)


def test_sidco_needs_stages_for_gaussian_gradients():
    x = drawn(400_000, 1, "gauss")
    shares = [estimated(parse(f"sidco(ratio=0.001, stages={s})"), x) for s in (1, 2, 3, 4)]
    assert shares[0] < 0.02
    assert shares[1] < 0.2
    assert 0.6 < shares[2] < 0.85
    assert 0.95 < shares[3] < 1.2


def test_samples_err_as_little_as_they_should():
    x, compressor = drawn(200_000, 2, "heavy"), parse("topk_sampled(ratio=0.05)")
    shares = [estimated(compressor, x, step) for step in range(50)]
    # The 100th of 2000 sampled entries: a relative error of a tenth.
    assert abs(np.mean(shares) - 1) < 0.1
    assert 0.03 < np.std(shares) < 0.2


# -- random-k -------------------------------------------------------------------------------------


@pytest.mark.parametrize("unbiased", [True, False])
@given(x=vectors(every_float), ratio=st.floats(0.01, 1.0), step=st.integers(0, 9))
@settings(max_examples=60)
def test_randomk_kernels_are_array_code(unbiased, x, ratio, step):
    compressor = parse(f"randomk(ratio={ratio!r}, unbiased={unbiased})")
    with np.errstate(all="ignore"):
        reference = compressor.compress(x, context(x, step=step))["values"]
    fast = encode(compressor, x, context(x, step=step))["values"]
    np.testing.assert_array_equal(fast, reference)
    if unbiased:
        return  # no feedback stands behind it
    both, fast, slow = parse(f"{compressor} | ef"), {}, {}
    for again in range(3):
        with np.errstate(all="ignore"):
            reference = both.compress(x, context(x, slow, step=step + again))["values"]
        values = encode(both, x, context(x, fast, step=step + again))["values"]
        np.testing.assert_array_equal(values, reference)
        assert fast["residual"].tobytes() == slow["residual"].tobytes()
        assert np.isfinite(fast["residual"]).all()


@given(n=st.integers(1, 3000), ratio=st.floats(0.001, 1.0), seed=seeds)
def test_randomk_draws_without_replacement(n, ratio, seed):
    compressor, x = parse(f"randomk(ratio={ratio!r})"), np.zeros(n, np.float32)
    chosen = compressor.indices(n, context(x, seed=seed)).tolist()
    assert len(set(chosen)) == len(chosen) == compressor.count(n) >= 1
    assert max(chosen) < n
    # All ranks draw the same, and the next step something else.
    assert chosen == compressor.indices(n, context(x, seed=seed, rank=3, size=5)).tolist()
    if n > 200 and 0.2 < ratio < 0.8:
        assert chosen != compressor.indices(n, context(x, seed=seed, step=1)).tolist()


@pytest.mark.parametrize("n", [7, 50, 64, 101])
def test_randomk_draws_every_entry_and_every_pair_equally_often(n):
    k, times = n // 3, 6000
    hits = np.zeros((times, n))
    for step in range(times):
        ctx = context(np.zeros(n, np.float32), step=step)
        hits[step, first_places(np, ctx.key(shared=True), n, k)] = 1
    p, together = k / n, k * (k - 1) / (n * (n - 1))
    assert (np.abs(hits.mean(axis=0) - p) <= 6 * math.sqrt(p * (1 - p) / times)).all()
    pairs = (hits.T @ hits / times)[~np.eye(n, dtype=bool)]
    assert np.abs(pairs - together).max() <= 6.5 * math.sqrt(together * (1 - together) / times)


def test_randomk_reaches_everything_in_a_while():
    x, compressor = np.zeros(5000, np.float32), parse("randomk(ratio=0.05)")
    seen: set[int] = set()
    for step in range(400):  # 5000 * 0.95**400 is far below one
        seen |= set(compressor.indices(5000, context(x, step=step)).tolist())
    assert len(seen) == 5000


def test_randomk_is_unbiased_and_as_noisy_as_it_says():
    x = np.random.default_rng(5).standard_normal(300).astype(np.float32)
    compressor, times = parse("randomk(ratio=0.2)"), 6000
    total, energy = np.zeros(300), np.square(x.astype(np.float64)).sum()
    errors = np.empty(times)
    for step in range(times):
        ctx = context(x, step=step)
        out = decode(compressor, encode(compressor, x, ctx), 300, ctx).astype(np.float64)
        total += out
        errors[step] = np.square(out - x).sum()
    assert (np.abs(total / times - x) <= 6 * np.abs(x) * math.sqrt(4 / times) + 1e-6).all()
    assert abs(errors.mean() - 4 * energy) <= 6 * errors.std() / math.sqrt(times)
    assert abs(compressor.traits().omega - 4) < 1e-4


def test_without_scaling_randomk_contracts():
    x = np.random.default_rng(6).standard_normal(300).astype(np.float32)
    compressor, errors = parse("randomk(ratio=0.2, unbiased=False)"), []
    for step in range(3000):
        ctx = context(x, step=step)
        out = decode(compressor, encode(compressor, x, ctx), 300, ctx)
        assert ((out == x) | (out == 0)).all()
        errors.append(np.square(out - x.astype(np.float64)).sum())
    expected = 0.8 * np.square(x.astype(np.float64)).sum()
    assert abs(np.mean(errors) - expected) <= 6 * np.std(errors) / math.sqrt(3000)


@given(seed=seeds, size=st.integers(1, 6), n=st.integers(1, 500))
@settings(max_examples=40)
def test_randomk_adds_up_on_the_wire(seed, size, n):
    compressor = parse("randomk(ratio=0.3)")
    gradients = np.random.default_rng(seed).integers(-8, 9, (size, n)).astype(np.float32)
    contexts = [context(x, rank=rank, size=size) for rank, x in enumerate(gradients)]
    payloads = [encode(compressor, x, c) for x, c in zip(gradients, contexts, strict=True)]
    total = np.zeros_like(payloads[0]["values"])
    for payload in payloads:
        total += payload["values"]
    apart = np.zeros(n, np.float32)
    for payload in payloads:
        compressor.accumulate(payload, apart, contexts[0])
    together = decode(compressor, {"values": total}, n, contexts[-1])
    assert together.tobytes() == (apart + np.float32(0)).tobytes()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_randomk_shows_overflow_that_it_did_not_draw(bad):
    for at in range(0, 1000, 37):
        x = np.ones(1000, np.float32)
        x[at] = bad
        for out in simulate(parse("randomk(ratio=0.01)"), [np.ones(1000, np.float32), x]):
            assert not np.isfinite(out).all()


@pytest.mark.parametrize("spec", ["topk", "topk | ef", "threshold(value=0.5)", "block_topk"])
def test_values_may_be_read_only(spec):
    compressor, x = parse(spec), drawn(2000, 1, "gauss")
    expected = encode(compressor, x, context(x))
    x.flags.writeable = False  # as TensorFlow's are
    payload = encode(compressor, x, context(x))
    assert all(np.array_equal(payload[name], expected[name]) for name in expected)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize("kind", ["gauss", "spikes", "ties", "equal", "trap", "not finite"])
def test_topk_of_large_tensors_is_exact_with_feedback(kind, threads):
    """Where a sample gives the first threshold: also when that misleads, and in several threads."""
    n, k, seed = 900_001, 9_000, 5
    x = drawn(n, seed, "gauss" if kind in ("trap", "not finite") else kind)
    rng = np.random.default_rng(seed)
    if kind == "trap":  # every sampled entry is large
        x[:: n // topk.SAMPLE] *= 1e3
        x[topk.SAMPLE * (n // topk.SAMPLE) :] = 0
    if kind == "not finite":
        x[rng.integers(0, n, 50)] = [np.nan, np.inf, -np.inf, 1.0, 2.0] * 10
    residual = rng.standard_normal(n).astype(np.float32) * np.float32(0.1)
    weight = np.float32(0.9)
    with np.errstate(invalid="ignore"):
        total = x + weight * residual
    bits = total.view(np.uint32) & 0x7FFFFFFF
    order = np.lexsort((np.arange(n), -bits.astype(np.int64)))
    chosen = np.sort(order[:k])
    kept = np.where(np.isfinite(total), total, residual)
    kept[chosen[np.isfinite(total[chosen])]] = 0
    payload = {"indices": np.empty(k, np.uint32), "values": np.empty(k, np.float32)}
    with limited(threads):
        largest_into(x, payload, context(x), residual, 0.9)
    np.testing.assert_array_equal(payload["indices"], chosen)
    np.testing.assert_array_equal(payload["values"], total[chosen])
    np.testing.assert_array_equal(residual, kept)
