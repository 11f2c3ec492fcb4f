"""On a GPU: what CUDA kernels make of CuPy arrays is what CPU kernels make, bit for bit."""

import many
import numpy as np
import pytest

from ringlet.compressors import Context, Workspace, parse
from ringlet.compressors.base.contract import empty_payload
from ringlet.compressors.kernels.cuda.common.bucketed import Target
from ringlet.compressors.kernels.cuda.runtime.device import device_of

pytestmark = pytest.mark.gpu
SPECS = [
    "fp16", "bf16", "int8", "int8(stochastic=True)", "int8(bucket=40)", "int4",
    "int4(bucket=2048, stochastic=True)", "maxnorm(bits=3, bucket=32, stochastic=True)",
    "minmax", "minmax(bits=6, bucket=64, stochastic=True)", "qsgd", "onebit",
    "onebit(bucket=4096)", "signsgd(scale=0.25)", "natural", "terngrad", "fp8",
    "mxfp8", "mxfp6(stochastic=True)", "mxfp4", "mxfp4(stochastic=True)", "nvfp4",
    "fp8(format='e5m2', block=8)", "block_topk", "block_topk(ratio=0.25, block=64, bits=2)",
    "block_topk(block=9000, ratio=0.02, bits=8)", "block_topk(ratio=0.25, block=64, dct=True)",
    "topk", "topk(ratio=0.3)",
]  # fmt: skip
VARIABLE = [
    "threshold(value=0.5)", "threshold(value=0.5, cap=0.01)", "topk_sampled", "sidco",
    "sidco(ratio=0.3, stages=1)", "lossless", "lossless(dtype='fp32')",
]  # fmt: skip
OTHERS = [
    "none", "threshold", "topk_sampled", "sidco", "lossless", "shared_int", "terngrad_shared",
    "powersgd", "acpsgd", "randomk", "randomk(unbiased=False) | ef", "int4 | hadamard | ef",
    "topk | int8 | ef", "qsgd | scaled | ef", "topk | ef21", "topk | momentum_correction",
    "block_topk | server_ef",
]  # fmt: skip
RNG = np.random.default_rng(3)
# The one NaN that float32 arithmetic of a GPU gives, whatever NaN it is given. A CPU keeps it.
NAN = np.uint32(0x7FFFFFFF).view(np.float32)


def values(n, trouble):
    x = (RNG.standard_normal(n) * np.exp2(RNG.integers(-20, 20, n))).astype(np.float32)
    if trouble and n > 5000:
        x[600], x[1400], x[3000:3200], x[4100:4700] = NAN, np.inf, 0, 1e-38
        assert x.view(np.uint32)[600] == 0x7FFFFFFF
    return x


class Side:
    """One tensor on the CPU or the GPU, with everything that a codec wants."""

    def __init__(self, xp, spec, x):
        self.xp, self.c, self.x = xp, parse(spec), xp.asarray(x)
        self.workspace = Workspace(xp)
        self.residual, self.out = xp.zeros(x.size, np.float32), xp.zeros(x.size, np.float32)
        self.payload = empty_payload(self.c, x.size, self.context())

    def context(self, **kw):
        n = self.x.size
        return Context(
            name="w", numel=n, shape=(n,), xp=self.xp, workspace=self.workspace, seed=9, **kw
        )

    def encode(self):
        self.c.encode_into(self.x, self.payload, self.context())

    def encode_feedback(self):
        self.c.feedback_into(self.x, self.residual, 0.9, self.payload, self.context(step=1))

    def decode(self):
        self.c.decompress(self.payload, self.out, self.context())

    def add(self):
        self.c.accumulate(self.payload, self.out, self.context())

    def add_up(self):
        self.c.sum_into([self.payload] * 3, self.out, self.context())

    def seen(self):
        arrays = {**self.payload, "residual": self.residual, "out": self.out}
        return {name: to_host(a) for name, a in arrays.items()}


def to_host(a):
    return a if isinstance(a, np.ndarray) else a.get()


def assert_same(a, b, after):
    for name in a:
        assert np.array_equal(a[name], b[name], equal_nan=a[name].dtype.kind == "f"), (after, name)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("n", [1, 100, 6001, 1 << 20])
@pytest.mark.parametrize("trouble", [False, True])
def test_gpu_and_cpu_agree(spec, n, trouble, cupy):
    assert device_of(cupy) is not None
    x = values(n, trouble)
    sides = [Side(xp, spec, x) for xp in (np, cupy)]
    for step in ("encode", "decode", "add", "encode_feedback", "encode_feedback", "add_up"):
        for side in sides:
            getattr(side, step)()
        assert_same(*(side.seen() for side in sides), step)


