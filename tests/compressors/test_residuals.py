"""Residuals in less memory than float32, and residuals that begin anew."""

import copy
import pickle
import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ringlet.compressors import CompressorError, Context, Workspace, parse
from ringlet.compressors.base.contract import empty_payload
from ringlet.compressors.modifiers.residuals import STORES, energy, wide
from ringlet.compressors.states import carry_over, fit, merged, rescale
from ringlet.compressors.testing.tools.simulate import simulate

plain = types.ModuleType("plain")  # takes the path of array code, as CuPy does
plain.__dict__.update(np.__dict__)

N = 2000
DTYPES = ["bf16", "int8"]
KEYS = {"bf16": {"residual_bf16"}, "int8": {"residual_int8", "residual_scales"}}
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
INNER = ["int4(bucket=32)", "topk(ratio=0.05)", "powersgd(rank=2)", "fp16", "mxfp4", "lossless"]


def normal(seed, n=N):
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32)


def context(n, state, **fields):
    return Context(shape=(n,), numel=n, state=state, **fields)


def stored(dtype, x, xp=np, **fields):
    """Return what ``x`` is kept as, decoded."""
    store, ctx = STORES[dtype], context(x.size, {}, xp=xp, **fields)
    payload, out = empty_payload(store, x.size, ctx), np.empty_like(x)
    store.encode_into(x, payload, ctx)
    store.decompress(payload, out, ctx)
    return payload, out


@pytest.mark.parametrize("dtype", DTYPES)
@given(x=hnp.arrays(np.float32, st.integers(0, 300), elements=finite | st.floats(-9, 9, width=32)))
@settings(max_examples=100)
def test_what_is_kept_is_beside_it_and_always_finite(dtype, x):
    payload, out = stored(dtype, x)
    same, again = stored(dtype, x, plain)
    assert all(payload[name].tobytes() == same[name].tobytes() for name in payload)
    np.testing.assert_array_equal(out, again)
    assert np.isfinite(out).all()
    exact, largest = x.astype(np.float64), np.finfo(np.float32).max
    if dtype == "bf16":
        bound = np.maximum(np.abs(exact) * 2.0**-7, 2.0**-133)
        assert (np.abs(out - exact) < bound).all()
        same = (x.view(np.uint32) & 0xFFFF) == 0
        assert out[same].tobytes() == x[same].tobytes()
        return
    for start in range(0, x.size, 128):
        block = exact[start : start + 128]
        top = np.abs(block).max()
        unit = top / 127 * (1 + 2.0**-7)  # the scale is rounded up to bfloat16
        bound = top if top < 1.5e-36 else unit * (1 + 1e-6)
        slack = unit if top > 0.99 * largest else 0
        assert (np.abs(out[start : start + 128] - block) <= bound + slack).all()


