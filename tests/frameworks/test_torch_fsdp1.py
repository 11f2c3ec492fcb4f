"""Compressed gradients inside FSDP1, beside its own reduce-scatter."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
import torch
import torch.distributed as dist
from failing_compressors import Moody
from torch.distributed.algorithms._comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    FullyShardedDataParallel,
    MixedPrecision,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch_group import started

import ringlet.torch as hvd
from ringlet.compressors import Context, parse
from ringlet.fusion import CompressionFailed
from ringlet.ring.errors import Mismatch

pytestmark = pytest.mark.preloaded("torch")


def model():
    torch.manual_seed(0)
    layers = torch.nn.Linear(64, 130), torch.nn.Tanh(), torch.nn.Linear(130, 64)
    return torch.nn.Sequential(*layers)


def wrapped(own=None, **options):
    """Return a model of three FSDP1 modules, of which the outermost has no parameters."""
    options = {
        "use_orig_params": True,
        "device_id": torch.device("cpu"),
        "auto_wrap_policy": ModuleWrapPolicy({torch.nn.Linear}),
    } | options
    return FullyShardedDataParallel(own or model(), **options)


def compressed(spec, **options):
    own = wrapped(**options)
    return own, hvd.compress_fsdp(own, spec)


def batches(count):
    numbers = torch.Generator().manual_seed(10 + hvd.rank())
    return [torch.randn(8, 64, generator=numbers) for _ in range(count)]


def weights(own):
    with FullyShardedDataParallel.summon_full_params(own):
        return torch.cat([p.detach().flatten().clone() for p in own.parameters()])


def train(own, given, accumulate=False):
    optimizer = torch.optim.SGD(own.parameters(), lr=0.5)
    for i, x in enumerate(given):
        optimizer.zero_grad()
        if accumulate and i % 2:
            with own.no_sync():
                own(x * 0.5).square().mean().backward()
        own(x).square().mean().backward()
        own.clip_grad_norm_(0.05)
        optimizer.step()
    return weights(own)


WAYS = {
    "parameters": {},
    "flat parameters": {"use_orig_params": False},
    "gathered once": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "reduced in bf16": {"mixed_precision": MixedPrecision(reduce_dtype=torch.bfloat16)},
    "computed in bf16": {"mixed_precision": MixedPrecision(param_dtype=torch.bfloat16)},
}


def case_training_stays_near_fsdps_own():
    started()
    before = torch.cat([p.detach().flatten() for p in model().parameters()])
    for way, options in WAYS.items():
        plain = train(wrapped(**options), batches(5), accumulate=True)
        for spec, allowed in (("none", 0), ("int8 | ef", 0.02), ("topk(ratio=0.2) | ef", 0.7)):
            own, state = compressed(spec, **options)
            ours = train(own, batches(5), accumulate=True)
            assert (ours - plain).norm() <= allowed * (plain - before).norm(), (way, spec)
            assert all(torch.equal(row, ours) for row in hvd.allgather(ours[None]))
            assert len(state) == 2
            assert (state.residual_norm() > 0) == ("ef" in spec)


def parts(numels, rank, size):
    """Return where each parameter lies in a rank's part of the flat gradient, which is padded."""
    n = -(-sum(numels) // size)
    edges = {0, n, *(min(max(int(at) - rank * n, 0), n) for at in np.cumsum(numels))}
    return n, list(itertools.pairwise(sorted(edges)))


class Uneven(torch.nn.Module):
    """Two layers whose gradients differ by a factor of a million, and a small one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a = torch.nn.Linear(64, 100, bias=False)
        self.b = torch.nn.Linear(64, 150, bias=False)
        self.c = torch.nn.Linear(64, 3)

    def forward(self, x):
        return self.a(x).square().sum() + 1e-6 * self.b(x).square().sum() + self.c(x).sum()


def case_a_rank_gets_the_mean_of_what_each_parameters_part_decodes_to():
    """In one bucket with those of ``a``, the gradients of ``b`` would be zeros."""
    started()
    spec, size = "int8(bucket=65536)", hvd.size()
    exact, flat = Uneven(), wrapped(Uneven(), use_orig_params=False, auto_wrap_policy=None)
    hvd.compress_fsdp(flat, spec)
    for each in (exact, flat):
        each(batches(1)[0]).backward()
    grads = [p.grad.flatten() for p in exact.parameters()]
    n, pieces = parts([g.numel() for g in grads], dist.get_rank(), size)
    every = hvd.allgather(torch.cat(grads)[None])
    every = torch.nn.functional.pad(every, (0, n * size - every.shape[1]))
    mine = every[:, dist.get_rank() * n :][:, :n].numpy()
    wanted = np.zeros(n, np.float32)
    for start, stop in pieces:
        coded = parse(spec if stop - start >= 1024 else "none")
        for x in mine[:, start:stop]:
            context, decoded = Context(numel=stop - start), np.empty(stop - start, np.float32)
            coded.decompress(coded.compress(x.copy(), context), decoded, context)
            wanted[start:stop] += decoded
    (p,) = flat.parameters()
    np.testing.assert_allclose(p.grad.numpy(), wanted / size, rtol=2e-6, atol=1e-12)
    assert np.count_nonzero(wanted) > 0.9 * n


def case_gradients_take_a_quarter_of_the_bytes():
    started()
    sent, (own, made) = [], compressed("int8")
    kind = type(next(iter(made)).transports.of(own.process_group).comm)
    alltoall = kind.alltoall

    def counted(comm, values, out):
        sent.append(values.nbytes)
        return alltoall(comm, values, out)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kind, "alltoall", counted)
        own(batches(1)[0]).square().mean().backward()
    exact = 4 * sum(p.numel() for p in model().parameters())
    assert len(sent) == 2
    assert sum(sent) < 0.3 * exact


def case_training_goes_on_from_a_checkpoint_bit_for_bit():
    started()
    own, made = compressed("topk(ratio=0.1) | ef")
    train(own, batches(6)[:3])
    kept, state = own.state_dict(), made.state_dict()
    kept = {name: value.clone() for name, value in kept.items()}
    assert made.residual_norm() > 0
    straight = train(own, batches(6)[3:])
    again, resumed = compressed("topk(ratio=0.1) | ef")
    again.load_state_dict(kept)
    resumed.load_state_dict(state)
    assert resumed.residual_norm() == pytest.approx(float(np.linalg.norm(
        [np.linalg.norm(held["residual"]) for held in state["states"].values()])))  # fmt: skip
    assert torch.equal(train(again, batches(6)[3:]), straight)
    with pytest.warns(UserWarning, match="this is rank"):
        resumed.load_state_dict(state | {"rank": state["rank"] + 1})
    assert resumed.residual_norm() == 0
    other = FullyShardedDataParallel(model(), device_id=torch.device("cpu"))
    smaller = hvd.compress_fsdp(other, "topk(ratio=0.1) | ef")
    with pytest.warns(UserWarning, match="is not in this job"):
        smaller.load_state_dict(state)
    assert smaller.residual_norm() == 0


def case_a_schedule():
    started()
    own, made = compressed("topk(ratio=0.01) | ef | warmup(dense=2, steps=2, start=0.5, stages=1)")
    exact, sent = train(wrapped(), batches(2)), []
    ours = train(own, batches(2))
    torch.testing.assert_close(ours, exact, rtol=1e-6, atol=1e-7)
    assert made.residual_norm() == 0
    for _ in range(4):
        train(own, batches(1))
        grads = torch.cat([p.grad.flatten() for p in own.parameters() if p.grad is not None])
        sent.append(int(grads.count_nonzero()))
    assert min(sent[:2]) > 10 * max(sent[2:])


def case_what_a_compressor_raises_on_one_rank_all_raise():
    started()
    own, _ = compressed(Moody())
    optimizer, last = torch.optim.SGD(own.parameters(), lr=0.5), dist.get_world_size() - 1
    good = 0
    for method in ("layout", "compress", "decompress", "at"):
        for bad in ((method, last), ("", -1), (method, 0), ("", -1)):
            if method == "layout" and good:
                continue  # it is asked once
            Moody.bad = bad
            optimizer.zero_grad()
            told = None
            try:
                own(batches(1)[0]).square().mean().backward()
                optimizer.step()
                good += 1
            except CompressionFailed as error:
                told = str(error)
            assert hvd.allgather_object(told) == [told] * hvd.size()
            assert (told is None) == (bad[0] == "")
            if bad[0]:
                assert f"rank {bad[1]}: " in told
                assert f"moody in {method}" in told
                assert re.search(r"\(failing_compressors.py, line \d+: ", told), told
    Moody.bad = ("", -1)
    plain = wrapped()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for _ in range(good):
        optimizer.zero_grad()
        plain(batches(1)[0]).square().mean().backward()
        optimizer.step()
    torch.testing.assert_close(weights(own), weights(plain))


def case_another_spec_on_one_rank():
    started()
    for others in ("int4", "none"):
        own, _ = compressed(others if hvd.rank() == hvd.size() - 1 else "int8 | ef")
        with pytest.raises(Mismatch) as told:
            own(batches(1)[0]).square().mean().backward()
        assert "rank 0: int8 | ef" in str(told.value)
        assert f"rank {hvd.size() - 1}: {others}" in str(told.value)
        assert len(set(hvd.allgather_object(str(told.value)))) == 1


def case_the_last_compressor_is_what_counts():
    started()
    own, made = compressed("int4 | ef")
    last = hvd.compress_fsdp(own, "none")
    with pytest.raises(ValueError, match="save and load what the last call has returned"):
        made.state_dict()
    assert last.residual_norm() == 0
    assert torch.equal(train(own, batches(2)), train(wrapped(), batches(2)))


def case_frozen_and_unused_parameters():
    started()

    class Parts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used = model()
            self.frozen = torch.nn.Linear(64, 64)
            self.unused = torch.nn.Linear(64, 64)
            self.frozen.requires_grad_(False)

        def forward(self, x):
            return self.used(self.frozen(x))

    def run(spec):
        own = wrapped(Parts())
        state = hvd.compress_fsdp(own, spec)
        own(batches(1)[0]).square().mean().backward()
        return {n: p.grad for n, p in own.named_parameters() if p.grad is not None}, state

    exact, (ours, state) = run("none")[0], run("int8 | ef")
    assert ours.keys() == exact.keys()
    assert all((ours[n] - g).norm() <= 0.02 * g.norm() for n, g in exact.items())
    assert {name.partition("/")[0] for name in state.state_dict()["states"]} == {"used.0", "used.2"}


def case_what_is_held_back_for_a_parameter_comes_where_it_has_no_gradient():
    started()

    class Two(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b = (torch.nn.Linear(64, 64, bias=False) for _ in range(2))

        def forward(self, x, both):
            return self.a(x).square().mean() + (self.b(x).square().mean() if both else 0.0)

    own = wrapped(Two(), auto_wrap_policy=None)
    hvd.compress_fsdp(own, "topk(ratio=0.5) | ef")
    exact, sums = Two(), 0.0
    exact(batches(1)[0], both=True).backward()
    for both in (True, False):
        own.zero_grad()
        own(batches(1)[0], both).backward()
        with FullyShardedDataParallel.summon_full_params(own, with_grads=True):
            sums = sums + own.b.weight.grad.clone()
    mean = hvd.allreduce(exact.b.weight.grad)
    torch.testing.assert_close(sums, mean, rtol=1e-5, atol=1e-8)


def case_what_cannot_be_compressed_is_refused():
    started()
    for spec in ("powersgd", "threshold(value=0.1)", "int8 | ef21", "signsgd"):
        with pytest.raises(ValueError, match="cannot compress a reduce-scatter"):
            hvd.compress_fsdp(wrapped(), spec)
    with pytest.raises(ValueError, match="gather= needs FSDP2"):
        hvd.compress_fsdp(wrapped(), "int8", gather="int8")
    whole = wrapped(sharding_strategy=ShardingStrategy.NO_SHARD)
    with pytest.raises(ValueError, match=r"NO_SHARD.*DistributedDataParallel"):
        hvd.compress_fsdp(whole, "int8")
    own, made = compressed("int8 | ef")
    with pytest.raises(ValueError, match="NO_SHARD"):  # and the first call stands
        hvd.compress_fsdp(torch.nn.ModuleList([own, whole]), "int4")
    own(batches(1)[0]).square().mean().backward()
    assert made.residual_norm() > 0
    outer = FullyShardedDataParallel(torch.nn.Sequential(own), device_id=torch.device("cpu"))
    with pytest.raises(AssertionError, match="Non-root FSDP instance"):  # torch's
        outer(batches(1)[0])
    mesh = init_device_mesh("cpu", (2, hvd.size() // 2), mesh_dim_names=("replicas", "shards"))
    hybrid = wrapped(device_mesh=mesh, sharding_strategy=ShardingStrategy.HYBRID_SHARD)
    if hvd.size() > 2:  # else FSDP has a single rank to shard among
        with pytest.raises(ValueError, match=r"HYBRID_SHARD.*two dimensions"):
            hvd.compress_fsdp(hybrid, "int8")
    both = torch.nn.Sequential(wrapped(), fully_shard(torch.nn.Linear(64, 64)))
    with pytest.raises(ValueError, match="of FSDP1 and of FSDP2"):
        hvd.compress_fsdp(both, "int8")
    taken = wrapped()
    hook = default_hooks.fp16_compress_hook
    taken.register_comm_hook(default_hooks.LowPrecisionState(dist.group.WORLD), hook)
    with pytest.raises(ValueError, match=r"fp16_compress_hook.*leave out register_comm_hook"):
        hvd.compress_fsdp(taken, "int8")


def case_a_single_rank_keeps_its_gradients():
    started()
    groups = [dist.new_group([rank]) for rank in range(hvd.size())]
    own = wrapped(process_group=groups[hvd.rank()])
    hvd.compress_fsdp(own, "int8")
    plain = model()
    for each in (own, plain):
        each(batches(1)[0]).square().mean().backward()
    for ours, exact in zip(own.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours.grad.flatten(), exact.grad.flatten())


CASES = [value for name, value in list(globals().items()) if name.startswith("case_")]


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_"))
def test_fsdp1(run_case, case, size):
    run_case(case, "gloo", size)
