"""ringlet.torch: topology, collectives on every dtype and layout, parameters and their state."""

from __future__ import annotations

import gc
import inspect
import os
import subprocess
import sys
import warnings
import weakref

import numpy as np
import pytest
import torch

import ringlet.torch as hvd
from ringlet.compressors import FP16, Int8
from ringlet.job.session import NotInitialized

pytestmark = pytest.mark.preloaded("torch")

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
OPS = (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)


def given(rank, shape, dtype):
    """Return rank ``rank``'s small whole numbers, exact in every dtype and under every op."""
    numbers = torch.Generator().manual_seed(rank)
    return torch.randint(1, 4, shape, generator=numbers).to(dtype)


def combined(shape, dtype, op):
    """Return what ``op`` makes of every rank's ``given``, in double precision."""
    stacked = torch.stack([given(r, shape, torch.float64) for r in range(hvd.size())])
    if op is hvd.Average:
        average = stacked.mean(0)
        return average if dtype.is_floating_point else average.trunc()
    if op is hvd.Sum:
        return stacked.sum(0)
    if op is hvd.Product:
        return stacked.prod(0)
    return stacked.amin(0) if op is hvd.Min else stacked.amax(0)


def case_topology():
    size, rank = hvd.size(), hvd.rank()
    assert size == int(os.environ["RINGLET_SIZE"])
    assert rank == int(os.environ["RINGLET_RANK"])
    assert (hvd.local_rank(), hvd.local_size()) == (rank, size)
    assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
    assert hvd.is_homogeneous()
    before = hvd.init()
    assert hvd.init() is before  # a second call changes nothing
    assert hvd.is_initialized()


def case_allreduce_dtypes_and_ops():
    started = []
    for dtype in FLOATS + INTS:  # all in flight at once, streams of nine dtypes and five ops
        for op in OPS:
            x = given(hvd.rank(), (3, 5), dtype)
            copy = x.clone()
            handles = hvd.allreduce_async(x, op=op), hvd.allreduce_async_(copy, op=op)
            started.append((dtype, op, x, copy, handles))
    for dtype, op, x, copy, handles in started:
        y, same = map(hvd.synchronize, handles)
        assert same is copy
        assert y.dtype is dtype
        wanted = combined((3, 5), dtype, op)
        tolerance = {torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-6)
        torch.testing.assert_close(y.double(), wanted, rtol=tolerance, atol=0)
        assert torch.equal(x, given(hvd.rank(), (3, 5), dtype))
        assert torch.equal(copy, y)


def case_one_name_asks_for_different_things():
    """What a name's last call asked for is kept; another call under it must not get that."""
    from random import Random

    draw = Random(7)  # the same on every rank
    for turn in range(150):
        name = draw.choice(["a", "b"])
        dtype, op = draw.choice(FLOATS + INTS), draw.choice(OPS)
        shape = draw.choice([(6,), (2, 3), (3, 2), (), (0,), (4, 1)])
        factor = draw.choice([1.0, 2.0]) if dtype.is_floating_point else 1.0
        spec = draw.choice([None, "none", "fp16", FP16()])
        layout = draw.choice(["plain", "plain", "transposed", "parameter"])
        way = draw.choice(["new", "in place", "group", "group in place"])
        x = given(hvd.rank(), shape, dtype)
        if layout == "transposed":
            x = x.t().contiguous().t() if x.dim() == 2 else x
        elif layout == "parameter" and dtype.is_floating_point and way in ("new", "group"):
            x = torch.nn.Parameter(x)
        kept = x.detach().clone()
        options = {"name": name, "op": op, "compression": spec, "postscale_factor": factor}
        if way == "new":
            y = hvd.synchronize(hvd.allreduce_async(x, **options))
        elif way == "in place":
            y = hvd.synchronize(hvd.allreduce_async_(x, **options))
            assert y is x
        elif way == "group":
            y, z = hvd.synchronize(hvd.grouped_allreduce_async([x, x], **options))
            assert torch.equal(y, z)
        else:
            other = x.clone()
            y, _ = hvd.synchronize(hvd.grouped_allreduce_async_([x, other], **options))
            assert y is x
            assert torch.equal(y, other)
        wanted = combined(shape, dtype, op)
        if layout == "transposed" and len(shape) == 2:
            assert y.shape == x.shape
        tolerance = {torch.float16: 2e-3, torch.bfloat16: 1e-2}.get(dtype, 1e-6)
        if spec in ("fp16", FP16()):
            tolerance = max(tolerance, 2e-3)
        told = f"turn {turn}: {name} {dtype} {op} {shape} {spec} {layout} {way}"
        torch.testing.assert_close(
            y.detach().double(), wanted * factor, rtol=tolerance, atol=0, msg=told
        )
        assert y.dtype is dtype, told
        if way in ("new", "group"):
            assert torch.equal(x.detach(), kept), told