@pytest.mark.parametrize("dtype", DTYPES)
@given(x=st.floats(-2, 2, width=32).filter(lambda x: abs(x) > 2.0**-100), seed=st.integers(0, 99))
@settings(max_examples=30)
def test_what_is_kept_is_right_on_average(dtype, x, seed):
    n = 1 << 15
    block = np.full(128, x, np.float32)
    block[0] = 2  # which decides the scale of an int8
    exact = np.tile(block, n // 128)
    out = stored(dtype, exact, seed=seed)[1].astype(np.float64)
    spread = {"bf16": abs(x) * 2.0**-7, "int8": 2 / 127 * (1 + 2.0**-7)}[dtype]
    # Six standard deviations of the mean, and what 16 bits of a draw are short of.
    bound = spread * (3 / np.sqrt(n * 127 / 128) + 2.0**-16)
    assert abs(np.delete(out - exact, np.s_[::128]).mean()) <= bound


@pytest.mark.parametrize("dtype", DTYPES)
def test_small_steady_gradients_are_sent_in_time(dtype):
    """To the nearest, their residuals would stop to grow below what topk selects."""
    c, states, total = parse(f"topk(ratio=0.01) | ef(dtype={dtype!r})"), [{}], np.zeros(N)
    steady = np.random.default_rng(0).uniform(0.001, 0.01, N).astype(np.float32)
    steady[::100] = 1
    for step in range(3000):
        total += simulate(c, [steady], states, step)[0]
    assert (total > 0).mean() > 0.98


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_drawn_is_not_what_the_compressor_draws(dtype):
    """By one number for both, what a code rounds up would be rounded up once more."""
    n = 1 << 16
    drawn = STORES[dtype].drawn(n, ctx := context(n, {})) / 2.0**16
    assert abs(np.corrcoef(drawn, ctx.uniform(n))[0, 1]) < 6 / np.sqrt(n)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("inner", INNER)
def test_a_step_is_that_of_float32_from_the_residual_that_was_kept(dtype, inner):
    shape = (40, 50)
    narrow, exact = parse(f"{inner} | ef(dtype={dtype!r})"), parse(f"{inner} | ef")
    states = [{}, {}]
    for step in range(4):
        gradients = [normal(2 * step + rank) for rank in range(2)]
        before = [copy.deepcopy(state) for state in states]
        for state in before:  # what float32 would go on with
            kept = wide(state)
            for key in KEYS[dtype]:
                state.pop(key, None)
            if kept is not None:
                state["residual"] = kept
        outs = simulate(narrow, gradients, states, step, shape=shape)
        expected = simulate(exact, gradients, before, step, shape=shape)
        np.testing.assert_array_equal(outs[0], expected[0])
        for rank, (state, other) in enumerate(zip(states, before, strict=True)):
            assert KEYS[dtype] <= state.keys()
            assert "residual" not in state
            kept = stored(dtype, other["residual"], step=step, rank=rank)[1]
            np.testing.assert_array_equal(wide(state), kept)


@pytest.mark.parametrize(("dtype", "most"), [("bf16", 2.0), ("int8", 1.02)])
def test_residuals_take_the_memory_that_is_told(dtype, most):
    states = [{}]
    simulate(parse(f"int4 | ef(dtype={dtype!r})"), [normal(0, 12800)], states)
    held = sum(a.nbytes for key, a in states[0].items() if key in KEYS[dtype])
    assert held <= most * 12800


@pytest.mark.parametrize("dtype", ["fp32", *DTYPES])
def test_residuals_begin_anew_every_so_many_steps(dtype):
    resetting = parse(f"topk(ratio=0.05) | ef(dtype={dtype!r}, reset=3)")
    keeping = parse(f"topk(ratio=0.05) | ef(dtype={dtype!r})")
    assert str(parse("int8 | ef(reset=1024)")) == "int8 | ef(reset=1024)"
    states, others = [{}], [{}]
    for step in range(8):
        if step in (3, 6):
            others = [{}]
        x = [normal(step)]
        a, b = simulate(resetting, x, states, step), simulate(keeping, x, others, step)
        np.testing.assert_array_equal(a[0], b[0])
        np.testing.assert_array_equal(wide(states[0]), wide(others[0]))


@pytest.mark.parametrize("dtype", DTYPES)
def test_pieces_give_what_the_whole_tensor_gives(dtype):
    c = parse(f"fp8(block=32) | ef(dtype={dtype!r}, reset=2)")
    granule = c.traits().granularity
    assert granule == (128 if dtype == "int8" else 32)
    whole, cut = {}, {}
    for step in range(4):
        x = normal(step, 1000)
        payload = empty_payload(c, 1000, context(1000, {}))
        c.encode_into(x, payload, context(1000, whole, step=step))
        for start, stop in ((512, 1000), (0, 128), (128, 512)):
            piece = empty_payload(c, stop - start, context(1000, {}))
            ctx = context(1000, cut, step=step, offset=start)
            c.encode_into(x[start:stop], piece, ctx)
            np.testing.assert_array_equal(piece["codes"], payload["codes"][start:stop])
    np.testing.assert_array_equal(wide(cut), wide(whole))
    if dtype == "int8":
        with pytest.raises(CompressorError, match="cannot be cut at 64"):
            c.encode_into(x[64:], empty_payload(c, 936, ctx), context(1000, cut, offset=64))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_value_that_overflows_leaves_what_was_kept(dtype):
    c, state = parse(f"int8(bucket=32) | ef(dtype={dtype!r})"), {}
    x = normal(1)
    c.encode_into(x, empty_payload(c, N, context(N, {})), context(N, state))
    before = wide(state).copy()
    bad = np.full(N, np.inf, np.float32)
    c.encode_into(bad, empty_payload(c, N, context(N, {})), context(N, state, step=1))
    after = wide(state)
    assert np.isfinite(after).all()
    np.testing.assert_allclose(after, before, atol=np.abs(before).max() / 120)
    huge = np.full(N, np.finfo(np.float32).max)
    narrow = parse(f"topk(ratio=0.01) | ef(dtype={dtype!r})")
    narrow.compress(huge, context(N, other := {}))
    assert np.isfinite(wide(other)).all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_loss_scale_multiplies_them(dtype):
    compressor, states = parse(f"topk(ratio=0.1) | ef(dtype={dtype!r})"), [{}]
    simulate(compressor, [normal(0)], states)
    before = wide(states[0]).copy()
    for factor in (64.0, 2.0**-20, 1 / 3):
        state = {**copy.deepcopy(states[0]), "step": 1}
        state["stage2.0"] = copy.deepcopy(states[0])
        rescale(state, compressor, factor)
        for held in (state, state["stage2.0"]):
            exact = factor in (64.0, 2.0**-20)
            np.testing.assert_allclose(wide(held), before * factor, rtol=0 if exact else 2.0**-7)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", ["fp32", *DTYPES])
def test_a_checkpoint_of_another_dtype_is_converted(dtype, other):
    specs = [f"int4 | ef(dtype={kind!r})" for kind in (dtype, other)]
    before, after = map(parse, specs)
    states = [{}]
    simulate(before, [normal(0)], states)
    kept = wide(states[0]).copy()
    found = pickle.loads(pickle.dumps(states[0])) | {"step": 1}
    assert fit(found, str(before), after, N, 2) == []
    out = simulate(after, [normal(1)], [found], 1)[0]
    assert found.keys() - {"step"} == KEYS.get(other, {"residual"})
    state = {"residual": kept if other in ("fp32", dtype) else stored(other, kept, step=1)[1]}
    expected = simulate(parse("int4 | ef"), [normal(1)], [state], 1)[0]
    np.testing.assert_array_equal(out, expected)
    # The same where nobody tells of which spec the state is.
    unknown = copy.deepcopy(states[0])
    assert fit(unknown, None, after, N, 2) == []
    np.testing.assert_array_equal(simulate(after, [normal(1)], [unknown], 1)[0], expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_another_spec_and_other_ranks_go_on_with_them(dtype):
    before, after = parse(f"int4 | ef(dtype={dtype!r})"), parse("topk | ef(dtype='bf16')")
    states = [{} for _ in range(3)]
    simulate(before, [normal(rank) for rank in range(3)], states)
    kept = [wide(state).copy() for state in states]
    state = copy.deepcopy(states[0])
    assert carry_over(state, before, after, 3, True) == []
    np.testing.assert_array_equal(wide(state), kept[0])
    found, told = merged(states, str(before), before, 2)
    assert told == []
    np.testing.assert_allclose(found["residual"], np.mean(kept, axis=0), atol=1e-7)
    simulate(before, [normal(5)], [found], 1)
    assert found.keys() == KEYS[dtype]
    gone = copy.deepcopy(states[0])
    assert carry_over(gone, before, parse("int8"), 3, True) == ["residual"]
    assert wide(gone) is None


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_does_not_fit_is_told_or_refused(dtype):
    compressor, states = parse(f"int4 | ef(dtype={dtype!r})"), [{}]
    simulate(compressor, [normal(0)], states)
    grown = copy.deepcopy(states[0])
    (told,) = fit(grown, str(compressor), compressor, 2 * N, 2)
    assert "has 4000 elements" in told
    assert grown == {}
    key = min(KEYS[dtype])
    ctx = context(64, copy.deepcopy(states[0]))
    with pytest.raises(CompressorError, match=f"remembered as '{key}' of 'tensor' is int"):
        compressor.compress(normal(0, 64), ctx)
    for wrong in (np.zeros(N), np.zeros((2, N), np.int16), 3.0):
        state = {**copy.deepcopy(states[0]), key: wrong}
        (told,) = fit(state, str(compressor), compressor, N, 2)
        assert "its residual is forgotten" in told
        assert state == {}
        state = {**copy.deepcopy(states[0]), key: wrong}
        _, told = merged([state, states[0]], str(compressor), compressor, 3)
        assert "its residual is forgotten" in told[0]


def test_an_int8_residual_without_scales_is_told():
    compressor, state = parse("int4 | ef(dtype='int8')"), {}
    simulate(compressor, [normal(0)], [state])
    del state["residual_scales"]
    with pytest.raises(CompressorError, match="'residual_int8' alone"):
        wide(state)
    (told,) = fit(state, None, compressor, N, 2)
    assert "'residual_int8' alone" in told


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_see_them(dtype):
    state = {}
    simulate(parse(f"topk | ef(dtype={dtype!r})"), [normal(0)], [state])
    exact = np.square(wide(state), dtype=np.float64).sum()
    assert energy({"step": 3, **state, "stage2.1": dict(state)}) == pytest.approx(2 * exact)


def test_norms_see_what_momentum_correction_has_not_sent():
    for spec, of_momentum in (("topk | momentum_correction", True), ("topk | ef21", False)):
        state = {}
        simulate(parse(spec), [normal(0)], [state])
        exact = float(np.square(state.get("v", ()), dtype=np.float64).sum())
        assert (exact > 0) == of_momentum
        of_sum = {"v": state["v"]} if of_momentum else {"sum": state["worker"]}
        assert energy({**state, "stage2.1": of_sum}) == pytest.approx(2 * exact)
    factors = {"u": np.ones((4, 4), np.float32), "v": np.ones((4, 4), np.float32)}  # a plugin's
    assert energy(factors) == 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_is_allocated_after_the_first_step(dtype):
    c, state, workspace = parse(f"int8 | ef(dtype={dtype!r})"), {}, Workspace()
    held = []
    for step in range(3):
        ctx = context(N, state, step=step, workspace=workspace)
        c.encode_into(normal(step), empty_payload(c, N, ctx), ctx)
        held.append([id(array) for _, array in sorted(state.items())])
    assert held[1] == held[0] == held[2]


@pytest.mark.parametrize("found", [None, 3, "x", {}, np.float32(1), np.zeros(3, np.int16)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_no_residual_is_told(dtype, found):
    spec, (key, *_) = f"topk | ef(dtype='{dtype}')", sorted(KEYS[dtype])
    compressor, state = parse(spec), {}
    compressor.compress(normal(1), context(N, state))
    state[key] = found
    with pytest.raises(CompressorError, match=f"what is remembered as '{key}' of"):
        compressor.compress(normal(2), context(N, state))
    (told,) = fit(state, spec, compressor, N, 2)
    assert told.endswith("is forgotten")
    compressor.compress(normal(2), context(N, state))
