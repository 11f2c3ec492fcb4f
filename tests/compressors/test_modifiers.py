"""Modifiers: EF21, momentum correction, rotation, warm-up, minimal sizes."""

import dataclasses
import types
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlet.compressors import (
    Compressor,
    CompressorError,
    Context,
    Hadamard,
    Modifier,
    NoCompression,
    OptionError,
    TopK,
    Traits,
    option,
    parse,
)
from ringlet.compressors.base.contract import storage
from ringlet.compressors.core.context import SECOND_STAGE
from ringlet.compressors.core.threads import MIN_ELEMENTS
from ringlet.compressors.testing import CheckFailed, check_compressor, simulate
from ringlet.compressors.testing.checks.claims import check_parts_keep_apart
from ringlet.compressors.testing.checks.declared import check_schedule_goes_by_the_step
from ringlet.compressors.testing.tools.named_check import Named

plain = types.ModuleType("plain")
plain.__dict__.update(np.__dict__)

seeds = st.integers(0, 2**32 - 1)
lengths = st.sampled_from([1, 33, 200, 1000, 2100])


def normal(seed, n):
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def context(n, state=None, **fields):
    return Context(shape=(n,), numel=n, state={} if state is None else state, **fields)


def encode(compressor, x, ctx):
    if not compressor.traits().fixed_size:
        return compressor.compress(x, ctx)
    layout = compressor.layout(x.size)
    payload = {p.name: np.full(p.elements, 77, storage(p.dtype)) for p in layout}
    compressor.encode_into(x, payload, ctx)
    return payload


def decode(compressor, payload, ctx):
    out = np.full(ctx.numel, np.nan, np.float32)
    compressor.decompress(payload, out, ctx)
    return out


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, tuple):
        return all(same(p, q) for p, q in zip(a, b, strict=True))
    return bool(np.array_equal(a, b, equal_nan=np.asarray(a).dtype.kind == "f"))


MEMORIES = [
    "topk(ratio=0.2) | ef21",
    "int4 | ef21",
    "int8 | hadamard(block=64) | ef21",
    "lossless | ef21",
    "none | ef21",
    "topk(ratio=0.2) | momentum_correction",
    "topk(ratio=0.2) | int8 | momentum_correction(clip=0.5)",
    "int4 | momentum_correction(masking=False)",
    "fp8 | momentum_correction(masking=False)",
    "lossless | momentum_correction(masking=False)",
]


@pytest.mark.parametrize("spec", MEMORIES)
@given(n=lengths, seed=seeds, bad=st.sampled_from([None, np.nan, np.inf, -np.inf]))
@settings(max_examples=12)
def test_fast_paths_agree_and_overflow_does_not_stay(spec, n, seed, bad):
    compressor, fast, slow = parse(spec), {}, {}
    for step in range(5):
        x = normal(seed + step, n)
        if bad is not None and step == 2:
            x[n // 2] = bad
        outs = []
        for state, path in ((fast, encode), (slow, type(compressor).compress)):
            ctx = context(n, state, step=step, xp=plain if state is slow else np)
            with np.errstate(all="ignore"):
                payload = path(compressor, x, ctx)
                outs.append(decode(compressor, payload, ctx))
            compressor.finish(outs[-1], ctx)
        assert same(*outs)
        assert same(fast, slow)
        assert np.isfinite(outs[0]).all() == (bad is None or step != 2)
        remembered = [fast[name] for name in ("worker", "server", "u", "v") if name in fast]
        assert all(np.isfinite(array).all() for array in remembered)


# -- EF21 -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spec", ["topk(ratio=0.1) | ef21", "int8(bucket=32) | ef21", "none | ef21", "lossless | ef21"]
)
@given(size=st.integers(1, 5), seed=seeds)
@settings(max_examples=10)
def test_the_server_is_the_mean_of_the_workers(spec, size, seed):
    compressor, states = parse(spec), [{} for _ in range(size)]
    for step in range(8):
        gradients = [normal(seed + 10 * step + rank, 300) for rank in range(size)]
        if step == 3:
            gradients[0][7] = np.inf
        outs = simulate(compressor, gradients, states, step)
        assert len({out.tobytes() for out in outs}) == 1
        assert np.isfinite(outs[0]).all() == (step != 3)
        workers = [state["worker"].astype(np.float64) for state in states]
        np.testing.assert_allclose(states[0]["server"], np.mean(workers, axis=0), atol=1e-5)
        assert "sent" not in states[0]


