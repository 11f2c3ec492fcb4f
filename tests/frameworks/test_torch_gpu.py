"""Torch tensors that go to the engine as arrays on a GPU, which a stand-in plays.

Their memory is that of tensors on the CPU; the stand-in raises where the host or a stream reads it
too early. What torch itself does to it, is not seen. On a GPU: ``tests/gpu/test_gpu_torch.py``.
"""

from __future__ import annotations

import contextlib
import copy
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from standin import DeviceArray, Gpu, engine_on
from standin.streams import Memory
from standin.torch_groups import Group

import ringlet.torch as hvd
from ringlet.compressors import Router
from ringlet.job import session
from ringlet.ring.transports import torch_nccl
from ringlet.ring.transports.local import LocalWorld, run_local, this_thread
from ringlet.ring.transports.torch_nccl import TorchNcclCommunicator
from ringlet.torch.parallel import fsdp_transport
from ringlet.torch.parallel.ddp import DdpState, reduce_bucket
from ringlet.torch.parallel.fsdp import FsdpState
from ringlet.torch.parallel.fsdp_gather import CompressedAllGather
from ringlet.torch.parallel.fsdp_routes import FsdpRoutes
from ringlet.torch.parallel.fsdp_scatter import CompressedReduceScatter
from ringlet.torch.parallel.fsdp_transport import GroupTransports
from ringlet.torch.tensors import placement


@pytest.fixture
def on_both(monkeypatch):
    """Run a function on two ranks with tensors in host memory, then with tensors on a GPU.

    Returns what it returns by rank, of both.
    """
    mine, playing = threading.local(), {}

    @contextlib.contextmanager
    def behind(place):  # on the engine's thread
        mine.gpu, mine.viewed = playing.get(place, (None, None))
        with place.at_work():
            yield

    def view(tensor):
        memory = Memory(mine.gpu)
        memory.touch(write=True)  # by torch, on the stream that is current
        mine.viewed.append(memory)
        return DeviceArray(placement.flat(tensor), memory)

    def main(gpu, body):
        mine.gpu, mine.viewed, mine.made = gpu, [], []
        hvd.init()
        with gpu.train:
            try:
                result = body()
                for memory in mine.viewed:  # what was waited for may be read
                    memory.touch(write=False)
                assert bool(mine.viewed) == mine.direct
            finally:
                hvd.shutdown()
        return result

    def run(body):
        found = []
        for direct in (False, True):

            def rank_main(comm, direct=direct):
                mine.direct = direct
                return main(Gpu(), body)

            monkeypatch.setattr(placement, "_gpu_of", lambda tensor, gpu=0 if direct else None: gpu)
            found.append(run_local(rank_main, 2))
        return found

    def engine(comm, control, limits, places, network):
        made = engine_on(mine.gpu, comm, limits)
        playing[made.place("cuda")] = mine.gpu, mine.viewed
        return made

    run.direct = lambda: mine.direct
    run.made = lambda: len(mine.made)  # results of the calling rank that the engine made room for
    monkeypatch.setattr(placement, "_view", view)
    monkeypatch.setattr(placement, "behind", behind)
    monkeypatch.setattr(placement, "_use_here", lambda tensor: mine.made.append(tensor))
    monkeypatch.setattr("ringlet.torch.parallel.ddp.behind", behind)
    monkeypatch.setattr(session, "Engine", engine)
    return run


