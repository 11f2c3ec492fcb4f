"""Error feedback: fused and not, behind what may diverge, and on the second stage alone."""

import re
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ringlet.compressors import Compressor, CompressorError, Context, parse
from ringlet.compressors.base.contract import empty_payload
from ringlet.compressors.testing import check_compressor
from ringlet.compressors.testing.tools.simulate import context, encode, simulate

array_code = types.ModuleType("array_code")  # NumPy under a name that no kernel is chosen for
array_code.__dict__.update(vars(np))

seeds = st.integers(0, 2**32 - 1)
every_float = st.floats(width=32, allow_nan=True, allow_infinity=True)
finite = st.floats(-(2.0**127), 2.0**127, width=32)

FUSED = [
    "none",
    "fp16",
    "bf16",
    "int8(bucket=32)",
    "minmax(bits=3, bucket=64, stochastic=True)",
    "natural",
    "onebit(bucket=64)",
    "fp8",
    "topk(ratio=0.2)",
    "block_topk(ratio=0.2, block=64)",
    "randomk(ratio=0.2)",
    "topk(ratio=0.3) | fp16",
    "topk(ratio=0.3) | int8(bucket=32)",
    "topk(ratio=0.5) | topk(ratio=0.3) | int8(bucket=32)",
    "threshold(value=0.5)",
    "threshold(value=0.1, cap=0.05)",
    "topk_sampled(ratio=0.1)",
    "sidco(ratio=0.1)",
    "lossless",
    "threshold(value=0.5) | fp16",
    "threshold(value=0.5) | int8(bucket=32)",
    "threshold(value=0.5) | lossless",
    "sidco(ratio=0.2) | threshold(value=0.3)",
]


def same(a, b):
    """Whether payloads hold the same arrays, any NaN being as good as another."""
    assert a.keys() == b.keys()
    for name in a:
        np.testing.assert_array_equal(a[name], b[name])
    return True


def feedback(compressor, x, residual, decay, plainly):
    """Return the payload; ``plainly`` by the contract's own, unfused code."""
    ctx, fixed = context(x, step=3), compressor.traits().fixed_size
    chosen = Compressor if plainly else type(compressor)
    with np.errstate(all="ignore"):
        if not fixed:
            return chosen.compress_feedback(compressor, x, residual, decay, ctx)
        payload = empty_payload(compressor, x.size, ctx)
        chosen.feedback_into(compressor, x, residual, decay, payload, ctx)
    return payload


@pytest.mark.parametrize("spec", FUSED)
@given(data=st.data(), special=st.booleans(), decay=st.sampled_from([1.0, 0.9, 0.3]))
@settings(max_examples=50)
def test_fused_feedback_is_feedback_bit_for_bit(spec, data, special, decay):
    x = data.draw(
        hnp.arrays(np.float32, st.integers(0, 300), elements=every_float if special else finite)
    )
    held = data.draw(hnp.arrays(np.float32, x.size, elements=finite))
    compressor, before, residuals = parse(spec), x.copy(), (held.copy(), held.copy())
    payloads = [
        feedback(compressor, x, residual, decay, plainly)
        for residual, plainly in zip(residuals, (False, True), strict=True)
    ]
    assert same(*payloads)
    np.testing.assert_array_equal(*residuals)
    if not spec.startswith("minmax"):  # whose zeros may have either sign
        assert residuals[0].tobytes() == residuals[1].tobytes()
    assert np.isfinite(residuals[0]).all()
    assert x.tobytes() == before.tobytes()
    for array in payloads[0].values():
        assert not np.shares_memory(array, residuals[0])


