"""Residuals, votes and entries by CUDA kernels on the host: bit for bit those of the CPU."""

import numpy as np
import pytest

from ringlet.compressors import Context, parse
from ringlet.compressors.base.feedback import keep_combined, keep_lost, target_into
from ringlet.compressors.kernels.cuda.common import elementwise

RNG = np.random.default_rng(2)


@pytest.fixture(scope="module", autouse=True)
def compiled(host):
    host.prepare([elementwise.PROGRAM])


def values(n):
    x = (RNG.standard_normal(n) * np.exp2(RNG.integers(-130, 100, n))).astype(np.float32)
    x[RNG.random(n) < 0.1] = 0
    x[RNG.random(n) < 0.05] = np.nan
    x[RNG.random(n) < 0.05] = -np.inf
    return x


def contexts(n, host):
    return [Context(numel=n, shape=(n,)), Context(numel=n, shape=(n,), xp=host.module)]


@pytest.mark.parametrize("n", [0, 1, 9, 5000])
def test_steps_of_feedback(n, host):
    x, y, z, r = (values(n) for _ in range(4))
    made = []
    for ctx in contexts(n, host):
        out, kept, combined = np.zeros(n, np.float32), r.copy(), r.copy()
        target_into(x, y, 0.7, out, ctx)
        keep_lost(x, y.copy(), kept, ctx)
        keep_combined(x, y, z, combined, ctx)
        made.append((out, kept, combined))
    for a, b in zip(*made, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("n", [1, 9, 5000])
def test_votes_and_entries(n, host):
    votes, x = values(n), values(n)
    results = []
    for ctx in contexts(n, host):
        voted, out = votes.copy(), np.ones(n, np.float32)
        parse("signsgd(scale=0.5)").finish(voted, ctx)
        c = parse("topk(ratio=0.3)")
        payload = c.compress(x, Context(numel=n, shape=(n,)))
        c.accumulate(payload, out, ctx)
        dense = np.ones(n, np.float32)
        c.decompress(payload, dense, ctx)
        results.append((voted, out, dense))
    for a, b in zip(*results, strict=True):
        np.testing.assert_array_equal(a, b)


def test_an_index_beyond_the_end_writes_nothing(host):
    ctx = Context(numel=4, shape=(4,), xp=host.module)
    memory = np.ones(8, np.float32)
    payload = {"indices": np.array([1, 6], np.uint32), "values": np.array([5, 9], np.float32)}
    parse("topk").decompress(payload, memory[:4], ctx)
    assert memory.tolist() == [0, 5, 0, 0, 1, 1, 1, 1]