def case_bfloat16_and_int16_of_one_shape_and_op():
    """What a call asked for is kept by dtype and shape; these two are of one width."""
    whole, half = torch.ones(4, dtype=torch.int16), torch.full((4,), 1.5, dtype=torch.bfloat16)
    for name in (None, "of one width"):
        for x in (whole, whole, half, half, whole, half):
            y = hvd.allreduce(x, op=hvd.Sum, name=name)
            assert y.dtype is x.dtype
            assert y.tolist() == [x[0].item() * hvd.size()] * 4


def case_handles_that_were_waited_for_are_freed_at_once():
    gc.disable()  # no circle of references may keep the tensors of a step
    try:
        for _ in range(2):
            handle = hvd.allreduce_async(torch.ones(8), name="freed")
            kept = weakref.ref(handle), weakref.ref(hvd.synchronize(handle))
            del handle
            hvd.barrier()  # the engine's thread may be about to let go
            assert [each() for each in kept] == [None, None]
    finally:
        gc.enable()


def case_autograd_sees_what_a_second_call_writes():
    for _ in range(2):  # the first call prepares what the second uses
        x = torch.ones(3, requires_grad=True)
        product = x * 2
        square = product * product  # autograd keeps the product
        hvd.synchronize(hvd.allreduce_async_(product.detach(), name="written", op=hvd.Sum))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            square.sum().backward()


def case_a_plugin_defined_anew_is_used():
    from ringlet.compressors import Compressor, Part, register

    for factor in (2.0, 3.0):

        @register("multiplied")
        class Multiplied(Compressor):
            times = factor

            def layout(self, numel):
                return (Part("values", "float32", numel),)

            def compress(self, x, ctx):
                return {"values": x * np.float32(self.times)}

            def decompress(self, payload, out, ctx):
                out[:] = payload["values"]

        handle = hvd.allreduce_async(
            torch.ones(4096), name="anew", op=hvd.Sum, compression="multiplied"
        )
        assert hvd.synchronize(handle).tolist() == [factor * hvd.size()] * 4096


def case_allreduce_bool():
    own = torch.tensor([hvd.rank() == 0, True, False])
    assert hvd.allreduce(own, op=hvd.Sum).tolist() == [True, True, False]  # any
    assert hvd.allreduce(own, op=hvd.Max).tolist() == [True, True, False]
    assert hvd.allreduce(own, op=hvd.Min).tolist() == [False, True, False]  # all
    assert hvd.allreduce(own, op=hvd.Product).tolist() == [False, True, False]


def case_allreduce_shapes():
    for shape in ((), (0,), (1,), (0, 3), (3, 0), (1, 1, 1), (2, 3, 4), (70001,)):
        x = given(hvd.rank(), shape, torch.float32)
        y = hvd.allreduce(x, op=hvd.Sum)
        assert y.shape == x.shape
        assert torch.equal(y.double(), combined(shape, torch.float32, hvd.Sum))
        assert hvd.allreduce_(x, op=hvd.Sum) is x
        assert torch.equal(x, y)


