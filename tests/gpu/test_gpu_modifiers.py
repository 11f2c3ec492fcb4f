"""On a GPU: what modifiers and low-rank factors leave behind is what they leave on the CPU."""

import numpy as np
import pytest
from steps import MODIFIED, steps, to_host

from ringlet.compressors import Context, Workspace, parse
from ringlet.compressors.base.contract import empty_payload
from ringlet.compressors.base.precompile import rehearse

pytestmark = pytest.mark.gpu
RNG = np.random.default_rng(6)


def values(n, trouble=False):
    x = RNG.standard_normal(n).astype(np.float32)
    x[::7] *= np.float32(1e-41)
    if trouble:
        x[n // 2], x[n // 3] = np.nan, np.inf
    return x


@pytest.mark.parametrize("spec", MODIFIED)
@pytest.mark.parametrize("n", [1, 63, 100_003])
def test_steps_leave_what_they_leave_on_the_cpu(spec, n, cupy):
    xs = [values(n), values(n), values(n, trouble=True), values(n)]
    for a, b in zip(steps(spec, xs), steps(spec, xs, cupy), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("spec", [spec for spec in MODIFIED if parse(spec).traits().fixed_size])
def test_a_step_is_captured_so_that_nothing_waits_for_the_host(spec, cupy):
    c, n, workspace, state = parse(spec), 1 << 16, Workspace(cupy), {}
    x, out = cupy.asarray(values(n)), cupy.zeros(n, np.float32)
    ctx = Context(name="w", numel=n, shape=(n,), state=state, size=3, workspace=workspace, xp=cupy)
    payload = empty_payload(c, n, ctx)

    def step():
        c.encode_into(x, payload, ctx)
        c.decompress(payload, out, ctx)
        c.finish(out, ctx)

    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        step()  # compiles, and allocates scratch memory
        stream.synchronize()
        stream.begin_capture()
        step()
        graph = stream.end_capture()
        graph.launch(stream)
        stream.synchronize()
    assert np.isfinite(to_host(out)).all()


@pytest.mark.parametrize("spec", ["powersgd", "powersgd(warm_start=False)", "acpsgd(rank=2)"])
@pytest.mark.parametrize("shape", [(60, 35), (1000, 777)])
def test_low_rank_exchanges_give_nearly_what_they_give_on_the_cpu(spec, shape, cupy):
    c, n, made = parse(spec), shape[0] * shape[1], []
    gradients = [values(n) for _ in range(4)]
    for xp in np, cupy:
        ctx = Context(numel=n, shape=shape, xp=xp, workspace=Workspace(xp), seed=2)
        residual, out = xp.zeros(n, np.float32), xp.zeros(n, np.float32)
        for ctx.step, x in enumerate(gradients):
            rehearse(c.exchange_feedback(xp.asarray(x), out, residual, 0.9, ctx))
            made.append((to_host(out), to_host(residual)))
    for cpu, gpu in zip(made[:4], made[4:], strict=True):
        for a, b in zip(cpu, gpu, strict=True):  # cuBLAS adds in another order
            assert np.linalg.norm(a - b) <= 1e-4 * np.linalg.norm(a)
