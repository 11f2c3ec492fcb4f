"""Compression inside DistributedDataParallel and FSDP2, beside torch's own reductions."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import sys
import tempfile
import threading
import time
import warnings
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from failing_compressors import Failing, Moody
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch_group import started

sys.path.insert(0, str(Path(__file__).parents[1]))

from standin.memory import device

import ringlet.torch as hvd
from ringlet.compressors import Compressor, Context, Part, Traits, parse
from ringlet.fusion import CompressionFailed
from ringlet.job import link_settings, session
from ringlet.ring.communicator import Communicator
from ringlet.ring.errors import Mismatch
from ringlet.ring.transports import torch_nccl
from ringlet.ring.transports import torch_subgroups as ring_connections
from ringlet.ring.transports.torch_subgroups import connections
from ringlet.torch.parallel import hsdp

pytestmark = pytest.mark.preloaded("torch")


def model(seed=0):
    torch.manual_seed(seed)
    layers = torch.nn.Linear(64, 128), torch.nn.Tanh(), torch.nn.Linear(128, 64)
    return torch.nn.Sequential(*layers)


def batches(count):
    numbers = torch.Generator().manual_seed(10 + hvd.rank())
    return [torch.randn(8, 64, generator=numbers) for _ in range(count)]


def train(wrapped, steps=5, accumulate=False):
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.5)
    for i, x in enumerate(batches(steps)):
        optimizer.zero_grad()
        if accumulate and i % 2:
            with wrapped.no_sync():
                wrapped(x * 0.5).square().mean().backward()
        wrapped(x).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in wrapped.parameters()])


def hooked(spec, **options):
    own = model()
    wrapped = DistributedDataParallel(own, bucket_cap_mb=0.02)
    state, hook = hvd.ddp_hook(spec, **options)
    wrapped.register_comm_hook(state, hook)
    return own, wrapped, state


def case_ddp_uncompressed_is_ddp():
    started()
    plain = train(DistributedDataParallel(model()), accumulate=True)
    ours = train(hooked("none")[1], accumulate=True)
    assert torch.allclose(plain, ours, atol=1e-6)


def case_ddp_compressed_stays_near_and_bit_equal():
    started()
    plain = train(DistributedDataParallel(model()))
    moved = plain - torch.cat([p.detach().flatten() for p in model().parameters()])
    for spec, allowed in (
        ("fp16", 0.01), ("int8 | ef", 0.05), ("powersgd(rank=4) | ef", 0.9),
        ("topk(ratio=0.1) | ef", 0.9),
    ):  # fmt: skip
        own, wrapped, state = hooked(spec)
        ours = train(wrapped)
        assert (ours - plain).norm() <= allowed * moved.norm(), spec
        assert hvd.replicas_equal(own.state_dict())
        assert (state.residual_norm() > 0) == ("ef" in spec)


def case_ddp_precision():
    """A policy gives a hook its wire and what sums accumulate in, as it does an optimizer."""
    started()
    plain = train(DistributedDataParallel(model()))
    strategies = []
    for options in ({"precision": "amp_bf16"}, {"precision": "amp_bf16(reduction='wire')"}):
        own, wrapped, state = hooked(None, **options)
        assert torch.allclose(train(wrapped), plain, atol=1e-2)
        assert hvd.replicas_equal(own.state_dict())
        requests = [request for request, _ in state._requests.values()]
        assert {request.spec for request in requests} == {"bf16"}
        strategies.append({request.collective for request in requests})
    assert strategies == [{"scatter_reduce"}, {"auto"}]
    for precision, words in (("bf16", "has float32 masters"), ("amp_fp16", "has a loss scale")):
        with pytest.raises(ValueError, match=words):
            hvd.ddp_hook("none", precision=precision)


def case_ddp_names_and_routes():
    started()
    own = model()
    wrapped = DistributedDataParallel(own)
    routes = {"*.bias": "none", "*": "int8 | ef"}
    state, hook = hvd.ddp_hook(routes, named_parameters=own.named_parameters())
    wrapped.register_comm_hook(state, hook)
    train(wrapped)
    assert set(state._states()) == {"0.weight", "2.weight"}


def case_ddp_continues_from_a_checkpoint_bit_for_bit():
    started()
    own, wrapped, state = hooked("topk(ratio=0.05) | ef")
    train(wrapped, 3)
    saved = {k: v.clone() for k, v in own.state_dict().items()}, state.state_dict()
    straight = train(wrapped, 3)
    again, wrapped, state = hooked("topk(ratio=0.05) | ef")
    train(wrapped, 1)  # DDP has rebuilt its buckets, and parameters have their names
    again.load_state_dict(saved[0])
    state.load_state_dict(saved[1])
    assert torch.equal(train(wrapped, 3), straight)


def case_ddp_forgets_what_one_rank_alone_has_loaded_of_what_is_common():
    started()

    def named(spec):
        own = model()
        wrapped = DistributedDataParallel(own, bucket_cap_mb=0.02)
        state, hook = hvd.ddp_hook(spec, own.named_parameters())
        wrapped.register_comm_hook(state, hook)
        return own, wrapped, state

    for spec in ("int8 | ef", "acpsgd(rank=2) | ef", "int8 | ef21"):
        common = spec == "int8 | ef21"  # of which no rank can take another's part
        _, wrapped, state = named(spec)
        train(wrapped, 3)
        files = hvd.allgather_object(state.state_dict())
        for file, lost in ((files[0], common), (files[hvd.rank()], False)):
            own, wrapped, state = named(spec)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                state.load_state_dict(file)
                train(wrapped, 3)
            told = [str(each.message) for each in caught if "in common" in str(each.message)]
            assert len(told) == (lost and hvd.rank() == 0), (spec, told)
            assert all("'0.weight'" in text for text in told), told
            assert hvd.replicas_equal(own.state_dict()), (spec, lost)


def case_ddp_tells_all_ranks_what_one_of_them_cannot_compress():
    """Nobody votes on these: who cannot compress takes part all the same, and is named by all."""
    started()
    for spec in ("int8 | ef", "topk(ratio=0.1) | ef"):
        own, wrapped, state = hooked(spec)
        train(wrapped, 3)
        kept = {name: dict(memory) for name, memory in state._states().items()}
        if hvd.rank() == 1:
            next(iter(state._states().values()))["residual"] = np.ones(3, np.float32)
        texts = []
        for _ in range(2):
            wrapped.zero_grad()
            with pytest.raises(CompressionFailed) as told:
                wrapped(batches(1)[0]).square().mean().backward()
            texts += hvd.allgather_object(str(told.value))
        assert len(set(texts)) == 1, texts
        assert texts[0].startswith("rank 1: ")
        for name, memory in state._states().items():
            memory.clear()
            memory.update(kept[name])
        train(wrapped, 3)
        assert hvd.replicas_equal(own.state_dict())


def case_ddp_uneven_inputs():
    started()
    own, wrapped, _ = hooked("int8 | ef")
    with wrapped.join():
        for x in batches(2 + hvd.rank()):
            wrapped(x).square().mean().backward()
            with torch.no_grad():
                for p in own.parameters():
                    p -= 0.1 * p.grad
                    p.grad = None
    hvd.barrier()


def case_fsdp2():
    started()
    ways = {"none": 1e-5, "fp16": 0.01, "int8": 0.05, "int8 | ef": 0.05, "int4 | ef": 0.5}
    ways |= {"int4 | warmup(dense=100)": 1e-5, "topk(ratio=0.5) | ef | warmup(steps=4)": 1.0}
    reference = None
    for spec, allowed in ways.items():
        own = model()
        before = torch.cat([p.detach().flatten() for p in own.parameters()])
        fully_shard(own[0])
        fully_shard(own)
        made = hvd.compress_fsdp(own, spec)
        assert len(made) == (0 if spec == "none" else 2)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
        for x in batches(5):
            optimizer.zero_grad()
            own(x).square().mean().backward()
            optimizer.step()
        whole = torch.cat([p.full_tensor().detach().flatten() for p in own.parameters()])
        if reference is None:
            reference = whole
        assert (whole - reference).norm() <= allowed * (whole - before).norm(), spec
        gathered = hvd.allgather(whole[None])
        assert all(torch.equal(row, gathered[0]) for row in gathered)


def case_fsdp2_draws_random_numbers_by_the_seed_of_the_first_rank():
    started()

    def outcome(seed, **options):
        own = sharded()
        hvd.compress_fsdp(own, **options)
        with mock.patch.dict(os.environ, {"RINGLET_SEED": str(seed)}):
            out = own(torch.ones(1, 64))
            out.square().mean().backward()
        return [out.detach(), *(p.grad.full_tensor() for p in own.parameters())]

    for options in ({"compression": "qsgd(bits=4)"}, {"gather": "qsgd(bits=8)"}):
        first, other = outcome(5, **options), outcome(6, **options)
        assert not all(map(torch.equal, first, other)), options
        assert all(map(torch.equal, first, outcome(5 + hvd.rank(), **options))), options


def case_hsdp():
    started()
    shape = (2, hvd.size() // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    ways = {"torch": 0.0, "none": 1e-5, "int8 | ef": 0.05, "topk(ratio=0.3) | ef": 0.7}
    reference = None
    for spec, allowed in ways.items():
        own = model()
        before = torch.cat([p.detach().flatten() for p in own.parameters()])
        for part in (own[0], own):
            fully_shard(part, mesh=mesh if spec == "torch" else mesh["shard"])
        if spec != "torch":
            made = hvd.compress_hsdp(own, spec, mesh["replicate"].get_group())
            assert len(made) == 2
            assert [made[0], made[1]] == list(made)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
        for x in batches(5):
            optimizer.zero_grad()
            own(x).square().mean().backward()
            optimizer.step()
        whole = torch.cat([p.full_tensor().detach().flatten() for p in own.parameters()])
        reference = whole if reference is None else reference
        assert (whole - reference).norm() <= allowed * (whole - before).norm(), spec
        gathered = hvd.allgather(whole[None])
        assert all(torch.equal(row, gathered[0]) for row in gathered)
        if spec == "torch":
            with pytest.raises(ValueError, match="averages over the replicas itself"):
                hvd.compress_hsdp(own, "int8", mesh["replicate"].get_group())
    with pytest.raises(TypeError, match=r"replicas is what .*new_group"):
        hvd.compress_hsdp(sharded(mesh["shard"]), "int8", [0, 1])
    with pytest.raises(ValueError, match="fully_shard"):
        hvd.compress_hsdp(model(), "int8", mesh["replicate"].get_group())


def case_hsdp_compresses_each_parameter_by_itself():
    """In its own shape: top-k takes some of each, and low-rank factors are of matrices."""
    started()
    mesh = two_levels()

    def gradients(spec):
        torch.manual_seed(0)
        own = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Linear(64, 64))
        fully_shard(own, mesh=mesh["shard"])
        if spec is not None:
            made = hvd.compress_hsdp(own, spec, mesh["replicate"].get_group())
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(hvd.rank()))
        (own(x).square().mean() + 1000 * own[1].bias.square().mean()).backward()
        found = {name: p.grad.to_local().clone() for name, p in own.named_parameters()}
        return found if spec is None else (found, made.state_dict()["states"])

    found, held = gradients("topk(ratio=0.25) | ef | min_size(elements=1)")
    assert len(held) == 4
    for gradient in found.values():
        assert gradient.count_nonzero() >= gradient.numel() // 4
    plain, (approximate, held) = gradients("none")[0], gradients("powersgd(rank=2) | ef")
    assert [state["residual"].any() for state in held.values()] == [True] * len(held)
    weight = "1.weight"
    assert (approximate[weight] - plain[weight]).norm() > 0
    assert torch.linalg.matrix_rank(approximate[weight]) <= 2


def case_hsdp_continues_from_a_checkpoint_bit_for_bit():
    started()
    shape = (2, hvd.size() // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))

    def sharded():
        own = model()
        for part in (own[0], own):
            fully_shard(part, mesh=mesh["shard"])
        made = hvd.compress_hsdp(
            own, "randomk(ratio=0.3) | scaled | ef", mesh["replicate"].get_group()
        )
        return own, made

    def after(own, given):
        optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
        for x in given:
            optimizer.zero_grad()
            own(x).square().mean().backward()
            optimizer.step()
        return [p.to_local().detach().clone() for p in own.parameters()]

    own, made = sharded()
    kept = after(own, batches(6)[:3]), made.state_dict()
    assert made.residual_norm() > 0
    straight = after(own, batches(6)[3:])
    again, resumed = sharded()
    with torch.no_grad():
        for p, value in zip(again.parameters(), kept[0], strict=True):
            p.to_local().copy_(value)
    resumed.load_state_dict(kept[1])
    assert all(map(torch.equal, after(again, batches(6)[3:]), straight))
    with pytest.warns(UserWarning, match="this is rank"):
        resumed.load_state_dict(kept[1] | {"rank": kept[1]["rank"] + 1})
    assert resumed.residual_norm() == 0


def claim_gpus(patch, lacking=()):
    """Let groups claim to move GPUs' memory with NCCL, for which gloo stands in.

    ``lacking`` are the ranks without CuPy.
    """
    gloo = dist.ProcessGroupGloo

    def meet(store, rank, size, options):
        options = gloo._Options()
        options._devices = [gloo.create_default_device()]
        return gloo(store, rank, size, options)

    meet.Options = lambda: None
    patch.setattr(dist, "ProcessGroupNCCL", meet, raising=False)
    patch.setattr(torch.cuda, "current_device", lambda: 0)
    patch.setattr(ring_connections, "_moves_gpus", lambda *_: True)
    patch.setattr(
        ring_connections, "find_spec", lambda _: None if hvd.rank() in lacking else "here"
    )
    patch.setattr(torch_nccl, "_on_current_stream", lambda *_: contextlib.nullcontext())
    patch.setattr(torch_nccl, "_tensor", lambda _, a, __: torch.from_numpy(a.view("uint8")))


def case_connections_of_our_own_in_a_group():
    started()
    with pytest.MonkeyPatch.context() as patch:
        claim_gpus(patch, [1])
        assert connections().name == "gloo"  # for one rank has no CuPy
        claim_gpus(patch)
        comm = connections()
        assert comm.name == "torch-nccl"
        a = device([hvd.rank(), 1.0])
        comm.allreduce(a)
        assert a.tolist() == [sum(range(hvd.size())), hvd.size()]
        whole = device([0] * 2 * hvd.size())
        comm.allgather(a, whole)
        assert whole.tolist() == a.tolist() * hvd.size()
        host = np.ones(2, np.float32)
        comm.allreduce(host)
        assert host.tolist() == [hvd.size()] * 2
        comm.close()
    hvd.shutdown()
    hvd.init(dist.group.WORLD)
    assert session.current().transport == "gloo"
    assert hvd.allreduce(torch.ones(3), op=hvd.Sum).tolist() == [hvd.size()] * 3
    hvd.shutdown()
    hvd.init()


class Uneven(torch.nn.Module):
    """Two layers whose gradients differ by a factor of a million, and a small one."""

    def __init__(self):
        super().__init__()
        self.a = torch.nn.Linear(32, 512, bias=False)
        self.b = torch.nn.Linear(32, 512, bias=False)
        self.c = torch.nn.Linear(32, 6)
        self.unused = torch.nn.Parameter(torch.ones(4096))

    def forward(self, x, all_of_it=True):
        small = 1e-6 * self.b(x).sum() + self.c(x).sum()
        return self.a(x).sum() + small + (self.unused.sum() if all_of_it else 0.0)


def case_fsdp2_compresses_each_parameters_shard():
    started()

    def grads(spec, all_of_it=True):
        torch.manual_seed(1)
        own = Uneven()
        fully_shard(own)
        made = hvd.compress_fsdp(own, spec)
        torch.manual_seed(hvd.rank())
        own(torch.randn(8, 32), all_of_it).backward()
        found = {n: p.grad.full_tensor() for n, p in own.named_parameters() if p.grad is not None}
        return found, made, own

    exact, _, _ = grads("none")
    coded, made, own = grads("int8(bucket=65536) | ef")
    for name, expected in exact.items():  # in one bucket with a, b's gradients would be zeros
        assert (coded[name] - expected).norm() <= 0.02 * expected.norm(), name
    torch.testing.assert_close(
        coded["c.weight"], exact["c.weight"]
    )  # small ones travel as they are

    saved = made.state_dict()
    assert made.residual_norm() > 0
    step = {n: p.grad.full_tensor() for n, p in second(own).items()}
    _, again, other = grads("int8(bucket=65536) | ef")
    again.load_state_dict(saved)
    assert all(torch.equal(p.grad.full_tensor(), step[n]) for n, p in second(other).items())
    with pytest.warns(UserWarning, match="this is rank"):
        again.load_state_dict(saved | {"rank": saved["rank"] + 1})
    assert again.residual_norm() == 0

    partly, _, _ = grads("int8(bucket=64)", all_of_it=False)
    assert "unused" not in partly
    assert (partly["a.weight"] - exact["a.weight"]).norm() <= 0.02 * exact["a.weight"].norm()


def second(own):
    own.zero_grad()
    torch.manual_seed(100 + hvd.rank())
    own(torch.randn(8, 32)).backward()
    return dict(own.named_parameters())


class Experts(torch.nn.Module):
    """Two layers of one size, of which a step uses one."""

    def __init__(self):
        super().__init__()
        self.experts = torch.nn.ModuleList(torch.nn.Linear(64, 64, bias=False) for _ in range(2))

    def forward(self, x, which):
        return self.experts[which](x)


def keep_residuals_apart(own, made):
    """Fail if a layer gets what was held back for the other, or not what was for it."""
    norms = []
    for which, scale in ((0, 1.0), (1, 0.0), (0, 0.0)):
        own.zero_grad()
        own(torch.ones(4, 64), which).square().sum().mul(scale).backward()
        assert own.experts[1 - which].weight.grad is None
        norms.append(own.experts[which].weight.grad.full_tensor().norm().item())
        if scale:
            kept = made.state_dict()
            assert made.residual_norm() > 0
            made.load_state_dict(kept)
    assert norms[0] > 0
    assert norms[1] == 0
    assert norms[2] > 0


def case_residuals_of_layers_that_take_turns_stay_apart():
    started()
    torch.manual_seed(0)
    own = Experts()
    fully_shard(own)
    keep_residuals_apart(own, hvd.compress_fsdp(own, "topk(ratio=0.05) | ef"))


def case_residuals_of_replicas_layers_that_take_turns_stay_apart():
    started()
    torch.manual_seed(0)
    shape = (2, hvd.size() // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))
    own = Experts()
    fully_shard(own, mesh=mesh["shard"])
    group = mesh["replicate"].get_group()
    keep_residuals_apart(own, hvd.compress_hsdp(own, "topk(ratio=0.05) | ef", group))


def case_fsdp2_bad_input():
    started()
    with pytest.raises(TypeError, match="first argument of compress_fsdp is the model"):
        hvd.compress_fsdp("int8", model())
    with pytest.raises(ValueError, match="fully_shard"):
        hvd.compress_fsdp(model(), "int8")
    own = model()
    fully_shard(own)
    for spec in ("threshold", "powersgd"):
        with pytest.raises(ValueError, match="cannot compress a reduce-scatter"):
            hvd.compress_fsdp(own, spec)
    for spec in ("int8 | ef21", "topk(ratio=0.1) | ef21 | warmup(dense=5)", "signsgd"):
        with pytest.raises(ValueError, match="has to see the result"):
            hvd.compress_fsdp(own, spec)


def case_fsdp2_divides_by_what_it_is_told():
    started()
    found = []
    for divisor in (float(hvd.size()), 8.0 * hvd.size()):
        own = sharded()
        for part in (own[0], own):
            part.set_gradient_divide_factor(divisor)
        hvd.compress_fsdp(own, "fp16")
        own(batches(1)[0]).square().mean().backward()
        found.append([p.grad.to_local() for p in own.parameters()])
    for one, eighth in zip(*found, strict=True):
        assert torch.equal(one, 8 * eighth)
        assert one.any()


def case_what_is_sharded_afterwards_is_not_left_uncompressed():
    started()
    mesh, whole = two_levels(), "was sharded by fully_shard afterwards"
    for shard, compress in (
        (None, lambda own: hvd.compress_fsdp(own, "int8 | ef")),
        (mesh["shard"], lambda o: hvd.compress_hsdp(o, "int8 | ef", mesh["replicate"].get_group())),
    ):
        own = model()
        fully_shard(own[2], mesh=shard)
        compress(own)
        fully_shard(own, mesh=shard)
        with pytest.raises(ValueError, match=whole):
            own(batches(1)[0]).square().mean().backward()
        compress(own)
        own.zero_grad()
        own(batches(1)[0]).square().mean().backward()


def case_fsdp2_refuses_what_is_replicated_and_not_sharded():
    """Nothing would be compressed, without a word."""
    started()
    mesh = init_device_mesh("cpu", (hvd.size(), 1), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ValueError, match=r"no reduce-scatter to compress.*hvd\.ddp_hook"):
        hvd.compress_fsdp(sharded(mesh), "int8")
    with pytest.raises(ValueError, match="averages over the replicas itself"):
        hvd.compress_hsdp(sharded(mesh), "int8", mesh["replicate"].get_group())


def case_hsdp_refuses_tensor_parallelism():
    """Ranks with other parts of a weight would choose other values of a bias they share."""
    started()
    shape = (2, 1, hvd.size() // 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard", "tensor"))
    own = parallelize_module(model(), mesh["tensor"], {"2": RowwiseParallel()})
    fully_shard(own, mesh=mesh["shard"])
    with pytest.raises(ValueError, match=r"tensor parallel.*hvd\.compress_fsdp"):
        hvd.compress_hsdp(own, "topk | ef", mesh["replicate"].get_group())


def case_hsdp_refuses_ranks_that_hold_other_shards():
    """Gradients of different parameters would be averaged, without a word."""
    started()
    own, two = sharded(), two_levels()
    halves = sharded(two["shard"])
    for each, group in ((own, None), (own, dist.group.WORLD), (halves, two["shard"].get_group())):
        if dist.get_world_size(group) == 1:
            continue
        with pytest.raises(ValueError, match=r"shard 0 of.*shard 1 of.*mesh\['replicate'\]"):
            hvd.compress_hsdp(each, "int8", group)
    hvd.compress_hsdp(halves, "int8", two["replicate"].get_group())


def case_hsdp_goes_by_the_settings_of_the_first_rank():
    """With shared random numbers of another seed replicas would part, without a word."""
    started()
    mesh = two_levels()
    own, odd = sharded(mesh["shard"]), hvd.rank() >= hvd.size() // 2
    settings = {
        "RINGLET_ADDRESS": "127.0.0.1",
        "RINGLET_SEED": str(5 + odd),
        "RINGLET_CACHE_CAPACITY": str(10 + odd),
        "RINGLET_LINK": "1ms,1Gbit/s" if odd else "measure",
        "RINGLET_HIERARCHICAL_ALLREDUCE": str(int(not odd)),
    }
    with (
        mock.patch.dict(os.environ, settings),
        mock.patch.object(session.socket, "gethostname", return_value=f"host{int(odd)}"),
        mock.patch.object(link_settings, "_SECONDS", (0.02,)),
        mock.patch.object(session, "hierarchical", wraps=session.hierarchical) as levels,
    ):
        spec = "randomk(ratio=0.3) | min_size(elements=1)"
        made = hvd.compress_hsdp(own, spec, mesh["replicate"].get_group())
    own(batches(1)[0]).square().mean().backward()
    for p in own.parameters():
        gathered = hvd.allgather(p.grad.full_tensor()[None])
        assert all(torch.equal(row, gathered[0]) for row in gathered)
    limits = made._engine.limits
    assert (limits.seed, limits.cache_capacity) == (5, 10)
    assert limits.bandwidth not in (0, 1.25e8)  # measured
    assert levels.call_count == 1


def engines(known=()):
    """Return the threads of engines that run, but for those that are ``known``."""
    running = {each for each in threading.enumerate() if each.name.startswith("ringlet-engine")}
    return running.difference(known)


def case_hsdp_that_is_called_again_takes_the_place_of_what_was_there():
    started()
    mesh = two_levels()
    own, group, known = sharded(mesh["shard"]), mesh["replicate"].get_group(), engines()

    def step():
        own.zero_grad()
        own(batches(1)[0]).square().mean().backward()
        return torch.cat([p.grad.full_tensor().flatten() for p in own.parameters()])

    before = hvd.compress_hsdp(own, "topk(ratio=0.3) | ef", group)
    step()
    made = hvd.compress_hsdp(own, "topk(ratio=0.3) | ef", group)
    assert len(engines(known)) == 1
    step()
    for use in (
        before.state_dict,
        lambda: before.load_state_dict(made.state_dict()),
        before.residual_norm,
        lambda: len(before),
        lambda: list(before),
        lambda: before[0],
    ):
        with pytest.raises(ValueError, match="compress_hsdp has been called again for this model"):
            use()
    assert made.residual_norm() > 0
    part = hvd.compress_hsdp(own[0], "fp16", group)
    assert (len(made), len(part)) == (1, 1)
    assert len(engines(known)) == 2  # each averages what the other does not
    step()
    assert {name.partition("[")[0] for name in made.state_dict()["states"]} == {"root"}
    again = hvd.compress_hsdp(own, "none", group)
    assert (len(again), len(engines(known))) == (2, 1)
    hvd.compress_hsdp(own, "fp16", group)
    assert len(engines(known)) == 1
    gathered = hvd.allgather(step()[None])
    assert all(torch.equal(row, gathered[0]) for row in gathered)


def case_hsdp_refuses_another_version_of_a_plugin():
    """Its spec is the same."""
    started()
    mesh = two_levels()
    own, odd = sharded(mesh["shard"]), hvd.rank() >= hvd.size() // 2

    class Plain(Compressor):
        def traits(self):
            return Traits(fixed_size=True)

        def layout(self, n):
            return (Part("values", "float32", n),)

        def compress(self, x, ctx):
            return {"values": x.copy()}

        def decompress(self, payload, out, ctx):
            out[...] = payload["values"]

    with mock.patch.object(hsdp, "edition", return_value=f"plain of source {int(odd)}"):
        hvd.compress_hsdp(own, Plain(), mesh["replicate"].get_group())
        with pytest.raises(Mismatch, match=r"versions of the plugin differ.* source 0.* source 1"):
            own(batches(1)[0]).sum().backward()


def case_fsdp2_another_spec_on_one_rank():
    """Payloads of both have the same length, and one can be taken for the other."""
    started()
    own = model()
    fully_shard(own)
    odd = hvd.rank() == hvd.size() - 1
    hvd.compress_fsdp(own, "int4" if odd else "qsgd(bits=4)")
    with pytest.raises(Mismatch) as told:
        own(batches(1)[0]).square().mean().backward()
    assert "rank 0: qsgd(bits=4)" in str(told.value)
    assert f"rank {hvd.size() - 1}: int4" in str(told.value)
    assert len(set(hvd.allgather_object(str(told.value)))) == 1


def two_levels():
    """Return a mesh of two replicas."""
    shape = (2, hvd.size() // 2)
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard"))


def sharded(mesh=None):
    own = model()
    for part in (own[0], own):
        fully_shard(part, mesh=mesh)
    return own


def check_failures_reach_all_ranks(own, where):
    """Fail now here and now there. Each step works or fails on all ranks, and leaves them equal."""
    optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
    last = dist.get_world_size() - 1
    for method in where:
        for bad in ((method, last), ("", -1), (method, 0), ("", -1)):
            Moody.bad = bad
            optimizer.zero_grad()
            told = None
            try:
                own(batches(1)[0]).square().mean().backward()
                optimizer.step()
            except CompressionFailed as error:
                told = str(error)
            assert hvd.allgather_object(told) == [told] * hvd.size()
            if bad[0]:
                assert f"rank {bad[1]}: " in told, told
                assert f"moody in {method}" in told
                assert re.search(r"\(failing_compressors.py, line \d+: ", told), told
            else:
                assert told is None
            whole = torch.cat([p.full_tensor().detach().flatten() for p in own.parameters()])
            assert all(torch.equal(row, whole) for row in hvd.allgather(whole[None]))
    Moody.bad = ("", -1)


def case_fsdp2_tells_all_ranks_what_a_compressor_raises_on_one():
    started()
    own = sharded()
    hvd.compress_fsdp(own, Moody())
    before = torch.cat([p.full_tensor().detach().flatten() for p in own.parameters()])
    check_failures_reach_all_ranks(own, ("compress", "decompress", "at"))
    after = torch.cat([p.full_tensor().detach().flatten() for p in own.parameters()])
    reference = sharded()
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.5)
    for _ in range(6):  # of twelve, of which the others failed
        optimizer.zero_grad()
        reference(batches(1)[0]).square().mean().backward()
        optimizer.step()
    wanted = torch.cat([p.full_tensor().detach().flatten() for p in reference.parameters()])
    assert (after - wanted).norm() < 1e-5 * (before - wanted).norm()


def case_fsdp2_tells_all_ranks_what_a_plan_raises_on_one():
    started()
    own = sharded()
    hvd.compress_fsdp(own, Moody())
    Moody.bad = ("layout", 0)
    told = ""
    for each in (own, own):
        with pytest.raises(CompressionFailed, match=r"rank 0: .*moody in layout") as failed:
            each(batches(1)[0]).square().mean().backward()
        told += str(failed.value)
    assert len(set(hvd.allgather_object(told))) == 1
    check_failures_reach_all_ranks(own, ("compress",))


def case_fsdp2_tells_replicas_what_a_compressor_raises_in_one_of_them():
    if hvd.size() < 4:
        return
    started()
    own = sharded(two_levels())
    hvd.compress_fsdp(own, Moody())
    check_failures_reach_all_ranks(own, ("compress", "decompress", "at"))


def case_hsdp_tells_all_shards_what_a_compressor_raises_in_one_of_them():
    started()
    mesh = two_levels()
    own = sharded(mesh["shard"])
    hvd.compress_hsdp(own, Moody(), mesh["replicate"].get_group())
    check_failures_reach_all_ranks(own, ("compress", "decompress", "at"))


class Halving(Failing):
    """Sends values in 16 bits; raises on one rank."""

    def layout(self, n):
        self.come("layout")
        return (Part("values", "float16", n),)

    def compress(self, x, ctx):
        self.come("compress")
        return {"values": x.astype(np.float16)}

    def decompress(self, payload, out, ctx):
        self.come("decompress")
        out[:] = payload["values"]


class Told(logging.Handler):
    """Keeps what Ringlet logs."""

    def __init__(self):
        super().__init__()
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())

    def __enter__(self):
        logging.getLogger("ringlet").addHandler(self)
        return self.texts

    def __exit__(self, *_):
        logging.getLogger("ringlet").removeHandler(self)


def seen(own):
    """Return the parameters as the modules of ``own`` compute with them in a forward pass."""
    found, hooks = {}, []
    for name, part in own.named_modules():
        if isinstance(part, torch.nn.Linear):

            def note(part, _, name=name):
                for n, p in part.named_parameters():
                    found[f"{name}.{n}"] = p.detach().clone()

            hooks.append(part.register_forward_pre_hook(note))
    own(batches(1)[0])
    own.reshard()  # torch leaves the outermost one as it is for the backward pass
    for hook in hooks:
        hook.remove()
    return found


def coded_shards(own, compressor, name):
    """Return what the shards of a parameter decode to, one behind the other."""
    p = dict(own.named_parameters())[name]
    rows = p.shape[0]
    size = -(-rows // hvd.size())
    found = []
    whole = p.full_tensor().detach()
    for start in range(0, rows, size):
        shard = whole[start : start + size].reshape(-1).numpy()
        padded = np.zeros(size * whole[0].numel(), np.float32)
        padded[: shard.size] = shard
        if padded.size >= compressor.traits().min_size:
            context = Context(name="any", shape=padded.shape, numel=padded.size)
            compressor.decompress(compressor.compress(padded.copy(), context), padded, context)
        found.append(padded[: shard.size])
    return torch.from_numpy(np.concatenate(found)).view(whole.shape)


def case_fsdp2_gathers_compressed_parameters():
    """All ranks compute with what shards decode to; the owner of a shard keeps it as it is."""
    started()
    for spec in ("int8", "fp8", "bf16", "int4(bucket=64)"):
        own = sharded()
        hvd.compress_fsdp(own, gather=spec)
        for _ in range(2):
            found = seen(own)
            for name, p in found.items():
                expected = coded_shards(own, parse(spec), name)
                assert torch.equal(p, expected), (spec, name)
                assert torch.equal(hvd.broadcast(p, root_rank=0), p)
            exact = dict(model().named_parameters())
            for name, p in own.named_parameters():
                assert torch.equal(p.full_tensor(), exact[name]), name


def case_fsdp2_computes_gradients_with_the_parameters_of_its_forward():
    """Those that are drawn at random too, though they are gathered again for the backward pass."""
    started()
    for spec in ("int8", "qsgd", "int4 | hadamard"):
        own = sharded()
        hvd.compress_fsdp(own, gather=spec)
        plain = model()
        with torch.no_grad():
            for name, p in seen(own).items():
                plain.get_parameter(name).copy_(p)
        assert not torch.equal(plain[0].weight, model()[0].weight)
        x = batches(1)[0]
        own(x).square().mean().backward()
        plain(x).square().mean().backward()
        for p, q in zip(own.parameters(), plain.parameters(), strict=True):
            mean = hvd.allreduce(q.grad, op=hvd.Average)
            torch.testing.assert_close(p.grad.full_tensor(), mean, rtol=1e-4, atol=1e-7)


def case_fsdp2_trains_with_compressed_parameters():
    started()
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for policy in (MixedPrecisionPolicy(), half):
        reference = None
        for spec, gather, allowed in (
            (None, None, 0.0), ("none", "int8", 0.05), ("int8 | ef", "int8", 0.05),
            ("int4 | ef", "mxfp4", 0.5),
        ):  # fmt: skip
            own = model()
            before = torch.cat([p.detach().flatten() for p in own.parameters()])
            for part in (own[0], own):
                fully_shard(part, mp_policy=policy)
            if gather:
                hvd.compress_fsdp(own, spec, gather=gather)
            optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
            for x in batches(5):
                optimizer.zero_grad()
                own(x).float().square().mean().backward()
                optimizer.step()
            whole = torch.cat([p.full_tensor().detach().flatten() for p in own.parameters()])
            reference = whole if reference is None else reference
            assert (whole - reference).norm() <= allowed * (whole - before).norm(), gather
            assert all(torch.equal(row, whole) for row in hvd.allgather(whole[None]))


def case_fsdp2_gathers_a_quarter_of_the_bytes():
    started()
    sent = []
    usual = Communicator.allgather

    def counted(self, send, receive, counts=None):
        sent.append(send.nbytes)
        return usual(self, send, receive, counts)

    own = sharded()
    hvd.compress_fsdp(own, gather="int8(bucket=2048)")
    own(batches(1)[0])
    own.reshard()
    with mock.patch.object(Communicator, "allgather", counted):
        own(batches(1)[0])
    # Two modules with a matrix of 8192 elements and a bias each, and what tells of failures.
    shard = 8192 // hvd.size()
    assert [each < 0.3 * 4 * shard + 4 * 128 + 64 for each in sent] == [True, True], sent


def case_fsdp2_tells_all_ranks_what_a_compressor_of_parameters_raises_on_one():
    started()
    for spec in ("none", "int8"):
        own = sharded()
        hvd.compress_fsdp(own, spec, gather=Halving())
        optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
        for where in ("compress", "decompress"):
            for rank in (hvd.size() - 1, -1, 0, -1):
                Halving.bad = (where, rank)
                optimizer.zero_grad()
                told = None
                try:
                    own(batches(1)[0]).square().mean().backward()
                    optimizer.step()
                except CompressionFailed as error:
                    told = str(error)
                Halving.bad = ("", -1)
                assert hvd.allgather_object(told) == [told] * hvd.size(), told
                if rank >= 0:
                    assert f"rank {rank}: " in told, told
                    assert f"moody in {where}" in told
                    continue
                assert told is None
                whole = torch.cat([p.full_tensor().detach().flatten() for p in own.parameters()])
                assert all(torch.equal(row, whole) for row in hvd.allgather(whole[None]))
        other = sharded()
        hvd.compress_fsdp(other, spec, gather=Halving())
        Halving.bad = ("layout", hvd.size() - 1)
        for _ in range(2):
            with pytest.raises(CompressionFailed, match="moody in layout") as told:
                other(batches(1)[0])
            assert len(set(hvd.allgather_object(str(told.value)))) == 1
        Halving.bad = ("", -1)
        other(batches(1)[0]).square().mean().backward()
        with torch.no_grad():
            Halving.bad = ("compress", 0)
            with pytest.raises(CompressionFailed, match=r"rank 0: .*moody in compress"):
                own(batches(1)[0])
            Halving.bad = ("", -1)
            assert own(batches(1)[0]).isfinite().all()


def case_fsdp2_tells_all_ranks_what_fails_while_parameters_are_gathered_for_the_backward_pass():
    started()
    for spec in ("none", "int8"):
        for where in ("compress", "decompress"):
            own = sharded()
            hvd.compress_fsdp(own, spec, gather=Halving())
            loss = own(batches(1)[0]).square().mean()
            Halving.bad = (where, 0)
            with pytest.raises(CompressionFailed, match=rf"rank 0: .*moody in {where}") as told:
                loss.backward()
            assert len(set(hvd.allgather_object(str(told.value)))) == 1
            Halving.bad = ("", -1)
            own.zero_grad()
            own(batches(1)[0]).square().mean().backward()


def case_fsdp2_gathers_otherwise_on_one_rank():
    started()
    odd = hvd.rank() == hvd.size() - 1
    for given, words in ((None, "int8"), ("int4", "int8, gather=int4")):
        own = sharded()
        hvd.compress_fsdp(own, "int8", gather=given if odd else "int8")
        with pytest.raises(Mismatch) as told:
            own(batches(1)[0])
        assert "rank 0: int8, gather=int8;" in str(told.value)
        assert f"rank {hvd.size() - 1}: {words})" in str(told.value)
        assert len(set(hvd.allgather_object(str(told.value)))) == 1


def case_fsdp2_gathers_some_parameters_as_they_are():
    """What has several dtypes, says so once; what would not get smaller, does not."""
    started()
    own = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64).bfloat16())
    own[1].requires_grad_(False)  # torch takes trained ones of one dtype alone
    fully_shard(own)
    hvd.compress_fsdp(own, gather="int8")
    with Told() as texts:
        for _ in range(2):
            own.unshard()
            own.reshard()
    expected = "compress_fsdp: parameters of root travel as they are"
    assert [text.startswith(expected) for text in texts] == [True] * (hvd.rank() == 0), texts
    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    own = model()
    fully_shard(own, mp_policy=half)
    hvd.compress_fsdp(own, gather="fp16")  # is of as many bytes
    with Told() as texts:
        found = seen(own)
    assert not texts
    for name, p in found.items():
        assert torch.equal(p, model().get_parameter(name).bfloat16())


def case_fsdp2_refuses_what_spoils_parameters():
    started()
    own = sharded()
    for spec, words in (
        ("int8 | ef", "of parameters nothing is lost"),
        ("int8 | ef21", "of parameters nothing is lost"),
        ("signsgd", "parameters are not summed"),
        ("powersgd", "use a cast or a quantiser"),
        ("lossless", "use a cast or a quantiser"),
        ("topk", r"loses 9\d% of a parameter"),
        ("onebit", r"loses 3\d% of a parameter"),
        ("int8 | warmup(dense=5)", "has a schedule"),
    ):
        with pytest.raises(ValueError, match=words):
            hvd.compress_fsdp(own, "int8", gather=spec)
    mesh = init_device_mesh("cpu", (hvd.size(), 1), mesh_dim_names=("replicate", "shard"))
    with pytest.raises(ValueError, match="replicated and not sharded"):
        hvd.compress_fsdp(sharded(mesh), gather="int8")


def case_hsdp_gathers_compressed_parameters():
    if hvd.size() < 4:
        return
    started()
    mesh = two_levels()
    for by_us in (False, True):  # who averages over replicas
        own = sharded(mesh["shard"] if by_us else mesh)
        hvd.compress_fsdp(own, None if by_us else "int8", gather="int8")
        if by_us:
            hvd.compress_hsdp(own, "int8 | ef", mesh["replicate"].get_group())
        optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
        for x in batches(3):
            optimizer.zero_grad()
            own(x).square().mean().backward()
            optimizer.step()
        found = seen(own)
        assert not torch.equal(found["0.weight"], own[0].weight.full_tensor())
        for p in (*found.values(), *(p.full_tensor().detach() for p in own.parameters())):
            assert torch.equal(hvd.broadcast(p, root_rank=0), p)


def case_fsdp2_uncompressed_on_one_rank():
    started()
    own, odd = sharded(), hvd.rank() == hvd.size() - 1
    hvd.compress_fsdp(own, "none" if odd else "int8")
    with pytest.raises(Mismatch) as told:
        own(batches(1)[0]).square().mean().backward()
    assert "rank 0: int8" in str(told.value)
    assert f"rank {hvd.size() - 1}: none" in str(told.value)
    assert len(set(hvd.allgather_object(str(told.value)))) == 1


def case_who_waits_for_ranks_that_nobody_has_told_to_compress_says_so():
    """The last rank comes once the others have told of it; in truth it would never come."""
    started()
    own, last = model(), hvd.rank() == hvd.size() - 1
    fully_shard(own)
    hvd.compress_fsdp(own, "int8")
    folder = Path(hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None))
    others = [folder / str(rank) for rank in range(hvd.size() - 1)]

    class Telling(logging.Handler):
        def emit(self, record):
            told = folder / str(hvd.rank())
            told.with_suffix(".part").write_text(record.getMessage())
            told.with_suffix(".part").rename(told)

    handler = Telling()
    logging.getLogger("ringlet").addHandler(handler)
    with mock.patch.dict(os.environ, {"RINGLET_STALL_CHECK_TIME_SECONDS": "0.2"}):
        deadline = time.monotonic() + 60
        while last and not all(map(Path.exists, others)) and time.monotonic() < deadline:
            time.sleep(0.02)
        own(batches(1)[0]).square().mean().backward()
    logging.getLogger("ringlet").removeHandler(handler)
    where = f"in the first step after hvd.compress_fsdp() for the other {hvd.size() - 1} rank"
    for told in others:
        assert where in told.read_text()


def case_fsdp2_none_takes_the_place_of_a_compressor():
    started()
    own = sharded()
    first, second = hvd.compress_fsdp(own, "int4"), hvd.compress_fsdp(own, "topk | ef")
    kept = second.state_dict()
    for use in (first.state_dict, first.residual_norm, lambda: first.load_state_dict(kept)):
        with pytest.raises(ValueError, match="save and load what the last call has returned"):
            use()
    hvd.compress_fsdp(own, "none")
    hvd.compress_fsdp(own, "none")
    plain = sharded()
    for each in (own, plain):
        each(batches(1)[0]).square().mean().backward()
    for p, q in zip(own.parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad.to_local(), q.grad.to_local())


def case_fsdp2_refuses_what_one_rank_alone_has_loaded():
    started()
    own = sharded()
    made = hvd.compress_fsdp(own, "int8 | ef")
    for _ in range(2):
        own(batches(1)[0]).square().mean().backward()
    kept = made.state_dict()
    own(batches(1)[0]).square().mean().backward()
    if hvd.rank() == 0:
        made.load_state_dict(kept)
    with pytest.raises(Mismatch, match=r"rank 0: 2; rank 1: 3.*load on every rank") as told:
        own(batches(1)[0]).square().mean().backward()
    assert len(set(hvd.allgather_object(str(told.value)))) == 1
    made.load_state_dict(kept)
    own(batches(1)[0]).square().mean().backward()


def case_fsdp2_tells_ranks_that_use_different_parameters_of_one_size():
    """Torch would add the gradients of one layer to those of another."""
    started()
    own = Experts()
    fully_shard(own)
    hvd.compress_fsdp(own, "int8 | ef")
    x = batches(1)[0]
    for which in (0, 1):
        own.zero_grad()
        own(x, which).square().mean().backward()
    own.zero_grad()
    words = r"different parameters \(rank 0: 'root' elements .*0\.0 \* p\.sum\(\)"
    with pytest.raises(Mismatch, match=words) as told:
        own(x, int(hvd.rank() == 1)).square().mean().backward()
    assert len(set(hvd.allgather_object(str(told.value)))) == 1
    own.zero_grad()
    own(x, 1).square().mean().backward()


class Branches(torch.nn.Module):
    """Layers of three sizes, of which a step uses some: small ones and large ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(torch.nn.Linear(64, n) for n in (96, 4, 256))

    def forward(self, x, which):
        return torch.cat([self.layers[i](x) for i in which], 1)


