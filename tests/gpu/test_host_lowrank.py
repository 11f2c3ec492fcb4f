"""Low-rank factors by CUDA kernels on the host; large products are NumPy's there."""

import numpy as np
import pytest

from ringlet.compressors import Context, parse
from ringlet.compressors.base.precompile import rehearse
from ringlet.compressors.kernels.cuda.common import elementwise
from ringlet.compressors.kernels.cuda.lowrank import factors, products
from ringlet.compressors.kernels.cuda.lowrank.factors import Rows
from ringlet.compressors.lowrank.factors import keep, orthonormal, poison_of
from ringlet.compressors.lowrank.products import product, product_and_lost

# Sums of float32 in another order: the result differs by so much of its length.
TOLERANCE = 1e-5
RNG = np.random.default_rng(23)


@pytest.fixture(scope="module", autouse=True)
def compiled(host):
    host.prepare([elementwise.PROGRAM, factors.ORTHONORMAL, products.PRODUCT])


def normal(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def contexts(host, shape=(1,), **kw):
    return [Context(name="w", numel=int(np.prod(shape)), shape=shape, seed=1, xp=xp, **kw)
            for xp in (np, host.module)]  # fmt: skip


def hard_rows(r, n):
    """Yield rows that a basis is easy, hard or impossible to make of."""
    yield normal(r, n)
    yield np.zeros((r, n), np.float32)
    yield np.outer(normal(r), normal(n))  # all but the first depend on it
    yield normal(r, n) * np.float32(1e-38)
    broken = normal(r, n)
    broken[r // 2, n // 2], broken[-1, -1] = np.nan, np.inf
    yield broken


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 5), (4, 1001), (8, 8), (5, 64)])
def test_bases_are_those_of_the_cpu(shape, host):
    for rows in hard_rows(*shape):
        made = []
        for ctx in contexts(host):
            out = np.zeros(shape, np.float32)
            orthonormal(rows, out, ctx)
            made.append(out)
        np.testing.assert_array_equal(*made)
        np.testing.assert_allclose(made[0] @ made[0].T, np.eye(shape[0]), atol=1e-5)


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (4, 1001)])
def test_what_the_next_step_begins_with_is_that_of_the_cpu(shape, host):
    old = normal(*shape)
    for rows in hard_rows(*shape):
        for bad in False, True:
            made = []
            for ctx in contexts(host):
                kept, other = old.copy(), rows.copy()
                poison = poison_of(np.full((1, 9), np.nan if bad else 1, np.float32), ctx)
                keep(other, poison, kept, ctx)
                alone = old.copy()
                keep(other, None, alone, ctx)
                made.append((kept, alone, np.float32(poison).reshape(())))
            for a, b in zip(*made, strict=True):
                np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("r", [1, 4, 6])
@pytest.mark.parametrize("shape", [(1, 1), (5, 24), (9, 101), (64, 40)])
@pytest.mark.parametrize("bad", [False, True])
def test_products_are_those_of_the_cpu(r, shape, bad, host):
    n, m = shape
    both, own = (normal(r, n), normal(r, m)), (normal(r, n), normal(r, m))
    target, old = normal(n, m), normal(n, m)
    if bad:
        both[0][0, 0], target[-1, -1] = np.inf, np.nan
    for poisoned in False, True:
        made = []
        for ctx in contexts(host):
            out, lone, residual = (
                np.zeros(shape, np.float32),
                np.zeros(shape, np.float32),
                old.copy(),
            )
            poison = poison_of(np.full((1, 3), np.inf if poisoned else 0, np.float32), ctx)
            product(both, poison, lone, ctx)
            product_and_lost(both, own, poison, target, out, residual, ctx)
            made.append((lone, out, residual))
        for a, b in zip(*made, strict=True):
            np.testing.assert_array_equal(a, b)


def test_many_matrices_share_a_launch(host):
    lengths = [5, 64, 300] * 22
    given = [normal(3, n) for n in lengths]
    made = [Rows(rows, np.zeros_like(rows), np.zeros(1, np.float32)) for rows in given]
    before, scratch = host.launches, lambda name, n, dtype: np.empty(n, dtype)
    factors.orthonormal(host, made, 1e-9, scratch)
    factors.inspect(host, made)
    factors.keep(host, [Rows(m.out, m.rows, m.poison) for m in made])
    assert host.launches == before + 3 * 2
    for rows, (kept, out, poison, _) in zip(given, made, strict=True):
        assert poison[0] == 0
        assert np.abs(kept).max() == 1
        np.testing.assert_allclose(out @ out.T, np.eye(3), atol=1e-6)
        assert rows is kept


@pytest.mark.parametrize("spec", ["powersgd", "powersgd(warm_start=False)", "acpsgd(rank=2)"])
@pytest.mark.parametrize("feedback", [False, True])
def test_exchanges_give_nearly_what_they_give_on_the_cpu(spec, feedback, host):
    c, n, made = parse(spec), 60 * 35, []
    gradients = [normal(n) for _ in range(4)]
    for ctx in contexts(host, (60, 35)):
        residual, seen = np.zeros(n, np.float32), []
        for ctx.step, x in enumerate(gradients):
            out, local = np.zeros(n, np.float32), np.zeros(n, np.float32)
            if feedback:
                rehearse(c.exchange_feedback(x, out, residual, 0.9, ctx))
            else:
                rehearse(c.exchange(x, out, ctx, local))
                assert out.tobytes() == local.tobytes(), "one rank alone is the mean"
            seen += [out, residual.copy()]
        made.append(seen)
    for a, b in zip(*made, strict=True):
        assert np.linalg.norm(a - b) <= TOLERANCE * max(np.linalg.norm(a), 1)


@pytest.mark.parametrize("spec", ["powersgd", "acpsgd"])
def test_what_is_not_finite_shows_and_is_not_remembered(spec, host):
    c, n = parse(spec), 60 * 35
    ctx = contexts(host, (60, 35))[1]
    residual, out = normal(n), np.zeros(n, np.float32)
    rehearse(c.exchange_feedback(normal(n), out, residual, 1.0, ctx))
    kept = {name: a.copy() for name, a in ctx.state.items()}, residual.copy()
    x = normal(n)
    x[17] = np.inf
    ctx.step = 2
    rehearse(c.exchange_feedback(x, out, residual, 1.0, ctx))
    assert np.isnan(out).all()
    assert residual.tobytes() == kept[1].tobytes()
    for name, before in kept[0].items():
        assert ctx.state[name].tobytes() == before.tobytes(), name
