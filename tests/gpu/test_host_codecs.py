"""CUDA kernels of bucketed codecs, compiled for the host, against the CPU kernels: bit for bit."""

import numpy as np
import pytest

from ringlet.compressors import Context, parse
from ringlet.compressors.base.contract import empty_payload
from ringlet.compressors.testing.tools.built_in import bucketed_specs

SPECS = bucketed_specs([
    "fp16", "bf16", "int8", "int8(stochastic=True)", "int8(bucket=40)", "int4",
    "int4(bucket=2048, stochastic=True)", "maxnorm(bits=3, bucket=32, stochastic=True)",
    "minmax", "minmax(bits=1, bucket=32)", "minmax(bits=6, bucket=64, stochastic=True)", "qsgd",
    "qsgd(bits=4, bucket=40)", "onebit", "onebit(bucket=72)", "onebit(bucket=4096)",
    "signsgd(scale=0.25)", "natural", "natural(bucket=1024)", "terngrad",
    "terngrad(clip=1.5, bucket=48)", "fp8", "fp8(format='e5m2', block=8)", "fp8(block=72)",
    "mxfp8", "mxfp8(format='e5m2', stochastic=True)", "mxfp6", "mxfp6(format='e3m2')", "mxfp4",
    "mxfp4(stochastic=True)", "nvfp4", "nvfp4(stochastic=True)",
    "block_topk", "block_topk(ratio=0.25, block=64, bits=2)", "block_topk(block=1000, bits=8)",
    "block_topk(ratio=0.3, block=100, bits=16)", "block_topk(block=9000, ratio=0.02, bits=8)",
    "block_topk(ratio=0.25, block=64, dct=True)", "block_topk(ratio=0.1, bits=2)",
    "block_topk(ratio=1.0, block=32, bits=8, dct=True)", "block_topk(ratio=0.5, block=4096)",
])  # fmt: skip
RNG = np.random.default_rng(7)


@pytest.fixture(scope="module", autouse=True)
def compiled(host):
    codecs = [parse(spec).cuda() for spec in SPECS]
    switches = [
        ("encode", {}),
        ("encode", {"FEEDBACK": 1}),
        ("decode", {}),
        ("decode", {"ADDING": 1}),
    ]
    host.prepare([codec.program(kernel, **on) for codec in codecs for kernel, on in switches])


def awkward(n):
    """Return values of all sizes with ties, zeros, subnormals and whole buckets of trouble."""
    x = RNG.standard_normal(n).astype(np.float32)
    x *= np.exp2(RNG.integers(-20, 20, n)).astype(np.float32)
    x[RNG.random(n) < 0.1] = 0
    x[RNG.random(n) < 0.05] = 0.5
    for at, value in (400, 1e-42), (600, np.nan), (1400, -np.inf), (2500, 3.3e38), (2600, -3e38):
        x[at : at + 2] = value
    x[3000:3200] = 0
    x[4100:4800] = 1e-38
    x[5000:5600] = -2.5
    return x


def context(x, device=None, **kw):
    return Context(
        name="w", numel=x.size, shape=x.shape, seed=3, **({"xp": device} if device else {}), **kw
    )


def same(a, b):
    if a.dtype.kind == "f":  # any NaN is as good as another
        return np.array_equal(a, b, equal_nan=True) and np.array_equal(
            np.signbit(a[~np.isnan(a)]), np.signbit(b[~np.isnan(b)])
        )
    return a.tobytes() == b.tobytes()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("n", [0, 1, 7, 100, 6001])
def test_payloads_residuals_and_sums_are_those_of_the_cpu(spec, n, host):
    c, xp = parse(spec), host.module
    x = awkward(6001)[:n]
    residuals = [RNG.standard_normal(n).astype(np.float32)] * 2
    residuals = [r.copy() for r in residuals]
    cpu, gpu = (empty_payload(c, n, context(x)) for _ in range(2))
    outs = [np.full(n, 3, np.float32) for _ in range(2)]
    sides = list(zip((cpu, gpu), (None, xp), residuals, outs, strict=True))
    for payload, device, _, out in sides:
        ctx = context(x, device)
        c.encode_into(x, payload, ctx)
        c.accumulate(payload, out, ctx)
    for name in cpu:
        assert same(cpu[name], gpu[name]), name
    assert same(*outs)
    for payload, device, residual, out in sides:
        ctx = context(x, device, step=1)
        for _ in range(2):
            c.feedback_into(x, residual, 0.9, payload, ctx)
        c.decompress(payload, out, ctx)
    for name in cpu:
        assert same(cpu[name], gpu[name]), name
    assert same(*residuals)
    assert same(*outs)
    for payload, device, _, out in sides:
        c.sum_into([payload, payload, payload], out, context(x, device))
    assert same(*outs)
