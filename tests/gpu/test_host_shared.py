"""Integers on a shared scale by CUDA kernels on the host: bit for bit those of the CPU."""

import numpy as np
import pytest

from ringlet.compressors import Context, parse
from ringlet.compressors.kernels.cuda.quantizers import shared_int

RNG = np.random.default_rng(4)
SPECS = ["shared_int", "shared_int(bits=16, bucket=100, stochastic=True)", "terngrad_shared"]


@pytest.fixture(scope="module", autouse=True)
def compiled(host):
    options = [parse(spec) for spec in SPECS]
    host.prepare([shared_int.program(c.bits, c.bucket, c.stochastic) for c in options])


def values(n):
    x = RNG.standard_normal(n).astype(np.float32)
    x[RNG.random(n) < 0.1] = 0
    if n > 3000:
        x[700], x[1400], x[2048:2560] = np.nan, np.inf, 1e-38
    return x


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("n", [1, 100, 513, 5000])
def test_rounds_are_those_of_the_cpu(spec, n, host):
    c, x = parse(spec), values(n)
    sent = []
    for where in {}, {"xp": host.module}:
        ctx = Context(name="w", numel=n, shape=(n,), seed=1, size=2, **where)
        out, local = np.zeros(n, np.float32), np.zeros(n, np.float32)
        rounds = c.exchange(x, out, ctx, local)
        extents = next(rounds).values.copy()
        codes = rounds.send(extents * np.float32(1.5)).values.copy()
        with pytest.raises(StopIteration):
            rounds.send(codes + codes)
        sent.append((extents, codes, out, local))
    for a, b in zip(*sent, strict=True):
        np.testing.assert_array_equal(a, b)