def drawn(seed, *shape):
    """Return random numbers; the ranks are threads, which share torch's own generator."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def same(found):
    for host, gpu in zip(*found, strict=True):
        assert len(host) == len(gpu) > 0
        for i, (a, b) in enumerate(zip(host, gpu, strict=True)):
            assert torch.equal(a, b), i


def test_collectives(on_both):
    def body():
        x = drawn(hvd.rank(), 40, 50)
        wide = drawn(hvd.rank(), 3, 4, 8, 8).to(memory_format=torch.channels_last)
        outs = [
            hvd.allreduce(x, name="a"),
            hvd.allreduce(x.bfloat16(), name="b", compression="int8"),
            hvd.allreduce(x.t(), name="c", op=hvd.Max, compression="fp16"),
            hvd.allreduce(x.half(), name="d", prescale_factor=0.5, op=hvd.Sum),
            hvd.allreduce((x * 9).int(), name="e"),
            hvd.allreduce((x * 9).short(), name="f"),  # which NCCL does not reduce
            hvd.allreduce(x, name="g", op=hvd.Adasum),
            hvd.allreduce_(wide, name="h"),
            *hvd.grouped_allreduce([x, x[:3]], name="i", compression="topk | ef"),
            hvd.broadcast(x, 1, name="j"),
        ]
        assert outs[7] is wide
        grad = x.clone().requires_grad_()
        (hvd.allreduce(grad, name="l") * x).sum().backward()
        return [*outs, grad.grad]

    same(on_both(body))


def test_results_of_a_size_that_ranks_tell_each_other(on_both):
    def body():
        rank = hvd.rank()
        x = drawn(rank, 7 + 2 * rank, 5)
        splits, sized = [3, 4 + 2 * rank], drawn(rank, 9, 5)
        outs = [
            hvd.allgather(x, name="a"),
            hvd.allgather(x[: 3 * rank].bfloat16(), name="b"),
            hvd.allgather(x.t().contiguous().t()[:7], name="c"),
            hvd.allgather((x[:0] * 9).short(), name="d"),  # NCCL moves what it does not reduce
            *hvd.grouped_allgather([x, x > 0], name="e"),
            *hvd.alltoall(x, splits, name="f"),
            hvd.alltoall(sized[:8], name="g"),
            hvd.broadcast((x[:7] * 9).short(), 1, name="h"),
        ]
        assert outs[8].shape == (8, 5)
        moved = on_both.made()
        outs += [
            hvd.reducescatter(sized, name="i"),
            hvd.reducescatter(sized[:8].half(), name="j", op=hvd.Sum, prescale_factor=0.5),
            hvd.reducescatter(sized, name="k", compression="bf16", postscale_factor=3.0),
            hvd.reducescatter((sized * 9).short(), name="l", op=hvd.Max),  # staged
            *hvd.grouped_reducescatter([sized, sized > 0], name="m", op=hvd.Sum),
        ]
        assert (moved, on_both.made() - moved) in ((0, 0), (8, 5))
        for name, collective in ("n", hvd.allgather), ("o", hvd.alltoall), ("p", hvd.reducescatter):
            grad = sized[:8].clone().requires_grad_()
            out = collective(grad, name=name)
            (out * out).sum().backward()
            outs += [out.detach(), grad.grad]
        rows = torch.stack([x[0], x[1]])
        at = torch.tensor([[rank, 5]])
        sparse = torch.sparse_coo_tensor(at, rows, (8, 5), check_invariants=True)
        outs.append(hvd.synchronize(hvd.sparse_allreduce_async(sparse, "q", hvd.Sum)).to_dense())
        return outs

    same(on_both(body))


def model_and_optimizer(spec, **options):
    model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 30))
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            p.copy_(drawn(i, *p.shape) / 8)
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    options["compression"] = spec
    return model, hvd.DistributedOptimizer(inner, model.named_parameters(), **options)


def steps(model, optimizer, numbers):
    for step in numbers:
        optimizer.zero_grad()
        model(drawn(10 * step + hvd.rank(), 8, 40)).square().mean().backward()
        optimizer.step()


def lie_on_gpu(optimizer):
    arrays = [s["residual"] for s in optimizer._ringlet.memory.states.values() if "residual" in s]
    assert arrays
    return {isinstance(array, DeviceArray) for array in arrays}


def test_training_and_checkpoints(on_both):
    """Residuals are saved from the GPU, and go back there: training goes on bit for bit."""

    def body():
        outs = []
        for spec in ("none", "int8 | ef", {"*.bias": "none", "*": "topk(ratio=0.1) | ef"}):
            model, optimizer = model_and_optimizer(spec)
            steps(model, optimizer, range(3))
            saved = copy.deepcopy(optimizer.state_dict())
            weights = {k: v.clone() for k, v in model.state_dict().items()}
            norm = optimizer.residual_norm()
            steps(model, optimizer, range(3, 5))
            again, other = model_and_optimizer(spec)
            again.load_state_dict(weights)
            other.load_state_dict(saved)
            steps(again, other, range(3, 5))
            pairs = zip(model.parameters(), again.parameters(), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs), spec
            if spec != "none":
                (direct,) = lie_on_gpu(other)
                held = saved["ringlet"]["states"]["0.weight"]["residual"]
                assert isinstance(held, torch.Tensor)
                other.set_compression("fp16 | ef")
                steps(again, other, range(5, 6))
                assert lie_on_gpu(other) == {direct}
            outs += [p.detach() for p in again.parameters()] + [torch.tensor(norm)]
        return outs

    same(on_both(body))


def test_copies_of_residuals_travel_through_host_memory(on_both):
    """As in an elastic job with redundancy=1: another rank adds them to its own."""

    def body():
        model, optimizer = model_and_optimizer("topk(ratio=0.1) | ef")
        steps(model, optimizer, range(2))
        memory, norm = optimizer._ringlet.memory, optimizer.residual_norm()
        memory.resize(hvd.size())
        held = memory.own()
        assert held
        assert all(type(array) is np.ndarray for kept in held.values() for array in kept.values())
        assert memory.owed_norm() == pytest.approx(norm)
        memory.take_over(held, hvd.size())
        assert optimizer.residual_norm() == pytest.approx(2 * norm)
        steps(model, optimizer, range(2, 4))
        return [p.detach() for p in model.parameters()]

    same(on_both(body))


def test_a_skipped_step_is_taken_back_on_the_gpu(on_both):
    def body():
        model, optimizer = model_and_optimizer("int8 | ef", precision="amp_fp16")
        for step in range(4):
            optimizer.zero_grad()
            loss = model(drawn(10 * step + hvd.rank(), 8, 40)).square().mean()
            if step == 2 and hvd.rank() == 1:
                loss = loss * float("inf")
            optimizer.scale(loss).backward()
            optimizer.step()
        assert optimizer._ringlet_masters.skipped == 1
        return [p.detach() for p in model.parameters()] + [torch.tensor(optimizer.residual_norm())]

    same(on_both(body))


def test_what_was_made_at_work_comes_to_torch_in_order(on_both, monkeypatch):
    as_tensor = torch.as_tensor

    def seen(array, device):
        if not isinstance(array, DeviceArray):
            return as_tensor(array, device=device)
        array.memory.touch(write=False)  # on the stream that is current
        return as_tensor(array.raw, device=device)

    monkeypatch.setattr(torch, "as_tensor", seen)

    def body():
        engine = session.current().engine
        hvd.allreduce(drawn(hvd.rank(), 4))
        with engine.at_work():
            place = engine.place("cuda" if on_both.direct() else "host")
            owed = place.xp.ones(4, "float32") * np.float32(hvd.rank() + 2)
        made = placement.from_engine(owed, torch.device("cpu"))
        if on_both.direct():
            owed.memory.touch(write=True)  # by torch's stream, which has to be behind the copy
        return [made]

    same(on_both(body))


def test_memory_comes_from_torch_on_the_stream_that_uses_it(monkeypatch):
    taken, given = [], []
    cuda = SimpleNamespace(
        PythonFunctionAllocator=lambda take, give: SimpleNamespace(
            malloc=lambda nbytes: (take(nbytes, 3), lambda pointer: give(pointer, 3))
        ),
        get_current_stream=lambda: SimpleNamespace(ptr=77),
    )
    allocate = placement.TorchOnGpu(SimpleNamespace(cuda=cuda)).allocator()
    monkeypatch.setattr(
        torch.cuda, "caching_allocator_alloc", lambda *asked: taken.append(asked) or 4096
    )
    monkeypatch.setattr(torch.cuda, "caching_allocator_delete", given.append)
    pointer, give_back = allocate(100)
    give_back(pointer)
    placement._give_back(8192, 3, ending=lambda: True)
    assert (taken, given) == ([(100, 3, 77)], [4096])

    def full(*_):
        raise torch.cuda.OutOfMemoryError("no memory")

    monkeypatch.setattr(torch.cuda, "caching_allocator_alloc", full)
    with pytest.raises(MemoryError, match="no memory"):
        allocate(100)


def sharded(*sizes):
    """Return what FSDP2 tells of a module whose parameters' shards have these sizes."""
    params = [
        SimpleNamespace(
            padded_sharded_param_size=torch.Size([n]),
            sharded_param=SimpleNamespace(requires_grad=True),
            _module_info=SimpleNamespace(module=None, param_name=f"p{i}"),
        )
        for i, n in enumerate(sizes)
    ]
    state = SimpleNamespace(_fsdp_param_groups=[SimpleNamespace(fsdp_params=params)])
    return SimpleNamespace(_get_fsdp_state=lambda: state)


