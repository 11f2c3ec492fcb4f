"""Selection by a threshold, by CUDA kernels on the host: entry for entry that of the CPU."""

import numpy as np
import pytest

from ringlet.compressors import Context, Workspace, parse
from ringlet.compressors.kernels.cuda.sparsifiers import threshold, topk
from ringlet.compressors.kernels.cuda.sparsifiers.threshold import (
    Fit,
    Given,
    Sample,
    Sought,
    reaching,
)

SPECS = [
    "threshold(value=1.5)", "threshold(value=0.5, cap=0.02)", "threshold(value=1e30)",
    "topk_sampled(ratio=0.03)", "topk_sampled(ratio=0.5)", "sidco(ratio=0.01)",
    "sidco(ratio=0.3, stages=1)", "sidco(ratio=0.001, stages=5)",
]  # fmt: skip
RNG = np.random.default_rng(17)


@pytest.fixture(scope="module", autouse=True)
def compiled(host):
    programs = [m.program(0, feedback) for m in (threshold, topk) for feedback in (0, 1)]
    host.prepare([*programs, threshold.program(1, 0), threshold.program(2, 0)])


def normal(n):
    return RNG.standard_normal(n).astype(np.float32)


def kinds(n):
    """Yield vectors that estimates are right about, too high, too low, or at a loss."""
    yield "normal", normal(n)
    yield "constant", np.full(n, -1, np.float32)
    yield "zeros", np.zeros(n, np.float32)
    yield "tiny", normal(n) * np.float32(1e-42)
    steep = normal(n)  # a tail that no exponential fits: lower floors are tried, in vain
    steep[: n // 300] = 1e6
    yield "steep", steep
    yield "heavy", np.exp(3 * normal(n))  # the same, and one of them will do
    yield "two", RNG.choice(np.float32([0.5, 1]), n, p=[0.996, 0.004])
    for bad in np.nan, np.inf:
        broken = normal(n)
        broken[[0, n // 2, n - 1]] = bad
        yield f"{bad}", broken
    lost = normal(n)
    lost[::3] = np.nan
    yield "lost", lost


def context(n, xp=None, **kw):
    return Context(name="w", numel=n, shape=(n,), seed=2, **({"xp": xp} if xp else {}), **kw)


def assert_same(a, b, why):
    assert np.array_equal(a["indices"], b["indices"]), why
    assert np.array_equal(a["values"], b["values"], equal_nan=True), why
    assert a["indices"].dtype == b["indices"].dtype, why


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("n", [0, 1, 100, 6000])
def test_the_same_entries_travel(spec, n, host):
    c = parse(spec)
    for kind, x in kinds(n) if n else [("nothing", normal(0))]:
        before = host.reads
        found = c.compress(x, context(n, host.module))
        assert host.reads <= before + 1, "the host waits once"
        assert_same(c.compress(x, context(n)), found, kind)


@pytest.mark.parametrize("spec", [*SPECS[:2], "topk_sampled(ratio=0.1)", *SPECS[5:7]])
def test_the_same_residuals_stay(spec, host):
    c, n = parse(spec), 4500
    for kind, x in kinds(n):
        residual = normal(n)
        mine = residual.copy()
        made = c.compress_feedback(x, residual, 0.5, context(n))
        found = c.compress_feedback(x, mine, 0.5, context(n, host.module))
        assert_same(made, found, kind)
        assert residual.tobytes() == mine.tobytes(), kind


def test_sums_of_many_chunks_are_added_in_order(host):
    n = 2 * threshold.CHUNK + 5
    x, c = normal(n) * np.exp2(RNG.integers(-9, 9, n)).astype(np.float32), parse("sidco")
    assert_same(c.compress(x, context(n)), c.compress(x, context(n, host.module)), "chunks")


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("spec", ["threshold(value=0.9)", "topk_sampled(ratio=0.9)", "sidco"])
def test_many_tensors_share_the_launches_and_one_wait(spec, feedback, host):
    c, scratch = parse(spec), Workspace().array
    tensors, expected = [], []
    for i, n in enumerate([2000, 20000] + [90] * 31):
        x, residual = normal(n), normal(n)
        ctx, mine = context(n, step=i), None
        halves = x * np.float32(0.5)
        if feedback:
            mine = residual.copy()
            expected.append((c.compress_feedback(halves, residual, 0.25, ctx), residual, mine))
        else:
            expected.append((c.compress(halves, ctx), None, None))
        k = n if "value" in spec else c.count(n)
        aim = Given(float(np.float32(0.9))) if "value" in spec else c.aim(n, k, ctx)
        tensors.append(Sought(x, k, aim, mine))
    flag, before = np.zeros(1, np.int32), host.reads
    found = reaching(host, tensors, scratch, np.empty, 0.25, 0.5, flag)
    assert host.reads == before + 2
    for (made, residual, mine), (indices, values) in zip(expected, found, strict=True):
        assert_same(made, {"indices": indices, "values": values}, spec)
        assert not feedback or residual.tobytes() == mine.tobytes()
    assert flag[0] == 0


@pytest.mark.parametrize("aim", [Given(1.0), Sample(9, 500, 10), Fit((1.0,))])
@pytest.mark.parametrize("kind", ["float16", "uint16"])
def test_half_precision_is_read_as_it_is(kind, aim, host):
    half = normal(5000).astype(np.float16)
    wide = half.astype(np.float32)
    if kind == "uint16":
        half = (normal(5000).view(np.uint32) >> 16).astype(np.uint16)
        wide = (half.astype(np.uint32) << 16).view(np.float32)
    scratch = Workspace().array
    made = reaching(host, [Sought(wide, 100, aim)], scratch, np.empty)
    found = reaching(host, [Sought(half, 100, aim)], scratch, np.empty)
    for a, b in zip(made[0], found[0], strict=True):
        assert a.tobytes() == b.tobytes()


def test_the_flag_tells_what_is_not_finite(host):
    x, flag = normal(5000), np.zeros(1, np.int32)
    x[4000] = np.inf
    reaching(host, [Sought(x, 50, Given(2.0))], Workspace().array, np.empty, flag=flag)
    assert flag[0] == 1
