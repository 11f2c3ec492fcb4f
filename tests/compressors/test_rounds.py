"""Compressors that exchange in rounds: shared-scale integers and low-rank factors."""

import types

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ringlet.compressors import (
    CompressorError,
    Context,
    PowerSGD,
    Round,
    SharedInt,
    Workspace,
    parse,
)
from ringlet.compressors.core.threads import limited
from ringlet.compressors.lowrank.factors import orthonormal, orthonormal_reference
from ringlet.compressors.quantizers.shared_int import TernGradShared

plain = types.ModuleType("plain")
plain.__dict__.update(np.__dict__)

seeds = st.integers(0, 2**32 - 1)
finite = st.floats(-(2.0**60), 2.0**60, width=32)


def exchange(compressor, gradients, states=None, step=0, xp=np, seed=0):
    """Step one generator per rank together; return every rank's result and the rounds' values."""
    size, rounds = len(gradients), []
    held = [{} for _ in gradients] if states is None else states
    outs = [np.full(x.size, np.nan, np.float32) for x in gradients]
    generators = [
        compressor.exchange(
            x.reshape(-1),
            outs[rank],
            Context(
                shape=x.shape, numel=x.size, state=held[rank], step=step, rank=rank, size=size,
                seed=seed, xp=xp,
            ),
        )
        for rank, x in enumerate(gradients)
    ]  # fmt: skip
    received = [None] * size
    while True:
        asked = []
        for generator, values in zip(generators, received, strict=True):
            try:
                asked.append(generator.send(values))
            except StopIteration:
                asked.append(None)
        if all(a is None for a in asked):
            return [out.reshape(gradients[0].shape) for out in outs], rounds
        assert len({(a.op, a.values.dtype, a.values.shape) for a in asked}) == 1
        op, values = asked[0].op, np.stack([a.values for a in asked])
        rounds.append((op, values))
        if op == "max":
            combined = values.max(axis=0)
        else:
            wide = values.astype(np.float64 if values.dtype.kind == "f" else np.int64).sum(axis=0)
            combined = (wide / size if op == "mean" else wide).astype(values.dtype)
            assert op == "mean" or (combined == wide).all(), "a sum overflows"
        received = [combined.copy() for _ in generators]


def alike(outs):
    assert len({out.tobytes() for out in outs}) == 1, "ranks have different results"
    return outs[0]