def in_backward(call):
    """Do ``call`` where FSDP2 does, in a backward pass."""
    result = torch.zeros((), requires_grad=True) * 1
    result.register_hook(lambda _: call())
    result.backward()


def carried_by_fsdps_group(on_both, monkeypatch):
    """Let FSDP's own group be a NCCL communicator's stand-in, where tensors lie on a GPU."""
    worlds = {}

    def place():
        return session.current().engine.place("cuda")

    def connections(group, own):
        assert not own
        host, moving = worlds.setdefault(group, (LocalWorld(2), LocalWorld(2)))
        host, moving = host.communicators[hvd.rank()], moving.communicators[hvd.rank()]
        if not on_both.direct():
            return host
        return TorchNcclCommunicator(host, Group(moving, lambda: True), 0)

    def tensor(_, array, number):
        array.memory.touch(write=True)
        return torch.from_numpy(array.raw.view("uint8"))

    monkeypatch.setattr(torch_nccl, "_tensor", tensor)
    monkeypatch.setattr(torch_nccl, "_on_current_stream", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(fsdp_transport, "connect_group", connections)
    places = lambda comm: [place()] if on_both.direct() else []  # noqa: E731
    monkeypatch.setattr(fsdp_transport, "agreed_places", places)
    monkeypatch.setattr(torch.distributed, "get_rank", hvd.rank)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda _=None: hvd.size())