def case_allreduce_strides():
    shape = (2, 3, 4, 5)
    wanted = combined(shape, torch.float32, hvd.Sum)
    layouts = {
        "channels_last": lambda x: x.to(memory_format=torch.channels_last),
        "transposed": lambda x: x.transpose(0, 3).contiguous().transpose(0, 3),
        "strided": lambda x: torch.stack([x, -x], -1)[..., 0],
    }
    for number, (layout, lay_out) in enumerate(layouts.items()):
        for dtype in (torch.float32, torch.bfloat16):
            x = lay_out(given(hvd.rank(), shape, dtype))
            strides = x.stride()
            assert not x.is_contiguous(), layout
            assert torch.equal(hvd.allreduce(x, op=hvd.Sum).double(), wanted)
            hvd.allreduce_(x, op=hvd.Sum, name=f"strided.{number}.{dtype}")
            assert torch.equal(x.double(), wanted)
            assert x.stride() == strides
    # A rank's layout is its own business.
    x = given(hvd.rank(), shape, torch.float32)
    own = x.to(memory_format=torch.channels_last) if hvd.rank() else x
    assert torch.equal(hvd.allreduce(own, op=hvd.Sum).double(), wanted)
    pair = torch.stack([x, -x], -1)
    hvd.allreduce_(pair[..., 0], op=hvd.Sum)  # a view writes through
    assert torch.equal(pair[..., 0].double(), wanted)
    assert torch.equal(pair[..., 1], -x)


def case_average_arguments():
    x = torch.tensor([float(hvd.rank())])
    total = sum(range(hvd.size()))
    assert hvd.allreduce(x).item() == total / hvd.size()
    assert hvd.allreduce(x, average=True).item() == total / hvd.size()
    assert hvd.allreduce(x, average=False).item() == total
    assert hvd.allreduce(x, False, "positional").item() == total
    assert hvd.allreduce_(x.clone(), False).item() == total
    assert hvd.allreduce(x, op=1).item() == total  # Horovod's numbers
    for both in ({"average": True, "op": hvd.Sum}, {"average": False, "op": hvd.Average}):
        with pytest.raises(ValueError, match="not both"):
            hvd.allreduce(x, **both)
    assert hvd.allreduce(x, np.True_).item() == total / hvd.size()
    assert hvd.allreduce(x, np.False_).item() == total
    for given, meant in ((hvd.Sum, "write op=hvd.Sum"), ("loss", "write name='loss'"), (1, "1")):
        words = rf"average \(which is deprecated\) is True or False, not .*{meant}$"
        for call in (hvd.allreduce, hvd.allreduce_, hvd.allreduce_async, hvd.allreduce_async_):
            with pytest.raises(ValueError, match=words):
                call(x, given)
        with pytest.raises(ValueError, match=words):
            hvd.grouped_allreduce([x], given)


def case_scale_factors():
    size, total = hvd.size(), sum(range(1, hvd.size() + 1))
    for dtype in FLOATS:
        x = torch.full((9,), hvd.rank() + 1.0).to(dtype)
        y = hvd.allreduce(x, op=hvd.Sum, prescale_factor=0.5, postscale_factor=4.0)
        assert y.tolist() == [2.0 * total] * 9
        y = hvd.allreduce(x, prescale_factor=2.0, postscale_factor=size)
        torch.testing.assert_close(y.double(), torch.full((9,), 2.0 * total).double(), rtol=0.01,
                                   atol=0)  # fmt: skip
        assert x.tolist() == [hvd.rank() + 1.0] * 9
    whole = torch.full((4,), 10 * (hvd.rank() + 1), dtype=torch.int32)
    assert hvd.allreduce(whole, op=hvd.Sum, postscale_factor=0.1).tolist() == [total] * 4


def case_float16_average_does_not_overflow():
    big = torch.full((3000,), 60000.0, dtype=torch.float16)
    assert torch.equal(hvd.allreduce(big), big)
    assert torch.equal(hvd.allreduce(big, compression="fp16"), big)
    wide = torch.full((3000,), 60000.0)
    assert torch.equal(hvd.allreduce(wide, compression=hvd.Compression.fp16), wide)