def one_part_of(used, mesh=None):
    """Return a model of layers that are one FSDP module, and a step that uses some of them."""
    own = Branches()
    fully_shard(own, mesh=mesh)

    def step(which=used):
        own.zero_grad()
        own(batches(1)[0], which).square().mean().backward()
        return {n: p.grad.full_tensor() for n, p in own.named_parameters() if p.grad is not None}

    return own, step


def case_fsdp2_tells_ranks_that_use_different_parameters():
    """Whatever their sizes: gloo would end a process, NCCL wait, and payloads not be decoded."""
    started()
    whole, part = (0, 1, 2), (2, 1)
    expected = one_part_of(part)[1]()
    for compression in ("int8", "topk(ratio=0.3) | ef", "mxfp4 | ef", "fp16"):
        own, step = one_part_of(part)
        hvd.compress_fsdp(own, compression)
        for first in range(3):
            with pytest.raises(Mismatch, match=r"different parameters \(rank 0: 'root' el") as told:
                step((whole, part, (1,))[(hvd.rank() + first) % 3])
            assert len(set(hvd.allgather_object(str(told.value)))) == 1
            assert set(step()) == set(expected)
        for name, grad in step().items() if "ef" not in compression else ():
            assert (grad - expected[name]).norm() <= 0.05 * expected[name].norm()