@pytest.mark.parametrize("spec", FUSED)
@given(n=st.sampled_from([0, 1, 1000, 1025, 5000]), seed=seeds)
@settings(max_examples=10)
def test_fused_feedback_over_several_steps(spec, n, seed):
    compressor, rng = parse(spec), np.random.default_rng(seed)
    residuals = np.zeros(n, np.float32), np.zeros(n, np.float32)
    for step in range(3):
        x = rng.standard_t(3, n).astype(np.float32)
        if step == 1 and n > 2:
            x[[1, n // 2]] = np.nan, np.inf
        payloads = [
            feedback(compressor, x, residual, 0.9, plainly)
            for residual, plainly in zip(residuals, (False, True), strict=True)
        ]
        assert same(*payloads)
        assert residuals[0].tobytes() == residuals[1].tobytes()


@pytest.mark.parametrize("spec", ["threshold(value=0.5)", "sidco(ratio=0.1)"])
def test_array_code_keeps_the_same_residual(spec):
    compressor, states = parse(f"{spec} | ef"), [{}, {}]
    for step in range(3):
        x = np.random.default_rng(step).standard_normal(2000).astype(np.float32)
        payloads = [
            compressor.compress(x, context(x, state, step=step, xp=xp))
            for state, xp in zip(states, (np, array_code), strict=True)
        ]
        assert same(*payloads)
        np.testing.assert_array_equal(states[0]["residual"], states[1]["residual"])


# -- what diverges --------------------------------------------------------------------------------


@pytest.mark.parametrize("modifier", ["ef", "ef(decay=0.9)", "ef21", "momentum_correction"])
@pytest.mark.parametrize(
    ("spec", "advice"),
    [
        ("randomk", r"write 'randomk\(unbiased=False\)'"),
        ("randomk(ratio=0.2) | hadamard", r"write 'randomk\(ratio=0.2, unbiased=False\)'"),
        ("qsgd(bits=4)", r"omega is 3.28.* write 'qsgd\(bits=4\) \| scaled \| {}'"),
        ("topk | qsgd(bits=3)", "omega is"),
        ("minmax(bits=1)", "write 'onebit'"),
        ("signsgd(scale=0.25)", r"a vote is \+-0.25 .* use 'onebit' instead of 'signsgd'"),
        ("qsgd | warmup(steps=9, ramp='bits', start=4)", "omega is 3.28"),
        ("terngrad | hadamard", r"rotated values .*write 'terngrad\(clip=1\.5\)'"),
        ("topk(ratio=1) | terngrad | hadamard", "rotated values"),
        ("maxnorm(bits=2, stochastic=True) | hadamard", "rotated values .*write bits=3"),
        ("terngrad_shared | hadamard", "rotated values"),
        ("shared_int(levels=1, stochastic=True) | hadamard", "rotated values .*more levels"),
    ],
)
def test_feedback_that_would_diverge_is_refused(spec, advice, modifier):
    of_payloads = modifier in ("ef21", "momentum_correction")
    if (modifier == "ef21" and spec.startswith("randomk")) or (of_payloads and "shared" in spec):
        return  # refused for another reason
    with pytest.raises(
        CompressorError, match=f"would diverge: .*{advice.format(re.escape(modifier))}"
    ):
        parse(f"{spec} | {modifier}")


def residual_norms(compressor, steps, n=4096):
    state, norms = {}, []
    for step in range(steps):
        x = np.random.default_rng(step).standard_normal(n).astype(np.float32)
        encode(compressor, x, context(x, state, step=step))
        norms.append(float(np.linalg.norm(state["residual"]) / np.sqrt(n)))
    return norms


@pytest.mark.parametrize(
    "spec",
    [
        "qsgd",
        "int4(stochastic=True)",
        "maxnorm(bits=2, stochastic=True)",
        "minmax(bits=2, stochastic=True)",
        "natural",
        "terngrad",
        "terngrad(clip=23.0)",
        "randomk(ratio=0.1, unbiased=False)",
        "randomk(ratio=0.1) | scaled",
        "randomk(ratio=0.6)",
        "qsgd(bits=4) | scaled",
        "qsgd(bits=4) | scaled(factor=0.4)",
        "qsgd(bits=2) | scaled",
        "topk(ratio=0.2) | int4(stochastic=True)",
        "terngrad(clip=2.0) | hadamard",
        "maxnorm(bits=3, stochastic=True) | hadamard",
        "terngrad(clip=32.0) | scaled | hadamard",
    ],
)
def test_what_is_not_refused_stays_bounded_over_hundreds_of_steps(spec):
    norms = residual_norms(parse(f"{spec} | ef"), 600)
    assert max(norms[300:]) < 1.25 * max(norms[:300])
    assert max(norms) < 60


def test_votes_do_not_grow_with_what_is_held_back():
    inner, residual = parse("signsgd"), np.zeros(64, np.float32)
    for step in range(100):
        x = np.full(64, 3.0, np.float32)
        payload = empty_payload(inner, 64, context(x))
        inner.feedback_into(x, residual, 1.0, payload, context(x, step=step))
    assert inner.divergence()
    assert (residual == 200).all()


@pytest.mark.parametrize("spec", ["qsgd(bits=4)", "randomk(ratio=0.05)", "qsgd(bits=2)"])
def test_unscaled_they_do_diverge(spec):
    inner, n = parse(spec), 4096
    assert inner.divergence()
    residual = np.zeros(n, np.float32)
    with np.errstate(all="ignore"):
        for step in range(300):
            x = np.random.default_rng(step).standard_normal(n).astype(np.float32)
            payload = empty_payload(inner, n, context(x))
            inner.feedback_into(x, residual, 1.0, payload, context(x, step=step))
        assert not np.linalg.norm(residual.astype(np.float64)) / np.sqrt(n) < 1000


@pytest.mark.parametrize(
    "spec", ["qsgd(bits=4) | scaled", "randomk | scaled | ef", "natural | scaled"]
)
def test_scaled_conforms(spec):
    check_compressor(spec)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("topk | scaled", "declares omega"),
        ("int8 | ef | scaled", "declares omega"),
        ("shared_int | scaled", "declares omega"),
        ("qsgd(bits=4) | scaled(factor=0.9)", "must be below 0.467"),
        ("qsgd | scaled(factor=1.5)", "factor must be"),
    ],
)
def test_scaled_needs_a_variance(spec, reason):
    with pytest.raises(CompressorError, match=reason):
        parse(spec)