def case_asynchronous():
    handles = []
    for i in range(30):  # names may arrive in any order
        i = i if hvd.rank() % 2 else 29 - i
        handles.append((i, hvd.allreduce_async(torch.full((i,), float(i)), name=f"many.{i}")))
    for i, handle in handles:
        assert torch.equal(hvd.synchronize(handle), torch.full((i,), float(i)))
        assert hvd.poll(handle)
    x = torch.ones(4)
    handle = hvd.allreduce_async_(x, op=hvd.Sum, name="in place")
    assert hvd.synchronize(handle) is x
    assert x.tolist() == [hvd.size()] * 4
    own = torch.full((1, 2), float(hvd.rank()))
    gathered = hvd.allgather_async(own, name="g")
    sent, kept = hvd.broadcast_async(own, 0, name="b"), hvd.broadcast_async_(own.clone(), 0)
    assert hvd.synchronize(gathered)[:, 0].tolist() == list(range(hvd.size()))
    assert hvd.synchronize(sent).tolist() == hvd.synchronize(kept).tolist() == [[0.0, 0.0]]
    assert own.tolist() == [[hvd.rank()] * 2]


def case_many_unnamed_in_flight():
    handles = [hvd.allreduce_async(torch.tensor([float(i)])) for i in range(50)]
    assert [hvd.synchronize(h).item() for h in handles] == list(range(50))


def case_a_name_in_flight_twice():
    x = torch.zeros(5_000_00)
    first = hvd.allreduce_async(x, name="twice") if hvd.rank() else None
    if first is not None:  # rank 0 has not asked yet, so it cannot have finished
        with pytest.raises(hvd.HorovodInternalError, match="'twice' was submitted again"):
            hvd.allreduce_async(x, name="twice")
    hvd.barrier()
    first = first or hvd.allreduce_async(x, name="twice")
    hvd.synchronize(first)
    hvd.allreduce(x, name="twice")


def case_compression():
    x = torch.randn(5000, generator=torch.Generator().manual_seed(hvd.rank()))
    exact = hvd.allreduce(x)
    for compression, tolerance in (
        (None, 0),
        ("none", 0),
        (hvd.Compression.none, 0),
        (hvd.Compression.fp16, 2e-3),
        ("fp16", 2e-3),
        (FP16(), 2e-3),
        ("bf16", 2e-2),
        ("int8", 3e-2),
        (Int8(bucket=64), 3e-2),
        ("topk(ratio=1.0)", 1e-6),
    ):
        y = hvd.allreduce(x, compression=compression)
        assert (y - exact).abs().max() <= tolerance, compression
        total = hvd.allreduce(x, compression=compression, op=hvd.Sum)
        torch.testing.assert_close(total, y * hvd.size(), rtol=1e-2, atol=0.05)
        everywhere = hvd.allgather(y.reshape(1, -1))
        assert (everywhere == y).all(), compression  # bit-equal
    for dtype in FLOATS:
        y = hvd.allreduce(x.to(dtype), compression="int8")
        assert y.dtype is dtype
        assert (y.float() - exact).abs().max() < 0.05
    whole = torch.arange(3000)
    assert torch.equal(hvd.allreduce(whole, compression="int8"), whole)  # integers travel as is


def case_stateful_compression():
    x = torch.randn(4000)
    with pytest.raises(ValueError, match="pass name="):
        hvd.allreduce(x, compression="int8 | ef")
    size = hvd.size()
    sent = torch.zeros(4000)
    for _ in range(60):
        sent += hvd.allreduce(x, name="fed back", compression="topk(ratio=0.1) | ef")
    exact = hvd.allreduce(x)
    assert (sent / 60 - exact).norm() < 0.35 * exact.norm(), size


def case_a_compressor_class():
    for cls, hint in ((Int8, "write Int8()"), (type("Custom", (), {}), "not the class Custom")):
        with pytest.raises(TypeError, match="Compressor instance") as told:
            hvd.allreduce(torch.ones(1), compression=cls)
        assert hint in str(told.value)