@pytest.mark.parametrize("spec", VARIABLE)
@pytest.mark.parametrize("n", [0, 1, 100, 6001, 1 << 20])
@pytest.mark.parametrize("trouble", [False, True])
def test_payloads_of_variable_size_agree(spec, n, trouble, cupy):
    x, c, made = values(n, trouble), parse(spec), []
    for xp in np, cupy:
        ctx = Context(name="w", numel=n, shape=(n,), xp=xp, workspace=Workspace(xp), seed=9)
        here, residual = xp.asarray(x), xp.ones(n, np.float32)
        plain = c.compress(here, ctx)
        fed = c.compress_feedback(here, residual, 0.9, ctx) | {"residual": residual}
        made.append([{n: to_host(array) for n, array in seen.items()} for seen in (plain, fed)])
    for a, b in zip(*made, strict=True):
        assert list(a) == list(b), "in another order, the bytes that travel differ"
        assert_same(a, b, spec)


@pytest.mark.parametrize("spec", SPECS)
def test_array_code_agrees_too(spec, cupy):
    x = values(20000, trouble=False)  # CuPy's own kernels flush subnormal numbers
    sides = [Side(xp, spec, x) for xp in (np, cupy)]
    made = [side.c.compress(side.x, side.context()) for side in sides]
    assert_same(*({name: to_host(a) for name, a in payload.items()} for payload in made), "array")


@pytest.mark.parametrize("spec", SPECS)
def test_a_step_is_captured_so_that_nothing_waits_for_the_host(spec, cupy):
    x = values(1 << 18, trouble=False)
    gpu, cpu = Side(cupy, spec, x), Side(np, spec, x)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.Device().synchronize()
    with stream:
        gpu.encode_feedback(), gpu.add_up()  # compiles, and allocates scratch memory
        gpu.residual[...] = 0
        stream.synchronize()
        stream.begin_capture()
        gpu.encode_feedback()
        gpu.add_up()
        graph = stream.end_capture()
        for _ in range(2):
            graph.launch(stream)
        stream.synchronize()
    for _ in range(2):
        cpu.encode_feedback()
    cpu.add_up()
    assert_same(cpu.seen(), gpu.seen(), "capture")


@pytest.mark.parametrize("spec", ["int8", "fp16", "onebit"])
def test_half_inputs_many_tensors_and_the_flag(spec, cupy):
    c, device = parse(spec), device_of(cupy)
    flag, found, expected, targets = cupy.zeros(1, np.int32), [], [], []
    for n in [5, 4096, 777] * 15:
        half = RNG.standard_normal(n).astype(np.float16)
        ctx = Context(name="w", numel=n, shape=(n,))
        made = empty_payload(c, n, ctx)
        c.encode_into(half.astype(np.float32), made, ctx)
        mine = {name: cupy.zeros(a.size, a.dtype) for name, a in made.items()}
        arrays = [mine[name] for name in c.strides()]
        targets.append(Target(cupy.asarray(half), n, arrays, None, ctx.key()))
        expected.append(made)
        found.append(mine)
    c.cuda().encode(device, targets, flag=flag)
    for a, b in zip(expected, found, strict=True):
        assert_same(a, {name: to_host(array) for name, array in b.items()}, "half")
    assert int(flag[0]) == 0
    targets[20].x[3] = np.inf
    c.cuda().encode(device, targets, flag=flag)
    assert int(flag[0]) == 1


@pytest.mark.parametrize("spec", many.SPECS)
def test_many_tensors_a_launch_are_as_one_by_one_on_the_cpu(spec, cupy):
    kind, lengths = many.SPECS[spec], [5, 4096, 777] * 15
    xs = [[many.random_values(RNG, n, kind, False) for n in lengths] for _ in range(many.RANKS)]
    cpu, gpu = (many.Side(spec, kind, lengths, xp) for xp in (np, cupy))
    many.one_by_one(cpu, xs, 1 / 3, 0.7)
    shifted = [[many.shifted(cupy, x, i % 3) for i, x in enumerate(of_rank)] for of_rank in xs]
    many.together(gpu, shifted, 1 / 3, 0.7)
    for a, b in zip(cpu.seen(), gpu.seen(), strict=True):
        np.testing.assert_array_equal(a, b)


def test_work_runs_on_the_stream_that_torch_uses(cupy):
    torch = pytest.importorskip("torch")
    x = torch.randn(1 << 20, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), cupy.cuda.Stream.from_external(side):
        x *= 2
        gpu = Side(cupy, "int8", cupy.from_dlpack(x))
        gpu.encode()
    side.synchronize()
    cpu = Side(np, "int8", x.cpu().numpy())
    cpu.encode()
    assert_same(cpu.seen(), gpu.seen(), "torch")


@pytest.mark.parametrize("spec", SPECS + OTHERS)
def test_everything_runs_on_cupy_arrays(spec, cupy):
    c = parse(spec)
    c.warm_up(Context(numel=64, shape=(64,), xp=cupy, workspace=Workspace(cupy)))