def test_scaled_training_arrives():
    """Least squares with noise: sums of what is applied follow the gradients."""
    for spec in ("qsgd(bits=4) | scaled | ef", "randomk(ratio=0.1) | scaled | ef"):
        compressor, states = parse(spec), [{}, {}]
        target = np.random.default_rng(0).standard_normal(2000)
        w = np.zeros(2000)
        for step in range(600):
            rng = np.random.default_rng(step)
            noise = rng.standard_normal((2, 2000)) * 0.1
            gradients = [(w - target + part).astype(np.float32) for part in noise]
            w -= 0.02 * simulate(compressor, gradients, states, step)[0]
        assert np.linalg.norm(w - target) < 0.1 * np.linalg.norm(target)


# -- the second stage -----------------------------------------------------------------------------


def reduced(compressor, gradients, states, owners, step):
    """Return the sum as a scatter-reduce gives it: every shard is compressed again by its owner."""
    size, n = len(gradients), gradients[0].size
    shard, result = n // size, np.empty(n, np.float32)
    sums = np.empty(n, np.float64)
    for part in range(size):
        piece, total = slice(shard * part, shard * part + shard), np.zeros(shard, np.float32)
        for rank, x in enumerate(gradients):
            ctx = context(x, states[rank], offset=piece.start, rank=rank, size=size, step=step)
            compressor.accumulate(encode(compressor, x[piece], ctx), total, ctx)
        sums[piece] = total
        ctx = Context(numel=shard, state=owners[part], stage=2, rank=part, size=size, step=step)
        compressor.decompress(encode(compressor, total, ctx), result[piece], ctx)
    return sums, result


@pytest.mark.parametrize("inner", ["int4(bucket=32)", "onebit(bucket=32)", "fp8"])
def test_the_server_feeds_back_what_the_second_stage_loses(inner):
    compressor, size, n = parse(f"{inner} | server_ef"), 4, 512
    states, owners = [{} for _ in range(size)], [{} for _ in range(size)]
    arrived, sent = np.zeros(n), np.zeros(n)
    for step in range(200):
        gradients = [np.random.default_rng([step, r]).standard_normal(n) for r in range(size)]
        sums, result = reduced(
            compressor, [x.astype(np.float32) for x in gradients], states, owners, step
        )
        arrived += sums
        sent += result
        assert not any(states), "a worker remembers something"
    held = np.concatenate([owner["residual"] for owner in owners])
    np.testing.assert_allclose(sent + held, arrived, atol=2e-3)
    assert np.linalg.norm(held) < 20 * np.linalg.norm(sums)


def test_ef_covers_both_stages():
    compressor, size, n = parse("int4(bucket=32) | ef"), 4, 512
    states, owners = [{} for _ in range(size)], [{} for _ in range(size)]
    given_, sent = np.zeros(n), np.zeros(n)
    for step in range(100):
        gradients = [np.random.default_rng([step, r]).standard_normal(n) for r in range(size)]
        wide = [x.astype(np.float32) for x in gradients]
        sent += reduced(compressor, wide, states, owners, step)[1]
        given_ += np.sum(wide, axis=0)
    held = np.concatenate([owner["residual"] for owner in owners])
    held = held + np.sum([state["residual"] for state in states], axis=0)
    np.testing.assert_allclose(sent + held, given_, atol=2e-3)


def test_momentum_is_applied_once_however_often_a_sum_is_compressed():
    compressor, size, n = parse("int8(bucket=32) | momentum_correction(masking=False)"), 4, 512
    states, owners = [{} for _ in range(size)], [{} for _ in range(size)]
    velocity, given_, sent = np.zeros(n), np.zeros(n), np.zeros(n)
    for step in range(60):
        gradients = [np.random.default_rng([step, r]).standard_normal(n) for r in range(size)]
        wide = [x.astype(np.float32) for x in gradients]
        sent += reduced(compressor, wide, states, owners, step)[1]
        velocity = 0.9 * velocity + np.sum(wide, axis=0)
        given_ += velocity
    assert not any("u" in owner for owner in owners)
    np.testing.assert_allclose(sent, given_, atol=0.05 * np.abs(given_).max())


@pytest.mark.parametrize("spec", ["int8 | server_ef", "onebit | hadamard | server_ef(decay=0.9)"])
def test_server_feedback_conforms(spec):
    check_compressor(spec)


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("topk | server_ef", "cannot be reduced in shards"),
        ("fp16 | server_ef", "cannot be reduced in shards"),
        ("powersgd | server_ef", "cannot be reduced in shards"),
        ("int8 | ef | server_ef", r"leave '\| server_ef' away"),
        ("int8 | server_ef | ef", r"leave '\| ef' away"),
    ],
)
def test_server_feedback_needs_a_second_stage(spec, reason):
    with pytest.raises(CompressorError, match=reason):
        parse(spec)