def case_allgather():
    size, rank = hvd.size(), hvd.rank()
    for dtype in (*FLOATS, *INTS, torch.bool):
        own = torch.full((rank, 2), rank % 2).to(dtype)  # rank 0 has no rows
        rows = [r % 2 for r in range(size) for _ in range(r)]
        y = hvd.allgather(own)
        assert y.dtype is dtype
        assert torch.equal(y, torch.tensor(rows).to(dtype).reshape(-1, 1).expand(-1, 2))
    nothing = hvd.allgather(torch.empty(0, 3))
    assert nothing.shape == (0, 3)
    assert hvd.allgather(torch.empty(rank, 0)).shape == (sum(range(size)), 0)
    assert hvd.allgather(torch.tensor([rank])).tolist() == list(range(size))
    own = torch.arange(6.0).reshape(2, 3).t() + rank
    assert torch.equal(hvd.allgather(own), torch.cat([own - rank + r for r in range(size)]))
    for step in range(3):  # one name, other sizes
        own = torch.full((step + rank,), float(rank))
        assert hvd.allgather(own, name="growing").numel() == size * step + sum(range(size))
    for extra in (0, 0, 1, 0):  # alike, then not, although rank 0's part stays the same
        own = torch.full((2 + extra * rank,), float(rank))
        wanted = [float(r) for r in range(size) for _ in range(2 + extra * r)]
        assert hvd.allgather(own, name="uneven").tolist() == wanted


def case_broadcast():
    for root in range(hvd.size()):
        for dtype in (*FLOATS, *INTS, torch.bool):
            own = torch.full((2, 3), hvd.rank() % 2).to(dtype)
            y = hvd.broadcast(own, root)
            assert torch.equal(y, torch.full((2, 3), root % 2).to(dtype))
            assert torch.equal(own, torch.full((2, 3), hvd.rank() % 2).to(dtype))
            assert hvd.broadcast_(own, root_rank=root, name=f"b.{root}.{dtype}") is own
            assert torch.equal(own, y)
        for x in (torch.tensor(1.0 + hvd.rank()), torch.empty(0, 2)):
            assert torch.equal(hvd.broadcast(x, root), torch.full_like(x, 1.0 + root))
        columns = torch.full((4, 3), float(hvd.rank())).t()
        hvd.broadcast_(columns, root)
        assert columns.tolist() == [[root] * 4] * 3
        assert columns.stride() == (1, 3)
    for root in (-1, hvd.size()):
        with pytest.raises(ValueError, match="root_rank must be one of the ranks"):
            hvd.broadcast(torch.ones(1), root)
    with pytest.raises(ValueError, match="got '0'"):
        hvd.broadcast(torch.ones(1), "0")


def case_second_derivatives():
    """The sum of squares of gradients, differentiated: what a gradient penalty is."""
    size, rank = hvd.size(), hvd.rank()
    x, total = rank + 1.0, size * (size + 1) / 2
    of_sum = 36 * size**3 * total**3
    operations = {
        "allreduce": (lambda t: hvd.allreduce(t, op=hvd.Sum), of_sum),
        "average": (hvd.allreduce, 36 * (total / size) ** 3),
        "fp16": (lambda t: hvd.allreduce(t, op=hvd.Sum, compression="fp16"), of_sum),
        "group": (lambda t: hvd.grouped_allreduce([t, 2 * t], op=hvd.Sum)[0], of_sum),
        "alltoall": (hvd.alltoall, 36 * x**3),
        "splits": (lambda t: hvd.alltoall(t, splits=[1] * size)[0], 36 * x**3),
        "allgather": (hvd.allgather, 36 * x**3 / size),
        "gathered group": (lambda t: hvd.grouped_allgather([t, t])[0], 36 * x**3 / size),
        "broadcast": (lambda t: hvd.broadcast(t, 0), 0.0 if rank else 36 / size),
        "reducescatter": (lambda t: hvd.reducescatter(t, op=hvd.Sum), of_sum),
        "scattered group": (lambda t: hvd.grouped_reducescatter([t], op=hvd.Sum)[0], of_sum),
    }
    for what, (operation, wanted) in operations.items():
        own = torch.full((size,), x, dtype=torch.float64, requires_grad=True)
        (grad,) = torch.autograd.grad((operation(own) ** 3).sum(), own, create_graph=True)
        assert grad.requires_grad, what
        ((grad**2).sum() + (own**2).sum()).backward()
        assert own.grad.tolist() == pytest.approx([wanted + 2 * x] * size), what


