"""Top-k of whole tensors, by the CUDA kernels on the host: entry for entry that of the CPU."""

import numpy as np
import pytest

from ringlet.compressors import Context, Workspace, parse
from ringlet.compressors.base.contract import empty_payload
from ringlet.compressors.kernels.cuda.sparsifiers import topk
from ringlet.compressors.kernels.cuda.sparsifiers.topk import Selected, largest

RNG = np.random.default_rng(5)
SAMPLE = 4096  # entries that the kernel looks at first


@pytest.fixture(scope="module", autouse=True)
def compiled(host):
    host.prepare([topk.program(0, 0), topk.program(0, 1)])


def normal(n):
    return RNG.standard_normal(n).astype(np.float32)


def kinds(n):
    """Yield vectors that make selection hard."""
    yield "normal", normal(n)
    yield "ties", RNG.integers(-3, 4, n).astype(np.float32)
    yield "constant", np.full(n, -1, np.float32)
    sparse = np.zeros(n, np.float32)
    sparse[n // 3 : n // 3 + 5] = 1
    yield "sparse", sparse
    # Every entry that the sample sees is large: it overestimates the threshold.
    fooled = normal(n) * np.float32(1e-3)
    fooled[:: max(1, n // SAMPLE)] = 100
    yield "fooled", fooled
    broken = normal(n)
    broken[[0, n // 2, n - 1]] = np.nan, np.inf, -np.inf
    yield "broken", broken


def context(n, xp=None, **kw):
    where = {"xp": xp} if xp else {}
    return Context(name="w", numel=n, shape=(n,), **where, **kw)


@pytest.mark.parametrize("ratio", [1e-5, 0.01, 0.3, 1.0])
@pytest.mark.parametrize("n", [1, 100, 17000])
def test_the_same_entries_travel(n, ratio, host):
    c = parse(f"topk(ratio={ratio})")
    for kind, x in kinds(n):
        made, found = (empty_payload(c, n, context(n)) for _ in range(2))
        c.encode_into(x, made, context(n))
        c.encode_into(x, found, context(n, host.module))
        for name in made:
            assert made[name].tobytes() == found[name].tobytes(), (kind, name)


@pytest.mark.parametrize("ratio", [0.01, 0.3])
@pytest.mark.parametrize("n", [1, 4097, 17000])
def test_the_same_residuals_stay(n, ratio, host):
    c = parse(f"topk(ratio={ratio})")
    for kind, x in kinds(n):
        residual = normal(n)
        mine = residual.copy()
        made, found = (empty_payload(c, n, context(n)) for _ in range(2))
        for _ in range(2):
            c.feedback_into(x, residual, 0.5, made, context(n))
            c.feedback_into(x, mine, 0.5, found, context(n, host.module))
            assert np.array_equal(made["indices"], found["indices"]), kind
            assert np.array_equal(made["values"], found["values"], equal_nan=True), kind
            assert residual.tobytes() == mine.tobytes(), kind


@pytest.mark.parametrize("feedback", [False, True])
def test_many_tensors_share_the_launches(feedback, host):
    c, scratch, flag = parse("topk(ratio=0.02)"), Workspace().array, np.zeros(1, np.int32)
    tensors, expected = [], []
    for n in [1, 5000, 0, 33, 20000, 280000] + [7] * 30:
        x, residual = normal(n), normal(n)
        made, found = (empty_payload(c, n, context(n)) for _ in range(2))
        mine = residual.copy()
        if feedback:
            c.feedback_into(x * np.float32(0.5), residual, 0.25, made, context(n))
        elif n:
            c.encode_into(x * np.float32(0.5), made, context(n))
        tensors.append(Selected(x, found["indices"], found["values"], mine if feedback else None))
        expected.append((made, found, residual, mine))
    before = host.launches
    largest(host, tensors, scratch, 0.25, 0.5, flag)
    assert host.launches == before + 2 * 12
    for made, found, residual, mine in expected:
        assert all(made[name].tobytes() == found[name].tobytes() for name in made)
        assert not feedback or residual.tobytes() == mine.tobytes()
    assert flag[0] == 0
