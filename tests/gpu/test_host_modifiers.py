"""Rotation and random-k by CUDA kernels on the host: bit for bit those of the CPU."""

import numpy as np
import pytest

from ringlet.compressors import Context, Workspace, parse
from ringlet.compressors.base.contract import empty_payload
from ringlet.compressors.kernels.cuda.common import elementwise
from ringlet.compressors.kernels.cuda.modifiers import hadamard
from ringlet.compressors.kernels.cuda.sparsifiers import randomk

RNG = np.random.default_rng(8)
SPECS = [
    "int8 | hadamard", "int4(bucket=64) | hadamard(block=64)", "onebit | hadamard(block=4096)",
    "randomk(ratio=0.1)", "randomk(ratio=0.3, unbiased=False)",
]  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def compiled(host):
    blocks = [hadamard.program(block) for block in (64, 1024, 4096)]
    codecs = [parse(spec).cuda() for spec in ("int8", "int4(bucket=64)", "onebit")]
    kernels = [codec.program(kernel) for codec in codecs for kernel in ("encode", "decode")]
    host.prepare([elementwise.PROGRAM, randomk.PROGRAM, *blocks, *kernels])


def side(spec, x, steps, **where):
    """Return everything that some steps leave behind."""
    c, n, seen = parse(spec), x.size, []
    residual, out = np.zeros(n, np.float32), np.zeros(n, np.float32)
    workspace = Workspace()
    for step in range(steps):
        ctx = Context(name="w", numel=n, shape=(n,), step=step, workspace=workspace, **where)
        payload = empty_payload(c, n, ctx)
        c.encode_into(x, payload, ctx)
        seen += [array.copy() for array in payload.values()]
        c.feedback_into(x, residual, 0.8, payload, ctx)
        c.accumulate(payload, out, ctx)
        seen += [*payload.values(), residual.copy(), out.copy()]
        c.decompress(payload, out, ctx)
        c.sum_into([payload, payload], out, ctx)
        seen.append(out.copy())
    return seen


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("trouble", [False, True])
@pytest.mark.parametrize("n", [1, 63, 1000, 9001])
def test_payloads_residuals_and_sums_are_those_of_the_cpu(spec, n, trouble, host):
    x = RNG.standard_normal(n).astype(np.float32)
    if trouble:
        x[n // 2], x[n // 3] = np.nan, np.inf
    expected, found = side(spec, x, 2), side(spec, x, 2, xp=host.module)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
    "spec",
    [
        "none", "threshold", "lossless", "shared_int", "powersgd", "topk | ef", "topk | int8 | ef",
        "int4 | hadamard(block=64) | ef", "qsgd | scaled | ef", "topk | momentum_correction",
        "powersgd | shared_int | ef",
    ],
)  # fmt: skip
def test_whatever_is_wrapped_runs_with_kernels_or_array_code(spec, host):
    parse(spec).warm_up(Context(numel=64, shape=(64,), xp=host.module))


def test_a_piece_is_rotated_as_its_place_asks(host):
    c, x = parse("int8 | hadamard(block=64)"), RNG.standard_normal(640).astype(np.float32)
    whole, out = np.empty(640, np.float32), np.empty(256, np.float32)
    c._rotate(x, Context(numel=640, shape=(640,)), whole)
    c._rotate(x[128:384], Context(numel=640, shape=(640,), offset=128, xp=host.module), out)
    np.testing.assert_array_equal(out, whole[128:384])