@given(ratio=st.sampled_from([0.1, 0.3, 0.5]), seed=seeds)
@settings(max_examples=10)
def test_ef21_approaches_a_gradient_that_stands_still(ratio, seed):
    compressor, states, n = TopK(ratio) | parse("ef21"), [{}, {}], 200
    gradients = [normal(seed, n), normal(seed + 1, n)]
    first = [float(np.square(x, dtype=np.float64).sum()) for x in gradients]
    for step in range(12):
        simulate(compressor, gradients, states, step)
        for x, state, energy in zip(gradients, states, first, strict=True):
            lost = np.square(x - state["worker"], dtype=np.float64).sum()
            assert lost <= (1 - ratio) ** (step + 1) * energy * (1 + 1e-5) + 1e-9


def test_what_a_failed_step_left_in_a_file_is_not_taken_for_this_steps():
    compressor, n = parse("int4(bucket=32) | ef21"), 256
    states = [{}, {"sent": {"0": [n, {"codes": np.ones(n // 2, np.uint8)}]}}]
    known = {"sum": np.zeros(n, np.float32), "known": np.zeros(n, np.float32)}
    for state in states:
        outs = simulate(compressor, [normal(0, n)], [state | {"stage2.0": known}])
        np.testing.assert_array_equal(outs[0], simulate(compressor, [normal(0, n)], [{}])[0])


@given(failed=st.lists(st.integers(1, 8), max_size=7), cut=st.lists(st.integers(1, 8), max_size=7))
def test_what_a_failed_step_sent_in_other_parts_is_forgotten(failed, cut):
    compressor, n, states = parse("int4(bucket=32) | ef21"), 256, [{}, {}]
    for step, x in enumerate((normal(1, n), normal(2, n))):
        for state, cuts in zip(states, (cut if step else failed, []), strict=True):
            edges = [32 * edge for edge in sorted({0, *cuts, 8})]
            out = np.empty(n, np.float32)
            for start, stop in pairwise(edges):
                ctx = context(n, state, offset=start)
                payload = encode(compressor, x[start:stop], ctx)
                compressor.decompress(payload, out[start:stop], ctx)
            if step:  # the first one comes to no end
                compressor.finish(out, context(n, state))
    assert states[0].keys() == states[1].keys()
    for name, known in states[1].items():
        np.testing.assert_array_equal(states[0][name], known)


def test_ef21_in_two_stages():
    """Shards are compressed again by their owner, who tracks what all ranks know."""
    compressor, n, size = parse("int4(bucket=32) | ef21"), 256, 4
    owners = [{} for _ in range(size)]
    states = [{f"{SECOND_STAGE}{64 * part}": owner} for part, owner in enumerate(owners)]
    for step in range(60):
        gradients = [normal(rank, n) for rank in range(size)]
        if step == 20:
            gradients[2][100] = np.nan
        result = np.empty(n, np.float32)
        for part in range(size):
            piece, total = slice(64 * part, 64 * part + 64), np.zeros(64, np.float32)
            for rank, x in enumerate(gradients):
                ctx = context(n, states[rank], offset=64 * part, rank=rank, size=size, step=step)
                compressor.accumulate(encode(compressor, x[piece], ctx), total, ctx)
            total /= size
            ctx = Context(shape=(n,), numel=64, state=owners[part], stage=2, rank=part, step=step)
            compressor.decompress(encode(compressor, total, ctx), result[piece], ctx)
        outs = []
        for rank in range(size):
            outs.append(result.copy())
            compressor.finish(outs[-1], context(n, states[rank], rank=rank, size=size, step=step))
        known = np.concatenate([owner["known"] for owner in owners])
        for state, owner in zip(states, owners, strict=True):
            np.testing.assert_array_equal(state["server"], known)
            assert owner.keys() == {"sum", "known"}
        assert np.isfinite(outs[0]).all() == (step != 20)
        workers = np.mean([state["worker"] for state in states], axis=0)
        sums = np.concatenate([owner["sum"] for owner in owners])
        np.testing.assert_allclose(sums, workers, atol=1e-5)
    np.testing.assert_allclose(outs[0], np.mean(gradients, axis=0), atol=1e-4)


# -- momentum correction ----------------------------------------------------------------------


@given(momentum=st.sampled_from([0.0, 0.5, 0.9]), seed=seeds)
@settings(max_examples=10)
def test_sending_everything_is_momentum_sgd(momentum, seed):
    compressor = parse(f"topk(ratio=1.0) | momentum_correction({momentum}, masking=False)")
    state, velocity = {}, np.zeros(100)
    for step in range(15):
        x = normal(seed + step, 100)
        velocity = np.float64(np.float32(momentum)) * velocity + x
        (out,) = simulate(compressor, [x], [state], step)
        np.testing.assert_allclose(out, velocity, rtol=1e-5, atol=1e-5)
        assert not state["v"].any()


@pytest.mark.parametrize("spec", ["none", "bf16"])
def test_dense_steps_keep_their_momentum(spec):
    state, velocity = {}, np.zeros(100)
    for step in range(10):
        x, compressor = normal(step, 100), parse(f"{spec} | momentum_correction")
        velocity = 0.9 * velocity + x
        (out,) = simulate(compressor, [x], [state], step)
        np.testing.assert_allclose(out + state["v"], velocity, rtol=0.02, atol=0.03)


@given(n=st.integers(1, 300), seed=seeds, ratio=st.sampled_from([0.01, 0.1, 0.5]))
@settings(max_examples=20)
def test_masking_forgets_what_was_sent(n, seed, ratio):
    compressor, state = TopK(ratio) | parse("momentum_correction"), {"u": np.zeros(n, np.float32)}
    for step in range(6):
        x, ctx = normal(seed + step, n), context(n, state, step=step)
        velocity = np.float32(0.9) * state["u"] + x  # once in a while that is zero
        sent = decode(compressor, encode(compressor, x, ctx), ctx) != 0
        assert not state["u"][sent].any()
        assert not state["v"][sent].any()
        np.testing.assert_allclose(state["u"][~sent], velocity[~sent], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("inner", ["topk(ratio=0.05)", "int4", "fp8", "topk(ratio=0.1) | int8"])
@given(seed=seeds)
@settings(max_examples=8)
def test_nothing_is_lost_without_masking(inner, seed):
    compressor, state = parse(f"{inner} | momentum_correction(masking=False)"), {}
    sent, total, velocity, n = np.zeros(500), np.zeros(500), np.zeros(500), 500
    for step in range(15):
        x, ctx = normal(seed + step, n), context(n, state, step=step)
        velocity = np.float64(np.float32(0.9)) * velocity + x
        total += velocity
        sent += decode(compressor, encode(compressor, x, ctx), ctx)
    np.testing.assert_allclose(sent + state["v"], total, rtol=1e-4, atol=2e-4)


@given(seed=seeds, size=st.integers(1, 8), clip=st.sampled_from([0.1, 1.0, 1000.0]))
@settings(max_examples=10)
def test_gradients_are_clipped_to_their_share(seed, size, clip):
    compressor = parse(f"topk(ratio=1.0) | momentum_correction(0.0, {clip})")
    x, ctx = normal(seed, 300), context(300, size=size)
    out = decode(compressor, encode(compressor, x, ctx), ctx).astype(np.float64)
    norm = np.linalg.norm(x.astype(np.float64))
    expected = x * min(1.0, clip / np.sqrt(size) / norm)
    np.testing.assert_allclose(out, expected, rtol=1e-5)
    assert parse("int8 | momentum_correction(clip=1)").traits().granularity is None
    assert parse("int8 | momentum_correction").traits().granularity == 512


# -- rotation ---------------------------------------------------------------------------------


def matrix(n):
    """Return the orthonormal Hadamard matrix of order n, by Sylvester's construction."""
    h = np.ones((1, 1))
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h / np.sqrt(n)


@pytest.mark.parametrize("block", [64, 128, 512, 1024, 4096])
@given(n=st.integers(0, 5000), seed=seeds)
@settings(max_examples=15)
def test_the_kernel_rotates_as_array_code_does(block, n, seed):
    modifier, x = Hadamard(block), normal(seed, n)
    rotated, back, total = np.empty_like(x), np.empty_like(x), np.ones_like(x)
    modifier._rotate(x, context(n), rotated)
    np.testing.assert_array_equal(rotated, modifier.rotated_reference(x, context(n, xp=plain)))
    modifier._restore(rotated, context(n), back)
    reference = modifier.restored_reference(rotated, context(n, xp=plain))
    np.testing.assert_array_equal(back, reference)
    modifier._restore(rotated, context(n), total, add=True)
    np.testing.assert_array_equal(total, 1 + back)
    np.testing.assert_allclose(back, x, atol=1e-5)
    norm = np.linalg.norm(x.astype(np.float64))
    np.testing.assert_allclose(np.linalg.norm(rotated.astype(np.float64)), norm, rtol=1e-6)


@pytest.mark.parametrize("spec", ["int4(bucket=64) | hadamard(block=64)", "fp8 | hadamard"])
@given(n=st.integers(0, 3000), seed=seeds, bad=st.sampled_from([0.0, np.nan, np.inf]))
@settings(max_examples=15)
def test_feedback_through_the_rotation_is_feedback(spec, n, seed, bad):
    compressor, x = parse(spec), normal(seed, n)
    x[n // 3 : n // 3 + 1] = bad
    held, payloads = normal(seed + 1, n)[None].repeat(2, 0), []
    plainly = partial(Compressor.feedback_into, compressor)
    with np.errstate(all="ignore"):
        for residual, feedback_into in zip(held, (compressor.feedback_into, plainly), strict=True):
            layout = compressor.layout(n)
            payloads.append({p.name: np.zeros(p.elements, storage(p.dtype)) for p in layout})
            feedback_into(x, residual, 0.9, payloads[-1], context(n))
    assert same(*payloads)
    np.testing.assert_array_equal(*held)
    assert np.isfinite(held).all()


@pytest.mark.parametrize("block", [64, 256])
def test_it_is_the_hadamard_matrix_of_signed_values(block):
    n = 2 * block + 37  # a tail of 32, 4 and 1
    modifier, x = Hadamard(block), normal(0, n)
    signs = np.sign(modifier.restored_reference(np.ones(1, np.float32), context(1)))
    assert set(np.unique(signs)) <= {-1, 1}
    identity, columns = np.eye(n, dtype=np.float32), []
    for row in identity:
        columns.append(np.empty(n, np.float32))
        modifier._rotate(row, context(n), columns[-1])
    whole = np.array(columns).T.astype(np.float64)
    np.testing.assert_allclose(whole @ whole.T, np.eye(n), atol=1e-6)
    start = 0
    for size in (block, block, 32, 4, 1):
        part = whole[start : start + size, start : start + size]
        np.testing.assert_allclose(part, matrix(size) * np.sign(part[0]), atol=1e-7)
        start += size
    out = np.empty_like(x)
    modifier._rotate(x, context(n), out)
    np.testing.assert_allclose(out, whole @ x, atol=1e-5)


def test_signs_are_fair_shared_by_ranks_and_new_in_every_step():
    modifier, n = Hadamard(4096), 20_000
    signs = {
        (step, rank): modifier._signs(n, context(n, step=step, rank=rank))
        for step in range(2)
        for rank in range(2)
    }
    assert (signs[0, 0] == signs[0, 1]).all()
    for one, two in pairwise([signs[0, 0], signs[1, 0]]):
        assert abs((one * two).mean()) < 0.03
    assert abs(signs[0, 0].mean()) < 0.03
    assert abs((signs[0, 0][64:] * signs[0, 0][:-64]).mean()) < 0.03


@pytest.mark.parametrize("inner", ["int4(bucket=96)", "fp8", "bf16", "int8(stochastic=True)"])
@pytest.mark.parametrize("n", [0, 1, 500, 3000])
def test_rotated_pieces_are_pieces_of_the_whole(inner, n):
    compressor, x = parse(f"{inner} | hadamard(block=64)"), normal(n, n)
    granule = compressor.traits().granularity
    assert granule % 64 == 0
    assert granule % (parse(inner).traits().granularity or 1) == 0
    assert compressor.layout(n) == parse(inner).layout(n)
    whole = decode(compressor, encode(compressor, x, context(n)), context(n))
    for start in range(0, n, granule):
        piece = x[start : start + granule]
        ctx, out = context(n, offset=start), np.empty(piece.size, np.float32)
        compressor.decompress(encode(compressor, piece, ctx), out, ctx)
        np.testing.assert_array_equal(out, whole[start : start + granule])


def test_rotation_runs_in_ranges():
    modifier, x = Hadamard(), normal(0, 2 * MIN_ELEMENTS + 1500)
    out = np.empty_like(x)
    modifier._rotate(x, context(x.size), out)
    np.testing.assert_array_equal(out, modifier.rotated_reference(x, context(x.size, xp=plain)))


def test_rotation_helps_where_values_are_spiky():
    x = normal(0, 8192) * (np.random.default_rng(1).random(8192) < 0.02)
    error = {}
    for spec in ("minmax(bits=4)", "minmax(bits=4) | hadamard"):
        (out,) = simulate(parse(spec), [x.astype(np.float32)])
        error[spec] = np.square(out - x).sum()
    assert error["minmax(bits=4) | hadamard"] < 0.2 * error["minmax(bits=4)"]


# -- warm-up and sizes ------------------------------------------------------------------------


def test_ratios_ramp_as_in_deep_gradient_compression():
    compressor = parse("topk(ratio=0.001) | warmup(steps=400)")
    ratios = [compressor.at(step).ratio for step in range(0, 600, 100)]
    np.testing.assert_allclose(ratios, [0.25, 0.0629, 0.0158, 0.00398, 0.001, 0.001], rtol=1e-2)


@pytest.mark.parametrize(
    "spec",
    [
        "topk(ratio=0.01) | warmup(steps=30, dense=5) | ef",
        "topk(ratio=0.01) | ef | warmup(steps=30, dense=5)",
        "topk(ratio=0.01) | int8 | warmup(steps=30, dense=5) | min_size(7)",
        "powersgd(rank=2) | ef | warmup(steps=30, ramp='rank', start=32, dense=5)",
        "int4 | warmup(steps=30, ramp='bucket', start=64, stages=3)",
        "topk(ratio=0.01) | warmup(steps=30) | momentum_correction | warmup(dense=5)",
    ],
)
@given(step=st.integers(0, 100))
@settings(max_examples=30)
def test_a_schedule_is_a_pure_function_of_the_step(spec, step):
    compressor = parse(spec)
    assert parse(str(compressor)) == compressor
    now, again = compressor.at(step), parse(spec).at(step)
    assert now == again
    assert now.at(step) == now, "what is used at a step follows no further schedule"
    assert now.is_bound()
    assert parse(str(now)) == now
    assert compressor.at(35) == compressor.at(1000)


def test_dense_steps_and_stages():
    compressor = parse("powersgd(rank=2) | ef | warmup(steps=4, ramp='rank', start=32, dense=3)")
    assert all(compressor.at(step) == NoCompression() for step in range(3))
    specs = [str(compressor.at(step)) for step in range(3, 9)]
    ranks = ["(rank=32)", "(rank=16)", "(rank=8)", "", "(rank=2)", "(rank=2)"]  # 4 is the default
    assert specs == [f"powersgd{rank} | ef" for rank in ranks]
    inside = parse("int8 | warmup(dense=2) | ef")
    assert str(inside.at(1)) == "none | ef"
    assert str(inside.at(2)) == "int8 | ef"


def test_training_goes_through_a_warm_up():
    compressor, states = parse("topk(ratio=0.02) | warmup(steps=8, dense=3) | ef"), [{}, {}]
    given_, sent = np.zeros(400), np.zeros(400)
    for step in range(20):
        gradients = [normal(step, 400), normal(100 + step, 400)]
        outs = simulate(compressor, gradients, states, step)
        given_ += np.mean(gradients, axis=0)
        sent += outs[0]
        if step < 3:
            np.testing.assert_allclose(outs[0], np.mean(gradients, axis=0), atol=1e-6)
    held = np.mean([state["residual"] for state in states], axis=0)
    np.testing.assert_allclose(sent + held, given_, atol=1e-4)


def test_min_size_overrides_the_size_alone():
    traits, other = parse("int8 | min_size(77)").traits(), parse("int8").traits()
    assert traits.min_size == 77
    assert (traits.granularity, traits.delta) == (other.granularity, other.delta)
    x = normal(0, 2000)
    assert same(*(simulate(parse(spec), [x])[0] for spec in ("int8 | min_size(77)", "int8")))


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        ("powersgd | ef21", "rounds"),
        ("shared_int | ef21", "rounds"),
        ("bf16 | ef21", "rounded on the wire"),
        ("topk | ef | ef21", "takes its place"),
        ("powersgd | momentum_correction", "rounds"),
        ("topk | ef | momentum_correction", "takes its place"),
        ("topk | ef21 | momentum_correction", "takes its place"),
        ("int4 | ef | hadamard", "int4 | hadamard | ef"),
        ("powersgd | hadamard", "remembers"),
        ("int4 | hadamard(block=100)", "power of two"),
        ("int4 | warmup(steps=10)", "no option 'ratio'"),
        ("topk(ratio=0.1) | topk(ratio=0.2) | warmup(steps=10)", "several"),
        ("topk | warmup(steps=10, start=2.0)", "ratio"),
        ("topk | warmup(steps=10, ramp='format')", "no option"),
        ("fp8 | warmup(steps=10, ramp='format')", "no number"),
    ],
)
def test_nonsense_is_refused(spec, reason):
    with pytest.raises(CompressorError, match=reason):
        parse(spec)


@pytest.mark.parametrize("spec", ["topk | ef21 | int8", "topk | momentum_correction | int8"])
def test_what_remembers_comes_last(spec):
    with pytest.raises(
        CompressorError, match=r"remembers what its payloads decode to|nothing can be chained"
    ):
        parse(spec).compress(normal(0, 2000), context(2000))


@pytest.mark.parametrize("name", ["ef21", "momentum_correction", "hadamard", "warmup", "min_size"])
def test_modifiers_alone_wait_for_a_compressor(name):
    modifier = parse(name)
    assert not modifier.is_bound()
    assert isinstance(parse("int8") | modifier, Compressor)
    assert str(parse(f"int8 | {name}")) == f"int8 | {name}"
    with pytest.raises(OptionError):
        parse(f"{name}(nonsense=1)")


class Halved(Modifier):
    """Sends half of what there is: a plugin that overrides the least that it can."""

    def compress(self, x, ctx):
        return super().compress(x * np.float32(0.5), ctx)


class Doubled(Modifier):
    """Receives twice what was sent, again by the least that says so."""

    def decompress(self, payload, out, ctx):
        super().decompress(payload, out, ctx)
        out *= np.float32(2)


@pytest.mark.parametrize(
    "inner", ["none", "int8", "topk(ratio=0.5)", "int4 | hadamard", "qsgd | scaled"]
)
def test_what_a_modifier_overrides_is_not_passed_over(inner):
    x = normal(1, 200)
    inner = parse(inner)
    for modifier, factor in ((Halved(), 0.5), (Doubled(), 2.0)):
        modified = inner | modifier
        half = x * np.float32(factor) if factor < 1 else x
        payload, plain_payload = (
            encode(modified, x, context(200)),
            encode(inner, half, context(200)),
        )
        assert same(payload, plain_payload)
        once = decode(inner, plain_payload, context(200)) * np.float32(max(factor, 1))
        assert same(decode(modified, payload, context(200)), once)
        total, sums = once.copy(), np.empty_like(once)
        modified.accumulate(payload, total, context(200))
        modified.sum_into([payload, payload], sums, context(200))
        assert same(total, once + once)
        assert same(sums, once + once)


@pytest.mark.parametrize("modifier", [Halved(), Doubled()])
@pytest.mark.parametrize("inner", ["powersgd", "shared_int | ef"])
def test_a_modifier_of_payloads_is_refused_behind_rounds(inner, modifier):
    with pytest.raises(CompressorError, match=r"exchanges in rounds.*Define exchange"):
        parse(inner) | modifier


class Clipped(Modifier):
    """Clips at a running maximum: it remembers a number, and not what it did not send."""

    named: bool = option(True, doc="whether the number is declared in units of the gradient")

    def traits(self):
        units = ("most",) if self.named else ()
        return dataclasses.replace(
            self.wrapped_compressor.traits(), stateful=True, gradient_units=units, omega=None
        )

    def units_size(self, name, n):
        return 1

    def compress(self, x, ctx):
        most = max(0.9 * ctx.state.get("most", 0.0), float(np.abs(x).mean()))
        ctx.state["most"] = most
        return super().compress(np.clip(x, -np.float32(2 * most), np.float32(2 * most)), ctx)


@pytest.mark.parametrize("named", [True, False])
def test_feedback_takes_what_remembers_something_else_than_what_it_lost(named):
    compressor = parse("none") | Clipped(named=named) | parse("ef")
    state, sent, given = {}, 0.0, 0.0
    for step in range(30):
        x = normal(step, 200)
        given, sent = given + x, sent + simulate(compressor, [x], [state], step)[0]
    assert np.abs(state["residual"]).max() > 0.1  # something was clipped
    np.testing.assert_allclose(sent + state["residual"], given, atol=1e-4)


def test_feedback_refuses_a_memory_of_what_was_lost_and_names_it():
    with pytest.raises(CompressorError, match=r"in \['u', 'v'\]; leave '\| ef' away"):
        parse("topk | momentum_correction | ef")
    with pytest.raises(CompressorError, match=r"in \['residual'\]; leave '\| ef' away"):
        parse("powersgd | ef | ef")
    with pytest.raises(CompressorError, match=r"in \['residual'\].*write a modifier last"):
        parse("topk | ef | int8")


class Remembering(Clipped):
    """Keeps its number where error feedback keeps its residual."""

    def compress(self, x, ctx):
        ctx.state["residual"] = float(np.abs(x).max())
        return super().compress(x, ctx)


@pytest.mark.parametrize(
    ("compressor", "said"),
    [
        (parse("int8") | Clipped() | Clipped(named=False), "Clipped and Clipped both keep"),
        (parse("int8") | Remembering() | parse("ef"), r"Remembering and ef both keep .*'residual'"),
    ],
)
def test_parts_that_share_a_name_are_found(compressor, said):
    with pytest.raises(CheckFailed, match=said):
        check_compressor(compressor, [Named(check_parts_keep_apart)])


class Quarter(Compressor):
    """Every fourth element in a round, four times as large."""

    def traits(self):
        return Traits(combine="rounds", omega=3.0)


def test_an_unbiased_exchange_is_not_told_to_be_scaled():
    assert "leave '| ef' away" in Quarter().divergence()
    with pytest.raises(CompressorError, match="Quarter exchanges in rounds"):
        Quarter() | parse("scaled")
    with pytest.raises(CompressorError, match=r"omega is 3.*leave '\| ef' away"):
        Quarter() | parse("ef")


class Shrinking(TopK):
    """A share that shrinks."""

    def at(self, step):
        return self.replace(ratio=0.5 if step < 10 else 0.1)


class Standing(Modifier):
    """Returns itself, whatever it wraps."""

    def at(self, step):
        return self


def test_a_modifier_that_stops_a_schedule_is_found():
    with pytest.raises(CheckFailed, match=r"follows a schedule; return super\(\)\.at\(step\)"):
        check_compressor(Shrinking() | Standing(), [Named(check_schedule_goes_by_the_step)])
    check_compressor(Shrinking() | Remembering(), [Named(check_schedule_goes_by_the_step)])


class Warming(TopK):
    """A larger share at first, and in the end its own."""

    def at(self, step):
        return self.replace(ratio=0.5) if step < 10 else self


def test_a_modifier_that_stops_a_schedule_with_an_end_is_found():
    with pytest.raises(CheckFailed, match=r"follows a schedule; return super\(\)\.at\(step\)"):
        check_compressor(Warming() | Standing(), [Named(check_schedule_goes_by_the_step)])
    check_compressor(Warming() | Remembering(), [Named(check_schedule_goes_by_the_step)])


def test_parts_that_do_not_share_a_name_are_let_be():
    for spec in ("powersgd | ef", "topk | momentum_correction", "int8 | hadamard | ef21"):
        check_compressor(spec, [Named(check_parts_keep_apart)])


class Rescaled(TopK):
    """Changes the result of all ranks."""

    def finish(self, out, ctx):
        out *= np.float32(0.5)


@pytest.mark.parametrize("plugin", [Rescaled(), Rescaled() | parse("hadamard")])
def test_ef21_refuses_what_changes_the_result_behind_its_back(plugin):
    with pytest.raises(CompressorError, match=r"changes the result in finish\(\), of which ef21"):
        plugin | parse("ef21")
    assert (plugin | parse("ef")).is_bound()
