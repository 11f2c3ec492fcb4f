"""What modifiers remember, by CUDA kernels on the host: bit for bit what the CPU remembers."""

import dataclasses

import numpy as np
import pytest
from steps import MODIFIED, steps

from ringlet.compressors import Context, Workspace, parse
from ringlet.compressors.base.contract import encoded
from ringlet.compressors.base.norms import clip, shrinking
from ringlet.compressors.kernels.cuda.common import elementwise, norms
from ringlet.compressors.kernels.cuda.common.norms import bounds
from ringlet.compressors.kernels.cuda.common.operands import Operands
from ringlet.compressors.kernels.cuda.modifiers import state_updates
from ringlet.compressors.kernels.cuda.modifiers.state_updates import run
from ringlet.compressors.kernels.cuda.sparsifiers import (
    randomk,
    threshold,
    topk,
)

RNG = np.random.default_rng(31)


@pytest.fixture(scope="module", autouse=True)
def compiled(host):
    programs = [of.program(kind) for kind in (0, 1, 2) for of in (state_updates, norms)]
    programs += [m.program(0, feedback) for m in (threshold, topk) for feedback in (0, 1)]
    for spec in "int8", "qsgd(bits=4)":
        codec = parse(spec).cuda()
        programs += [codec.program("encode", FEEDBACK=on) for on in (0, 1)]
        programs += [codec.program("decode", ADDING=on) for on in (0, 1)]
    host.prepare([elementwise.PROGRAM, randomk.PROGRAM, *programs])


def values(n, trouble=False):
    x = (RNG.standard_normal(n) * np.exp2(RNG.integers(-3, 3, n))).astype(np.float32)
    x[RNG.random(n) < 0.1] = 0
    x[RNG.random(n) < 0.1] *= np.float32(1e-41)
    if trouble:
        x[n // 2], x[n // 3], x[0] = np.nan, np.inf, 3e38
    return x


@pytest.mark.parametrize("spec", MODIFIED)
@pytest.mark.parametrize("n", [1, 63, 4001])
def test_steps_leave_what_they_leave_on_the_cpu(spec, n, host):
    xs = [values(n), values(n), values(n, trouble=True), values(n)]
    expected, found = steps(spec, xs), steps(spec, xs, host.module)
    assert len(expected) == len(found)
    for a, b in zip(expected, found, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("stage", [1, 2])
def test_both_stages_of_a_reduction_remember(stage, host):
    made = []
    for where in {}, {"xp": host.module}:
        c, whole = parse("int8 | ef21"), {}
        state = whole if stage == 1 else whole.setdefault("stage2.0", {})
        for step in range(2):
            x = np.linspace(-1, step + 1, 700, dtype=np.float32)
            ctx = Context(name="w", numel=700, shape=(700,), state=whole, step=step, **where)
            payload = encoded(c, x, dataclasses.replace(ctx, state=state, stage=stage))
            c.finish(x, ctx)
        assert all(array.any() for array in state.values())
        made.append([*payload.values(), *(a for a in state.values() if isinstance(a, np.ndarray))])
    for a, b in zip(*made, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("scale", [1e-30, 1e-3, 1.0, 1e30, np.inf])
@pytest.mark.parametrize("n", [1, 1000, 2 * norms.CHUNK + 77])
def test_norms_and_what_they_clip(n, scale, host):
    x = values(n)
    x[0] = 1
    with np.errstate(over="ignore", invalid="ignore"):
        x *= np.float32(scale)
    made = []
    for where in {}, {"xp": host.module}:
        ctx, out = Context(numel=n, shape=(n,), **where), np.zeros(n, np.float32)
        clip(x, 1.5, out, ctx)
        made.append((np.float32(shrinking(x, 0.3, ctx)).reshape(()), out))
    for a, b in zip(*made, strict=True):
        np.testing.assert_array_equal(a, b)


def test_many_tensors_share_the_launches(host):
    lengths = [5, 1000, 0, 300] * 17 + [3]
    tensors, expected = [], []
    for n in lengths:
        x, u, out = values(n), values(n), np.empty(n, np.float32)
        tensors.append(Operands(x, kept=u, out=out))
        expected.append(np.float32(0.9) * u + x)
    before = host.launches
    run(host, "advance", tensors, momentum=0.9)
    assert host.launches == before + 2
    for tensor, want in zip(tensors, expected, strict=True):
        np.testing.assert_array_equal(tensor.out, want)
    some = [Operands(t.x, bound=np.empty(1, np.float32)) for t in tensors if t.x.size]
    bounds(host, "shrink", some, 1e-3, Workspace().array)
    assert host.launches == before + 2 + 2
    for tensor in some:
        ctx = Context(numel=tensor.x.size, shape=(tensor.x.size,))
        assert tensor.bound[0] == shrinking(tensor.x, 1e-3, ctx)


@pytest.mark.parametrize("kind", ["float16", "uint16"])
def test_gradients_of_half_precision_are_read_as_they_are(kind, host):
    half = values(999).astype(np.float16)
    wide = half.astype(np.float32)
    if kind == "uint16":
        half = (values(999).view(np.uint32) >> 16).astype(np.uint16)
        wide = (half.astype(np.uint32) << 16).view(np.float32)
    kept, known, made = values(999), values(999), []
    for x in half, wide:
        ahead, apart, bound = (np.zeros(k, np.float32) for k in (999, 999, 1))
        bounds(host, "limit", [Operands(x, bound=bound)], 1.0, Workspace().array)
        run(host, "advance", [Operands(x, kept=kept, out=ahead, bound=bound)], momentum=0.5)
        run(host, "differ", [Operands(x, kept=kept, other=known, out=apart)])
        made.append((ahead, apart, bound))
    for a, b in zip(*made, strict=True):
        assert a.tobytes() == b.tobytes()
