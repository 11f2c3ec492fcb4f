"""Nothing waits for a device where a payload's size is known before: with kernels, or without."""

import numpy as np
import pytest
from remote import Remote, Waits, module

from ringlet.compressors import Context, Workspace, parse
from ringlet.compressors.base.contract import encoded
from ringlet.compressors.base.precompile import precompile_many, rehearse
from ringlet.compressors.kernels.cuda.runtime import device as devices
from ringlet.compressors.specs import registry

SPECS = [
    "none", "fp16", "bf16", "fp8", "mxfp8", "mxfp6", "mxfp4", "nvfp4", "int8",
    "int4(stochastic=True)", "maxnorm", "minmax", "qsgd",
    "natural", "terngrad", "onebit", "signsgd", "topk", "block_topk", "randomk", "topk | int8",
    "block_topk(ratio=0.25, block=64, dct=True)",
    "shared_int", "terngrad_shared", "powersgd", "powersgd(warm_start=False)", "acpsgd",
    "int8 | ef", "topk | ef", "topk | int8 | ef", "powersgd | ef", "acpsgd | ef",
    "shared_int | ef", "block_topk | server_ef", "int8 | ef21", "topk | ef21",
    "topk | momentum_correction", "int8 | momentum_correction(clip=1.0)", "qsgd | scaled | ef",
    "int4 | hadamard | ef", "int8 | min_size(10)", "topk | warmup(dense=1)",
    "int8 | ef(dtype='int8', reset=1)", "topk | ef(dtype='bf16')", "powersgd | ef(dtype='int8')",
]  # fmt: skip
VARIABLE = ["threshold", "topk_sampled(ratio=0.3)", "sidco", "lossless", "topk | lossless"]
N = 2400


class Idle:
    """A device whose kernels do nothing; ``reads`` counts what the host waits for."""

    def __init__(self):
        self.launches = self.reads = 0

    def address(self, array):
        assert isinstance(array, Remote)
        return array.ctypes.data

    def constant(self, name, array):
        return Remote(array)

    def launch(self, program, kernel, blocks, table):
        self.launches += 1

    def read(self, array):
        self.reads += 1
        return np.zeros(array.size, array.dtype)


@pytest.fixture(scope="module")
def kernels():
    """A device, with the array module whose arrays it works on."""
    device, xp = Idle(), module("idle_cuda")
    devices._MAKERS[xp.__name__] = lambda _: device
    yield device, xp
    del devices._MAKERS[xp.__name__]


def use(spec, xp, steps=2):
    """Call everything that a training step calls, as the fusion engine does."""
    c, workspace, state = parse(spec), Workspace(xp), {}
    x, residual, out, local = (xp.ones(N, "float32") for _ in range(4))
    for step in range(steps):
        now = c.at(step)
        ctx = Context(
            name="w", numel=N, shape=(60, N // 60), step=step, size=2, state=state, xp=xp,
            workspace=workspace,
        )  # fmt: skip
        traits = now.traits()
        if traits.combine == "rounds":
            rehearse(now.exchange(x, out, ctx, local))
            if not traits.stateful or traits.in_place:
                rehearse(now.exchange_feedback(x, out, residual, 0.9, ctx))
            continue
        payload = encoded(now, x, ctx)
        now.decompress(payload, out, ctx)
        now.accumulate(payload, out, ctx)
        now.sum_into([payload, payload], out, ctx)
        now.finish(out, ctx)
        if traits.fixed_size:
            precompile_many(now, encoded(now, x[:64], ctx), ctx)
        if traits.stateful:
            continue
        if traits.fixed_size:
            now.feedback_into(x, residual, 0.9, payload, ctx)
        else:
            now.compress_feedback(x, residual, 0.9, ctx)


def waits(spec, xp):
    try:
        use(spec, xp)
    except Waits:
        return True
    return False


@pytest.mark.parametrize("spec", SPECS)
def test_kernels_and_what_is_around_them_wait_for_nothing(spec, kernels):
    device, xp = kernels
    reads, launches = device.reads, device.launches
    use(spec, xp)
    assert device.reads == reads
    assert device.launches > launches, "it has kernels"


@pytest.mark.parametrize("spec", VARIABLE)
def test_a_size_that_varies_is_waited_for_once(spec, kernels):
    device, xp = kernels
    reads = device.reads
    use(spec, xp, steps=3)  # each encodes twice
    assert device.reads == reads + 3 * 2


def test_all_that_is_registered_is_looked_at_here():
    looked_at = {
        part.split("(")[0].strip() for spec in SPECS + VARIABLE for part in spec.split("|")
    }
    builtin = {
        name for name in registry.names() if registry.lookup(name).__module__.startswith("ringlet.")
    }
    assert builtin <= looked_at


# Without kernels, on other GPUs than NVIDIA's: draws until enough places lie inside, and looks at
# what is left of a row.
WAIT_IN_ARRAY_CODE = {"randomk", "powersgd", "acpsgd"}


@pytest.mark.parametrize("spec", SPECS + VARIABLE)
def test_array_code_waits_only_where_it_must(spec):
    c = parse(spec)
    varies = c.traits().combine != "rounds" and not c.traits().fixed_size
    waits_for = varies or spec.split("(")[0].split(" ")[0] in WAIT_IN_ARRAY_CODE
    assert waits(spec, module("plain_remote")) == waits_for


def test_what_waits_is_noticed():
    xp = module("plain_remote")
    x = xp.asarray(np.arange(4, dtype=np.float32))
    for wait in (
        lambda: float(x[0]), lambda: bool(x.any()), lambda: x[x > 1], lambda: x.sum().item(),
        lambda: np.asarray(x), lambda: xp.flatnonzero(x), lambda: [0][x[0].astype("int64")],
        lambda: x.tolist(), lambda: x.__setitem__(x > 1, x[:2]), lambda: "" if x[0] > 1 else 0,
    ):  # fmt: skip
        with pytest.raises(Waits):
            wait()
    x[x > 1] = 0.0
    assert x._array.tolist() == [0, 1, 0, 0]
    with pytest.raises(TypeError):
        x + np.ones(4)


@pytest.mark.parametrize("kind", [np.float32, np.int32])
def test_what_cupy_does_not_take_is_refused(kind):
    xp = module("plain_remote")
    x = xp.asarray(np.arange(4, dtype=kind))
    xp.copyto(x, xp.zeros_like(x), where=x > 2)
    assert x._array.tolist() == [0, 1, 2, 0]
    for call in (
        lambda: x.max(initial=0), lambda: xp.sum(x, where=x > 1),
        lambda: xp.multiply(x, x, where=x > 1), lambda: np.add(x, x, where=x > 1),
    ):  # fmt: skip
        with pytest.raises(TypeError, match="CuPy's"):
            call()