def case_what_overflows_below_a_broadcast_stays_zero_elsewhere():
    own = torch.ones(2, requires_grad=True)
    scaled = hvd.broadcast(own, 0) ** 2 * torch.tensor([float("inf"), 1.0])
    (grad,) = torch.autograd.grad(scaled.sum(), own, create_graph=True)
    grad.sum().backward()
    inf, share = float("inf"), torch.tensor(2.0 / hvd.size()).item()  # as float32 has it
    expected = ([inf, 2.0], [inf, share]) if hvd.rank() == 0 else ([0.0] * 2, [0.0] * 2)
    assert (grad.tolist(), own.grad.tolist()) == expected


def case_leaves_that_need_gradients():
    p = torch.nn.Parameter(torch.full((3,), float(hvd.rank())))
    assert hvd.allreduce_(p, op=hvd.Max) is p
    assert p.tolist() == [hvd.size() - 1.0] * 3
    hvd.broadcast_(p, 0)
    assert not hvd.allgather(p.detach()).requires_grad


def case_differentiable():
    size, rank = hvd.size(), hvd.rank()
    x = torch.full((2, 3), 2.0, requires_grad=True)
    weights = torch.full((2, 3), float(rank + 1))
    (hvd.allreduce(x, op=hvd.Sum, name="d.sum") * weights).sum().backward()
    total = sum(range(1, size + 1))
    assert x.grad.tolist() == [[total] * 3] * 2
    x.grad = None
    (hvd.allreduce(x) * weights).sum().backward()
    assert x.grad.tolist() == [[total / size] * 3] * 2
    x.grad = None
    hvd.allreduce(x, op=hvd.Sum, prescale_factor=3.0, postscale_factor=0.5).sum().backward()
    assert x.grad.tolist() == [[1.5 * size] * 3] * 2
    rows = torch.ones(rank + 1, 2, requires_grad=True)
    gathered = hvd.allgather(rows)
    (gathered * torch.arange(len(gathered)).reshape(-1, 1)).sum().backward()
    first = sum(range(1, rank + 1))
    assert rows.grad[:, 0].tolist() == [first + i for i in range(rank + 1)]
    for root in range(size):
        y = torch.full((2,), float(rank), requires_grad=True)
        (hvd.broadcast(y, root) * (rank + 1)).sum().backward()
        assert y.grad.tolist() == pytest.approx([total / size if rank == root else 0] * 2)
    with torch.no_grad():
        assert not hvd.allreduce(x).requires_grad
    with pytest.raises(RuntimeError, match="op=Max"):
        hvd.allreduce(x, op=hvd.Max).sum().backward()


def case_what_cannot_travel():
    for x, words in (
        (torch.ones(2, dtype=torch.complex64), "complex64"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.empty(2, device="meta"), "meta"),
        (np.ones(2), "ndarray"),
        ([1.0], "list"),
    ):
        for operation in (hvd.allreduce, hvd.allreduce_, hvd.allgather):
            with pytest.raises(TypeError, match=words):
                operation(x)
        with pytest.raises(TypeError, match=words):
            hvd.broadcast(x, 0)