def case_hsdp_tells_replicas_that_use_different_parameters():
    """At once: those that have no gradient of one would let the others wait for it."""
    started()
    mesh = two_levels()
    own, step = one_part_of((2, 1), mesh["shard"])
    hvd.compress_hsdp(own, "int8 | ef", mesh["replicate"].get_group())
    replica = mesh["replicate"].get_local_rank()
    for first, second in ((0, 1, 2), (2, 1)), ((2, 1), (1,)), ((0,), (2,)):
        for which in (first, second), (second, first):
            words = "compress_hsdp: replicas differ: .*1 is .*use the same parameters in a step"
            with pytest.raises(Mismatch, match=words) as told:
                step(which[replica])
            assert len(set(hvd.allgather_object(str(told.value)))) == 1
            assert len(step()) == 4


def case_fsdp2_takes_what_torch_puts_in_for_unused_parameters():
    started()
    own, step = one_part_of((0, 1, 2))
    hvd.compress_fsdp(own, "int8 | ef")
    own.set_reduce_scatter_unused_params(True)
    grads = step((0, 1) if hvd.rank() == 0 else (1, 2))
    assert len(grads) == 6
    assert all(each.norm() > 0 for each in grads.values())


def case_fsdp2_tells_ranks_that_have_frozen_different_parameters():
    started()
    own, step = one_part_of((0, 1, 2))
    own.layers[hvd.rank() % 2].requires_grad_(False)
    hvd.compress_fsdp(own, "int8 | ef")
    for _ in range(2):
        with pytest.raises(Mismatch, match=r"different parameters.* freeze the same") as told:
            step()
        assert len(set(hvd.allgather_object(str(told.value)))) == 1
    own.requires_grad_(True)
    assert len(step()) == 6


