"""Training steps that are compiled whole: forward, backward, and what reduces gradients."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from torch._dynamo.utils import clear_compilation_metrics, get_compilation_metrics
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch_group import started

import ringlet
import ringlet.torch as hvd

pytestmark = pytest.mark.preloaded("torch")

ROOMS = (ringlet, ringlet.compressors, ringlet.fusion, ringlet.ring)
OURS = tuple(path for room in ROOMS for path in room.__path__)
TRACED = "sync_batch_norm.py"  # as far as evaluation goes, which is a part of graphs


def model(hidden=None):
    torch.manual_seed(0)
    hidden = torch.nn.Tanh() if hidden is None else hidden
    return torch.nn.Sequential(torch.nn.Linear(8, 32), hidden, torch.nn.Linear(32, 1))


def sgd(own):
    return torch.optim.SGD(own.parameters(), lr=0.1)


def simple(own, optimizer, forward=None):
    forward = forward or own

    def step(x):
        optimizer.zero_grad()
        loss = forward(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return own, step


def with_feedback():
    own = model()
    optimizer = hvd.DistributedOptimizer(sgd(own), own.named_parameters(), "int8 | ef")

    def step(x):
        optimizer.zero_grad()
        loss = own(x).square().mean()
        loss.backward()
        optimizer.synchronize()
        clip_grad_norm_(own.parameters(), 0.5)
        with optimizer.skip_synchronize():
            optimizer.step()
        return loss.detach()

    return own, step


def with_masters():
    own = hvd.apply_precision(model(), "fp16")
    named = own.named_parameters()
    optimizer = hvd.DistributedOptimizer(sgd(own), named, precision="fp16")

    def step(x):
        optimizer.zero_grad()
        loss = own(x).float().square().mean()
        optimizer.scale(loss).backward()
        optimizer.step()
        return loss.detach() * (optimizer.loss_scale > 0)

    return own, step


def adasum():
    own = model()
    return simple(own, hvd.DistributedOptimizer(sgd(own), own.named_parameters(), op=hvd.Adasum))


def onebit_adam():
    own = model()
    return simple(own, hvd.OneBitAdam(own.named_parameters(), lr=0.01, warmup=2))


def diloco():
    own = model()
    return simple(own, hvd.DiLoCo(sgd(own), own.named_parameters(), every=2))


def normalised():
    own = model(hvd.SyncBatchNorm(32))
    return simple(own, hvd.DistributedOptimizer(sgd(own), own.named_parameters()))


def functions():
    own = model()
    optimizer = sgd(own)

    def step(x):
        optimizer.zero_grad()
        loss = hvd.allreduce(own(hvd.allgather(x)).square().mean())
        loss.backward()
        means = hvd.grouped_allreduce([p.grad for p in own.parameters()])
        for p, mean in zip(own.parameters(), means, strict=True):
            p.grad = mean / hvd.size()
        optimizer.step()
        return loss.detach()

    return own, step


def ddp():
    started()
    own = model()
    wrapped = DistributedDataParallel(own)
    wrapped.register_comm_hook(*hvd.ddp_hook("int8 | ef"))
    return simple(own, sgd(own), wrapped)


def fsdp():
    started()
    own = model()
    for layer in own:
        fully_shard(layer)
    fully_shard(own)
    hvd.compress_fsdp(own, "int8 | ef")
    return simple(own, sgd(own))


def trained(way, compiled):
    """Return the losses and the parameters after a few steps."""
    own, step = way()
    if compiled:
        step = torch.compile(step, backend="eager")
    numbers = torch.Generator().manual_seed(hvd.rank())
    seen = [step(torch.randn(4, 8, generator=numbers)) for _ in range(4)]
    parts = [p.detach() for p in own.parameters()]
    parts = [p.to_local() if hasattr(p, "to_local") else p for p in parts]
    return seen, [p.clone() for p in parts]


def check_whole_steps(*ways):
    """Nothing of ours is compiled, nothing is said, and results are the same bit for bit."""
    for way in ways:
        plain = trained(way, compiled=False)
        torch._dynamo.reset()
        clear_compilation_metrics()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            compiled = trained(way, compiled=True)
        assert not [str(each.message) for each in said if "ynamo" in str(each.message)], way
        files = [str(each.co_filename) for each in get_compilation_metrics()]
        assert check_whole_steps.__code__.co_filename in files, way  # or cloudpickle's word for it
        assert not [n for n in files if n.startswith(OURS) and Path(n).name != TRACED], way
        for ours, theirs in zip(plain, compiled, strict=True):
            assert all(map(torch.equal, ours, theirs)), way


def case_optimizers():
    check_whole_steps(with_feedback, with_masters, adasum)


def case_recipes():
    check_whole_steps(onebit_adam, diloco)


def case_functions():
    check_whole_steps(functions, normalised)


def case_torchs_wrappers():
    check_whole_steps(ddp, fsdp)


def case_evaluation_is_one_graph():
    own = model(hvd.SyncBatchNorm(32)).eval()
    compiled = torch.compile(own, backend="eager", fullgraph=True)
    x = torch.ones(2, 8)
    assert torch.equal(compiled(x), own(x))


CASES = [value for name, value in list(globals().items()) if name.startswith("case_")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_"))
def test_whole_steps_compiled(run_case, case):
    run_case(case, "gloo", 2)