def case_broadcast_parameters():
    def model():
        return torch.nn.Sequential(
            torch.nn.Conv2d(1, 2, 3),
            torch.nn.BatchNorm2d(2),
            torch.nn.Linear(3, 2).to(torch.bfloat16),
        )

    for root in (0, hvd.size() - 1):
        torch.manual_seed(hvd.rank())
        own = model()
        own[1].num_batches_tracked += hvd.rank()
        own[1].running_mean += hvd.rank()
        torch.manual_seed(root)
        wanted = model()
        hvd.broadcast_parameters(own.state_dict(), root_rank=root)
        for (name, got), want in zip(own.named_parameters(), wanted.parameters(), strict=True):
            assert torch.equal(got, want), name
        assert own[1].num_batches_tracked.item() == root
        assert own[1].running_mean.tolist() == [root, root]
        assert hvd.replicas_equal(own.state_dict())
    own = model()
    hvd.broadcast_parameters(own.named_parameters(), root_rank=0)
    assert hvd.replicas_equal(own.named_parameters())
    own[0].to(memory_format=torch.channels_last)
    with torch.no_grad():
        own[0].weight += hvd.rank()
    assert not hvd.replicas_equal(own.state_dict())
    hvd.broadcast_parameters(own.state_dict())
    assert hvd.replicas_equal(own.state_dict())
    with pytest.raises(TypeError, match="state_dict"):
        hvd.broadcast_parameters(own[0].weight)
    hvd.broadcast_parameters({})
    hvd.broadcast_parameters({"extra": "text", "x": torch.ones(1)})


def case_replicas_equal_sees_every_bit():
    for dtype in (*FLOATS, *INTS, torch.bool):
        x = torch.zeros(5, dtype=dtype)
        assert hvd.replicas_equal({"x": x})
        x[3] = int(hvd.rank() == hvd.size() - 1)
        assert not hvd.replicas_equal({"x": x})
    signed = torch.tensor([0.0 if hvd.rank() else -0.0])
    assert not hvd.replicas_equal({"x": signed})
    assert hvd.replicas_equal({"x": torch.tensor([float("nan")])})
    assert not hvd.replicas_equal({f"x{hvd.rank()}": torch.zeros(1)})


def case_optimizer_state():
    root = hvd.size() - 1
    kinds = {
        "sgd": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
        "adam": lambda p, lr: torch.optim.Adam(p, lr=lr, betas=(0.8, 0.9), amsgrad=True),
        "adamw": lambda p, lr: torch.optim.AdamW(p, lr=torch.tensor(lr)),
        "numpy": lambda p, lr: torch.optim.SGD(p, lr=np.float64(lr), momentum=0.9),
    }
    for name, make in kinds.items():
        model = torch.nn.Linear(3, 2)
        hvd.broadcast_parameters(model.state_dict())
        lr = 0.125 if hvd.rank() == root else 0.5
        optimizer = make([{"params": [model.weight]}, {"params": [model.bias], "lr": lr / 2}], lr)
        if hvd.rank() == root:  # others are fresh
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(1, 3)).sum().backward()
                optimizer.step()
        hvd.broadcast_optimizer_state(optimizer, root)
        hvd.broadcast_parameters(model.state_dict(), root)
        assert [float(g["lr"]) for g in optimizer.param_groups] == [0.125, 0.0625], name
        state = optimizer.state_dict()["state"]
        flat = {f"{i}.{k}": v for i, s in state.items() for k, v in s.items()}
        assert flat, name
        assert hvd.replicas_equal(flat), name
        optimizer.zero_grad()
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        assert hvd.replicas_equal(model.state_dict()), name


def case_optimizer_state_that_cannot_travel():
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 2).parameters(), lr=0.1)
    optimizer.param_groups[0]["hook"] = object
    with pytest.raises(hvd.HorovodInternalError, match="rank 0") as told:
        hvd.broadcast_optimizer_state(optimizer)
    texts = hvd.allgather(torch.tensor([[hash(len(str(told.value)))]]))
    assert (texts == texts[0]).all()