def normal(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_a_round_is_checked_where_it_is_made():
    values = np.ones(3, np.float32)
    assert Round(values) == (values, "mean")
    combined, op = Round(values, op="max")
    assert (combined is values, op) == (True, "max")
    for dtype in (np.int8, np.int32, np.uint8, bool):
        with pytest.raises(CompressorError, match=r"the mean of .* yield Round\(values, 'sum'\)"):
            Round(values.astype(dtype))
        Round(values.astype(dtype), "sum")
    with pytest.raises(CompressorError, match="op must be 'mean', 'sum' or 'max', not 'min'"):
        Round(values, "min")


@pytest.mark.parametrize(
    "spec",
    [
        "powersgd(rank=2)",
        "powersgd(rank=2) | ef",
        "acpsgd(rank=2) | ef",
        "shared_int | ef",
        "shared_int | hadamard | ef",
        "terngrad_shared | ef",
    ],
)
def test_tensors_of_one_bucket_do_not_disturb_each_other(spec):
    """Rounds of several tensors run side by side, with one workspace."""
    compressor, size, shape = parse(spec), 2, (24, 20)
    gradients = [[normal(10 * t + r, *shape) for r in range(size)] for t in range(3)]
    alone: list = [[{} for _ in range(size)] for _ in range(3)]
    beside: list = [[{} for _ in range(size)] for _ in range(3)]
    workspace = Workspace()
    for step in range(3):
        expected = [
            exchange(compressor, gradients[t], alone[t], step)[0][0].tobytes() for t in range(3)
        ]
        running, outs = [], []
        for t in range(3):
            for r in range(size):
                x = gradients[t][r].reshape(-1)
                ctx = Context(
                    shape=shape, numel=x.size, state=beside[t][r], step=step, rank=r, size=size,
                    workspace=workspace,
                )  # fmt: skip
                outs.append(np.empty(x.size, np.float32))
                running.append(compressor.exchange(x, outs[-1], ctx))
        received = [None] * len(running)
        while True:
            asked = []
            for generator, values in zip(running, received, strict=True):
                try:
                    asked.append(generator.send(values))
                except StopIteration:
                    asked.append(None)
            if asked[0] is None:
                break
            for t in range(3):  # after everybody has yielded
                mine = asked[size * t : size * t + size]
                values = np.stack([a.values for a in mine])
                if mine[0].op == "max":
                    total = values.max(axis=0)
                else:
                    wide = values.astype(np.float64 if values.dtype.kind == "f" else np.int64)
                    total = wide.sum(axis=0) / (size if mine[0].op == "mean" else 1)
                for r in range(size):
                    received[size * t + r] = total.astype(values.dtype)
        assert [outs[size * t].tobytes() for t in range(3)] == expected


# -- integers on a shared scale ---------------------------------------------------------------


@pytest.mark.parametrize("bits", [8, 16, 32])
@pytest.mark.parametrize("stochastic", [False, True])
@given(
    size=st.integers(1, 6),
    x=hnp.arrays(np.float32, st.integers(0, 300), elements=finite),
    seed=seeds,
)
@settings(max_examples=25)
def test_the_sum_of_codes_is_the_code_of_the_sum(bits, stochastic, size, x, seed):
    compressor = SharedInt(bits, 32, stochastic)
    rng = np.random.default_rng(seed)
    gradients = [(x * rng.uniform(-1, 1)).astype(np.float32) for _ in range(size)]
    outs, rounds = exchange(compressor, gradients)
    again, _ = exchange(compressor, gradients, xp=plain)
    out = alike([*outs, *again])
    (first, extents), (second, codes) = rounds
    assert (first, second, codes.dtype.itemsize) == ("max", "sum", bits // 8)
    levels = compressor.steps(size)
    assert np.abs(codes.astype(np.int64)).max(initial=0) <= levels
    unit = (extents.max(axis=0).astype(np.float64) / levels).repeat(32)[: x.size]
    mean = np.mean(np.asarray(gradients, np.float64), axis=0)
    np.testing.assert_allclose(out, codes.sum(axis=0) * unit / size, rtol=1e-6, atol=1e-36)
    # float32 rounds too, and a bucket whose levels would be tinier than 1.2e-38 is zeros.
    slack = 1e-6 * np.abs(np.asarray(gradients)).max(axis=0, initial=0) + levels * 1.3e-38
    assert (np.abs(out - mean) <= unit * (1.0001 if stochastic else 0.5001) + slack).all()


@given(seed=seeds)
@settings(max_examples=10)
def test_the_order_of_ranks_does_not_matter(seed):
    gradients = [normal(seed + i, 700) for i in range(5)]
    forward, _ = exchange(SharedInt(), gradients)
    backward, _ = exchange(SharedInt(), gradients[::-1])
    alike([*forward, *backward])


@pytest.mark.parametrize("spec", ["shared_int", "shared_int(bits=16)", "terngrad_shared(clip=0)"])
def test_sums_cannot_overflow(spec):
    outs, _ = exchange(parse(spec), [np.full(40, 3, np.float32)] * 127)
    np.testing.assert_allclose(alike(outs), 3, rtol=1e-6)


def test_too_many_ranks_for_the_bits_are_an_error():
    with pytest.raises(CompressorError, match="use bits=16"):
        SharedInt().steps(128)
    with pytest.raises(CompressorError, match="use bits=16"):
        SharedInt(levels=32).steps(4)
    assert SharedInt(levels=31).steps(4) == 31
    assert SharedInt(bits=32).steps(8) == 1 << 22


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("xp", [np, plain])
def test_overflow_on_one_rank_shows_on_all(bad, xp):
    gradients = [normal(i, 2000) for i in range(3)]
    gradients[1][700] = bad
    outs, _ = exchange(SharedInt(), gradients, xp=xp)
    assert np.isnan(outs[0][512:1024]).all()
    assert np.isfinite(np.delete(outs[0], range(512, 1024))).all()
    alike(outs)


def test_shared_integers_are_unbiased_when_stochastic():
    gradients = [normal(i, 500) for i in range(4)]
    mean = np.mean(gradients, axis=0)
    draws = [exchange(SharedInt(stochastic=True), gradients, step=s)[0][0] for s in range(300)]
    spread = np.std(draws, axis=0) / np.sqrt(len(draws))
    assert (np.abs(np.mean(draws, axis=0) - mean) <= 5 * spread + 1e-6).all()


def test_shared_ternary_gradients():
    gradients = [normal(i, 500) for i in range(3)]
    draws = []
    for step in range(400):
        outs, rounds = exchange(TernGradShared(), gradients, step=step)
        draws.append(alike(outs))
        assert set(np.unique(rounds[1][1])) <= {-1, 0, 1}
    bounds = [2.5 * np.sqrt(np.square(x, dtype=np.float64).mean()) for x in gradients]
    clipped = [np.clip(x, -b, b) for x, b in zip(gradients, bounds, strict=True)]
    constant = np.full(300, 0.25, np.float32)
    assert (alike(exchange(TernGradShared(), [constant] * 2)[0]) == 0.25).all()
    spread = np.std(draws, axis=0) / np.sqrt(len(draws))
    assert (np.abs(np.mean(draws, axis=0) - np.mean(clipped, axis=0)) <= 5 * spread + 1e-6).all()


def test_rotation_tames_an_outlier():
    gradients = [normal(i, 4096) for i in range(4)]
    for x in gradients:
        x[5] = 1000
    mean = np.mean(gradients, axis=0)
    error = {
        spec: np.square(alike(exchange(parse(spec), gradients)[0]) - mean)[6:512].sum()
        for spec in ("shared_int", "shared_int | hadamard")
    }
    assert error["shared_int | hadamard"] < 0.3 * error["shared_int"]


# -- low-rank factors -------------------------------------------------------------------------

shapes = st.tuples(st.integers(12, 40), st.integers(12, 40))


@given(r=st.integers(1, 6), n=st.integers(6, 70), seed=seeds, kind=st.integers(0, 4))
@settings(max_examples=60)
def test_the_basis_is_orthonormal_and_spans_the_rows(r, n, seed, kind):
    rows = normal(seed, r, n)
    if kind == 1:
        rows[-1] = 3 * rows[0]
    elif kind == 2:
        rows[:] = 0
    elif kind == 3:
        rows *= np.float32(1e-36)
    elif kind == 4:
        rows[0] *= 1e18
    basis = np.empty_like(rows)
    orthonormal(rows, basis, Context())
    assert basis.tobytes() == orthonormal_reference(plain, rows).tobytes()
    wide = basis.astype(np.float64)
    np.testing.assert_allclose(wide @ wide.T, np.eye(r), atol=1e-6)
    left = rows - (rows @ wide.T) @ wide
    assert (np.abs(left) <= 1e-5 * np.abs(rows).max(axis=1, keepdims=True) + 1e-42).all()


@pytest.mark.parametrize("spec", ["powersgd(rank=3)", "acpsgd(rank=3)"])
@given(shape=shapes, size=st.integers(1, 4), seed=seeds)
@settings(max_examples=20)
def test_low_rank_results(spec, shape, size, seed):
    """Of rank r, the same on all ranks, close in any array code, and linear in the gradients."""
    compressor = parse(spec)
    gradients = [normal(seed + i, *shape) for i in range(size)]
    mean = np.mean(np.asarray(gradients, np.float64), axis=0)
    states, one, other = [{} for _ in gradients], [{}], [{} for _ in gradients]
    for step in range(4):
        outs, _ = exchange(compressor, gradients, states, step)
        alone, _ = exchange(compressor, [mean.astype(np.float32)], one, step)
        again, _ = exchange(compressor, gradients, other, step, xp=plain)
        alike(outs)
        np.testing.assert_allclose(alike(again), outs[0], atol=2e-3 * np.abs(mean).max())
        assert np.linalg.matrix_rank(outs[0].astype(np.float64), tol=1e-4) <= 3
        np.testing.assert_allclose(outs[0], alone[0], atol=2e-3 * np.abs(mean).max())
        lost = np.linalg.norm(mean - outs[0]) / np.linalg.norm(mean)
        assert lost <= 1 + 1e-6, "a projection is never longer than what it projects"
    assert len({tuple(state["right"].tobytes() for state in states)}) == 1


@pytest.mark.parametrize("spec", ["powersgd(rank=4)", "acpsgd(rank=4)"])
@given(shape=shapes, seed=seeds)
@settings(max_examples=20)
def test_a_matrix_of_that_rank_is_exact_after_a_warm_start(spec, shape, seed):
    matrix = normal(seed, shape[0], 3) @ normal(seed + 1, 3, shape[1])
    states = [{}, {}]
    for step in range(3):
        outs, _ = exchange(parse(spec), [matrix * 0.5, matrix * 1.5], states, step)
    np.testing.assert_allclose(outs[0], matrix, atol=1e-4 * np.abs(matrix).max())


@pytest.mark.parametrize("spec", ["powersgd(rank=2)", "acpsgd(rank=2)"])
@given(shape=shapes, seed=seeds)
@settings(max_examples=15)
def test_the_error_of_a_fixed_matrix_falls_to_the_best(spec, shape, seed):
    matrix = normal(seed, *shape) * np.linspace(3, 0, shape[1], dtype=np.float32) ** 2
    states, errors = [{}], []
    for step in range(40):
        (out,), _ = exchange(parse(spec), [matrix], states, step)
        errors.append(np.linalg.norm(matrix - out))
    best = np.sqrt((np.linalg.svd(matrix, compute_uv=False)[2:] ** 2).sum())
    assert (np.diff(errors) <= 1e-5 * errors[0]).all()
    assert best * (1 - 1e-5) <= errors[-1] <= best * 1.1


@pytest.mark.parametrize("spec", ["powersgd", "acpsgd"])
def test_threads_change_nothing(spec):
    results = []
    for threads in (1, 3):
        states = [{}]
        with limited(threads):
            for step in range(2):
                outs, _ = exchange(parse(spec), [normal(step, 301, 3001)], states, step)
        results += outs
    alike(results)


@pytest.mark.parametrize("spec", [
    "powersgd(rank=2) | ef", "powersgd | ef", "acpsgd(rank=2) | ef",
    "powersgd(rank=2) | shared_int(bits=32) | ef",
])  # fmt: skip
@pytest.mark.parametrize("late", [1, 40])
def test_a_block_that_was_zeros_before_is_seen(spec, late):
    """Its columns of the factor that is kept are zeros, and would be for ever."""
    compressor, states, owed = parse(spec), [{}, {}], np.zeros((16, 64))
    for step in range(200):
        given = [np.zeros((16, 64), np.float32) for _ in states]
        if step < 120:
            for rank, x in enumerate(given):
                x[:8, :32] = normal(2 * step + rank, 8, 32)
                if step >= late:
                    x[8:, 32:] = normal(999, 8, 32) + 0.1 * normal(5000 + 2 * step + rank, 8, 32)
        outs, _ = exchange(compressor, given, states, step)
        owed += np.mean(given, axis=0, dtype=np.float64) - alike(outs)
    assert np.abs(owed).max() < 1e-2


def test_without_a_warm_start_nothing_is_remembered():
    states = [{}]
    first, _ = exchange(PowerSGD(2, warm_start=False), [normal(0, 30, 20)], states, step=0)
    second, _ = exchange(PowerSGD(2, warm_start=False), [normal(0, 30, 20)], states, step=1)
    assert not states[0]
    assert (first[0] != second[0]).any()
    assert not PowerSGD(warm_start=False).traits().stateful


@pytest.mark.parametrize("shape", [(50,), (5, 5), (1, 100), (0, 3), (2, 3, 4), ()])
def test_vectors_and_small_matrices_travel_uncompressed(shape):
    gradients = [normal(i, *shape) for i in range(3)]
    outs, rounds = exchange(parse("powersgd"), gradients)
    assert len(rounds) == 1
    np.testing.assert_allclose(alike(outs), np.mean(gradients, axis=0), atol=1e-6)


def test_tensors_are_matrices_of_their_first_dimension():
    outs, rounds = exchange(parse("powersgd(rank=2)"), [normal(0, 16, 4, 3, 3)])
    assert [values.shape for _, values in rounds] == [(1, 2 * 16), (1, 2 * 36)]
    assert outs[0].shape == (16, 4, 3, 3)


@pytest.mark.parametrize("spec", ["powersgd(rank=2) | ef", "acpsgd(rank=2) | ef"])
@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_one_overflow_shows_and_does_not_poison(spec, bad):
    compressor, states = parse(spec), [{}, {}]
    for step in range(8):
        gradients = [normal(10 * step + i, 30, 20) for i in range(2)]
        if step in (2, 5):
            gradients[1][3, 4] = bad
        with np.errstate(all="ignore"):
            outs, _ = exchange(compressor, gradients, states, step)
        alike(outs)
        if np.isfinite(bad):
            continue  # merely large
        assert np.isfinite(outs[0]).all() == (step not in (2, 5))
        for state in states:
            assert all(np.isfinite(array).all() for array in state.values())


@pytest.mark.parametrize("spec", ["powersgd(rank=2)", "acpsgd(rank=2)"])
def test_a_step_of_zeros_is_survived(spec):
    states, matrix = [{}], normal(0, 30, 2) @ normal(1, 2, 20)
    for step in range(10):
        (out,), _ = exchange(parse(spec), [matrix * (step not in (4, 5))], states, step)
        if step in (4, 5):
            assert not out.any()
    np.testing.assert_allclose(out, matrix, atol=1e-4 * np.abs(matrix).max())


@pytest.mark.parametrize("spec", ["powersgd(rank=2) | ef", "acpsgd(rank=2) | ef"])
def test_feedback_telescopes_over_the_mean(spec):
    compressor, states = parse(spec), [{} for _ in range(3)]
    given_, sent = np.zeros((30, 20)), np.zeros((30, 20))
    for step in range(20):
        gradients = [normal(7 * step + i, 30, 20) for i in range(3)]
        outs, _ = exchange(compressor, gradients, states, step)
        given_ += np.mean(gradients, axis=0)
        sent += outs[0]
    held = np.mean([state["residual"].reshape(30, 20) for state in states], axis=0)
    np.testing.assert_allclose(sent + held, given_, atol=1e-4)