def test_reduce_scatters_of_fsdp2(on_both, monkeypatch):
    """FSDP's own group carries the payloads, in order with the stream that FSDP calls on."""
    sizes = (1500, 40, 700)
    carried_by_fsdps_group(on_both, monkeypatch)

    def body():
        outs, way, whole = [], on_both.direct(), torch.nn.Module()
        for spec in ("int8 | ef", "fp16", "block_topk | ef"):
            transports = GroupTransports(spec, whole, ())

            def made(spec=spec, transports=transports):
                scatter = CompressedReduceScatter(
                    FsdpRoutes(Router(spec), whole), "m", sharded(*sizes), transports
                )
                return scatter, FsdpState([scatter], transports)

            def steps(scatter, numbers, dtype=torch.float32, key=f"{way} {spec}"):
                for step in numbers:
                    values = drawn(10 * step + hvd.rank(), 2 * sum(sizes)).to(dtype)
                    out = torch.empty(sum(sizes), dtype=dtype)
                    given = out, values, key, torch.distributed.ReduceOp.AVG
                    in_backward(lambda given=given: scatter(*given))
                    outs.append(out)

            scatter, state = made()
            steps(scatter, range(2))
            saved = copy.deepcopy(state.state_dict())
            steps(scatter, range(2, 4))
            again, other = made()
            other.load_state_dict(saved)
            steps(again, range(2, 4))
            assert torch.equal(outs[-1], outs[-3]), spec
            assert state.residual_norm() == other.residual_norm()
            steps(again, range(4, 5), torch.bfloat16)
        keeps_nothing(on_both)
        return outs

    same(on_both(body))