def case_thread_of_the_caller_is_free():
    import threading

    results = {}

    def reduce(i):
        results[i] = hvd.allreduce(torch.full((10,), float(i)), name=f"thread.{i}")

    threads = [threading.Thread(target=reduce, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all((results[i] == i).all() for i in range(4))


def case_zz_leave_and_come_back():
    before = hvd.size()
    hvd.shutdown()
    assert not hvd.is_initialized()
    with pytest.raises(NotInitialized, match=r"was shut down; call init\(\) first"):
        hvd.allreduce(torch.ones(1))
    hvd.shutdown()  # idempotent
    hvd.init()
    assert hvd.size() == before
    assert hvd.allreduce(torch.ones(1), op=hvd.Sum).item() == before


CASES = [value for name, value in sorted(globals().items()) if name.startswith("case_")]


@pytest.mark.parametrize(("transport", "size"), [("mpi", 2), ("gloo", 3)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__[5:])
def test_op(case, transport, size, run_case):
    run_case(case, transport, size)


ALONE = """
import os, sys, warnings
import torch
import ringlet.torch as hvd
for ask in (hvd.rank, hvd.size, hvd.local_rank, hvd.local_size, hvd.cross_rank, hvd.cross_size,
            hvd.stats, hvd.barrier, lambda: hvd.allreduce(torch.ones(1)),
            lambda: hvd.broadcast_parameters({"x": torch.ones(1)}),
            lambda: hvd.DistributedOptimizer(torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]))):
    try:
        ask()
    except ValueError as error:  # what Horovod's scripts catch
        assert isinstance(error, hvd.HorovodInternalError), error
        assert "call init() first" in str(error), error
    else:
        raise AssertionError(ask)
assert not hvd.is_initialized()
hvd.shutdown()
hvd.init()
assert hvd.is_initialized()
assert (hvd.rank(), hvd.size(), hvd.local_rank(), hvd.local_size()) == (0, 1, 0, 1)
assert (hvd.cross_rank(), hvd.cross_size()) == (0, 1)
x = torch.randn(2000)
for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product):
    assert torch.equal(hvd.allreduce(x, op=op), x)
assert torch.equal(hvd.allreduce(x, op=hvd.Sum, prescale_factor=2.0), 2 * x)
assert torch.equal(hvd.allgather(x), x) and torch.equal(hvd.broadcast(x, 0), x)
model = torch.nn.Linear(50, 50)
opt = hvd.DistributedOptimizer(torch.optim.Adam(model.parameters()), compression="int8 | ef",
                               named_parameters=model.named_parameters())
hvd.broadcast_parameters(model.state_dict()); hvd.broadcast_optimizer_state(opt)
for _ in range(3):
    opt.zero_grad(); model(torch.randn(4, 50)).sum().backward(); opt.step()
assert hvd.replicas_equal(model.state_dict())
sys.stdout.flush()
pid = os.fork()  # a data loader's worker asks who it is; a child of one's own may start afresh
if pid == 0:
    assert hvd.rank() == 0
    try:
        hvd.allreduce(x)
    except hvd.HorovodInternalError as error:
        assert "forked" in str(error)
    hvd.init()
    assert torch.equal(hvd.allreduce(x), x)
    os._exit(0)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
hvd.allreduce(x)
hvd.shutdown()
print("done")
"""


def test_one_process_without_a_launcher():
    ended = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", ALONE],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert (ended.stdout, ended.returncode) == ("done\n", 0), ended.stderr


def test_the_names_that_horovod_users_know():
    assert [int(op) for op in (hvd.Average, hvd.Sum, hvd.Min, hvd.Max, hvd.Product)] == [
        0, 1, 3, 4, 5,
    ]  # fmt: skip
    assert set(hvd.__all__) <= set(dir(hvd))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert issubclass(hvd.HorovodInternalError, RuntimeError)


def test_functions_with_arguments_answer_wrong_ones_and_are_not_compiled():
    for name in set(hvd.__all__) - {"timeline_span"}:
        found = getattr(hvd, name)
        if inspect.isfunction(found) and inspect.signature(found).parameters:
            assert hasattr(found, "__wrapped__"), f"{name} is no public entry point"
    untraced = [hvd.allreduce, hvd.reducescatter, hvd.grouped_reducescatter, hvd.replicas_equal]
    assert all(f._torchdynamo_disable for f in untraced)
    with pytest.raises(TypeError, match="did you mean 'process_set'"):
        hvd.reducescatter(torch.ones(2), proces_set=None)