def case_fsdp2_tells_ranks_that_use_different_fsdp_modules_of_one_size():
    """They are at one step, and in it reduce these modules in different orders."""
    started()
    own = Experts()
    for expert in own.experts:
        fully_shard(expert)
    fully_shard(own)
    hvd.compress_fsdp(own, "int8 | ef")
    words = r"different parameters \(rank 0: 'experts\.0' elements .*rank 1: 'experts\.1' elements"
    for _ in range(2):  # who is behind afterwards has loaded no other file
        own.zero_grad()
        with pytest.raises(Mismatch, match=words):
            own(batches(1)[0], hvd.rank() % 2).square().mean().backward()


class Rooted(torch.nn.Module):
    """A model with a part that is called as its own name in checkpoints is."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.root = torch.nn.Linear(64, 128, bias=False)
        self.last = torch.nn.Linear(128, 64, bias=False)

    def forward(self, x):
        return self.last(torch.tanh(self.root(x)))


def with_feedback(own, parts, replicas=None):
    """Return ``own``, sharded, and what compresses its gradients: between two replicas or all."""
    mesh = None if replicas is None else replicas["shard"]
    for part in (*parts, own):
        fully_shard(part, mesh=mesh)
    if replicas is None:
        return own, hvd.compress_fsdp(own, "int4 | ef")
    return own, hvd.compress_hsdp(own, "int4 | ef", replicas["replicate"].get_group())


def case_a_part_that_is_called_root_keeps_its_own_residuals():
    started()

    def step(own):
        own.zero_grad()
        own(batches(1)[0]).square().mean().backward()
        return [p.grad.full_tensor() for p in own.parameters()]

    def rooted(replicas):
        own = Rooted()
        return with_feedback(own, [own.root], replicas)

    for replicas in (None, two_levels()):
        whole, held = with_feedback(Rooted(), [], replicas)
        own, made = rooted(replicas)
        step(whole)
        step(own)
        kept = made.state_dict()
        assert len(kept["states"]) == len(held.state_dict()["states"])
        again, loaded = rooted(replicas)
        loaded.load_state_dict(kept)
        wanted = step(own)
        assert all(map(torch.equal, step(again), wanted))


def case_what_was_saved_of_another_model_or_of_other_shards_is_told_and_forgotten():
    started()
    x = batches(1)[0]
    for replicas in (None, two_levels()):
        own, made = with_feedback(model(), [], replicas)
        own(x).square().mean().backward()
        kept = made.state_dict()
        own = model()
        own, other = with_feedback(own, [own[0]], replicas)
        torch.manual_seed(0)
        narrow = torch.nn.Sequential(torch.nn.Linear(64, 96), torch.nn.Linear(96, 64))
        for each, into in ((own, other), with_feedback(narrow, [], replicas)):
            with pytest.warns(UserWarning, match="is not in this job"):
                into.load_state_dict(kept)
            assert len(into.state_dict()["states"]) < len(kept["states"])
            each(x).square().mean().backward()
        again, made = with_feedback(model(), [], replicas)
        short = {n: s | {"residual": s["residual"][:9]} for n, s in kept["states"].items()}
        with pytest.warns(UserWarning, match="'residual', .*, is forgotten"):
            made.load_state_dict(kept | {"states": short})
        again(x).square().mean().backward()


def case_hsdp_refuses_what_one_rank_alone_has_loaded():
    started()
    mesh = two_levels()
    own = sharded(mesh["shard"])
    made = hvd.compress_hsdp(own, "powersgd | ef", mesh["replicate"].get_group())
    for _ in range(2):
        own(batches(1)[0]).square().mean().backward()
    kept = made.state_dict()
    own(batches(1)[0]).square().mean().backward()
    if hvd.rank() == 0:
        made.load_state_dict(kept)
    with pytest.raises(Mismatch, match="load on every rank what that rank saved") as told:
        own(batches(1)[0]).square().mean().backward()
    assert len(set(hvd.allgather_object(str(told.value)))) == 1
    if hvd.rank() != 0:
        made.load_state_dict(kept)
    own(batches(1)[0]).square().mean().backward()
    newer = made.state_dict()
    made.load_state_dict(kept if hvd.rank() == 0 else newer)  # on all, but not the same
    with pytest.raises(Mismatch, match="load on every rank what that rank saved"):
        own(batches(1)[0]).square().mean().backward()


CASES = [value for name, value in list(globals().items()) if name.startswith("case_")]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_"))
def test_parallel(run_case, case, size):
    run_case(case, "gloo", size)


def test_the_interpreters_end_waits_for_a_thread_that_leaves():
    began, go_on, ended = threading.Event(), threading.Event(), []

    class Slow:
        def shutdown(self):
            began.set()
            go_on.wait(30)

        def close(self):
            ended.append("closed")

    leave = hsdp.Departure(Slow(), Slow())
    threading.Thread(target=leave).start()  # as the end of a model does
    assert began.wait(30)
    at_exit = threading.Thread(target=lambda: (leave(), ended.append("exit")))
    at_exit.start()
    at_exit.join(0.2)
    early = not at_exit.is_alive()
    go_on.set()
    at_exit.join(30)
    assert not early
    assert ended.index("closed") < ended.index("exit")