def keeps_nothing(on_both):
    """Whole modules, which FSDP frees in the order of its stream, are not kept until it is done."""
    if on_both.direct():
        held = session.current().engine.place("cuda")._held
        assert held
        assert not any(mark._arrays for mark in held)
    hvd.barrier()  # where a rank leaves, nothing is held any more


def gathered(gather, out, own, group, inp_split_sizes):
    """Call ``gather`` in a frame with the name under which FSDP2 has the sizes of shards."""
    gather(out, own, group)


def test_all_gathers_of_fsdp2(on_both, monkeypatch):
    """The input is a part of the output, which is overwritten only when it was encoded."""
    shards = [1500, 40, 700]
    n = sum(shards)
    carried_by_fsdps_group(on_both, monkeypatch)

    def body():
        outs, way, whole = [], on_both.direct(), torch.nn.Module()
        for spec in ("int8", "fp8", "bf16", "int4 | hadamard"):
            transports = GroupTransports(spec, whole, (), gathers=True)
            module = sharded(*shards)
            gather = CompressedAllGather(FsdpRoutes(Router(spec), whole), "m", module, transports)
            for step, dtype in enumerate((torch.float32, torch.float32, torch.bfloat16)):
                if spec == "bf16" and dtype == torch.bfloat16:
                    continue  # as many bytes: torch gathers them
                out = torch.full((2 * n,), 7.0, dtype=dtype)
                own = out[hvd.rank() * n : (hvd.rank() + 1) * n]
                own.copy_(drawn(10 * step + hvd.rank(), n))
                exact = own.clone()
                gathered(gather, out, own, f"{way} {spec}", shards)
                if spec != "bf16":  # small ones travel as they are
                    assert torch.equal(own[1500:], exact[1500:])
                assert (own - exact).norm() < 0.2 * exact.norm()
                outs.append(out)
        keeps_nothing(on_both)
        return outs

    same(on_both(body))


@pytest.mark.parametrize("staged", [False, True])
def test_rank_0_may_have_all_staged(staged, monkeypatch):
    monkeypatch.setattr(session, "places_of", lambda comm: ["a GPU"])
    wishes = lambda env: {"staged"} if staged and this_thread().rank == 0 else set()  # noqa: E731
    monkeypatch.setattr(session, "wishes_from", wishes)
    assert run_local(session.agreed_places, 2) == [[] if staged else ["a GPU"]] * 2


class Bucket:
    """What DDP hands to a hook."""

    def __init__(self, seed, parameters):
        self._flat = drawn(seed, 3000)
        self._parts = [self._flat[:2000].view(40, 50), self._flat[2000:]]
        self._parameters = parameters

    def buffer(self):
        return self._flat

    def gradients(self):
        return self._parts

    def parameters(self):
        return self._parameters

    def index(self):
        return 0


def waited(future):
    """Return a future's value behind its work, for which torch's event on a GPU would wait."""
    result = future.wait().clone()
    place = session.current().engine.place("cuda")
    place.done(()).collect()
    return result


def test_buckets_of_ddp(on_both):
    def body():
        state, rank = DdpState("int8 | ef", None, session.current()), hvd.rank()
        parameters = [torch.zeros(40, 50), torch.zeros(1000)]
        outs = [
            waited(reduce_bucket(state, Bucket(2 * step + rank, parameters))) for step in range(2)
        ]
        state.load_state_dict(state.state_dict())
        outs.append(waited(reduce_bucket(state, Bucket(rank, parameters))))
        return [*outs, torch.tensor(state.residual_norm())]

    same(on_both(body))
