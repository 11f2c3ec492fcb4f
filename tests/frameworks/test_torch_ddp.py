"""``ddp_hook`` with parameters and gradients of every kind, and what users get wrong with it."""

from __future__ import annotations

import gc
import hashlib
import io
import logging
import os
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy, fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch_group import started

import ringlet.torch as hvd
from ringlet.compressors import Compressor, register
from ringlet.fusion import CompressionFailed
from ringlet.ring.errors import Mismatch
from ringlet.torch.elastic import state as elastic_state
from ringlet.torch.elastic.hook_memory import memory_of
from ringlet.torch.parallel import ddp, ddp_state

pytestmark = pytest.mark.preloaded("torch")


class Waves(torch.nn.Module):
    """A complex layer between real ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = torch.nn.Linear(8, 60)
        self.turn = torch.nn.Parameter(torch.randn(60, 60, dtype=torch.complex64) / 8)
        self.shift = torch.nn.Parameter(torch.randn(60, dtype=torch.complex64))
        self.last = torch.nn.Linear(60, 4)

    def forward(self, x):
        wave = torch.polar(torch.ones(()), self.first(x)) @ self.turn + self.shift
        return self.last(wave.abs())


class Words(torch.nn.Module):
    """An embedding with sparse gradients before a dense layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = torch.nn.Embedding(50, 40, sparse=True)
        self.dense = torch.nn.Linear(40, 40)

    def forward(self, x):
        return self.dense(self.table(x))


def layers():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 300), torch.nn.Tanh(), torch.nn.Linear(300, 8))


def train(own, spec, inputs, steps=4, lr=0.05, **options):
    """Return the parameters after some steps with a hook, or DDP's own reduction."""
    wrapped = DistributedDataParallel(own, **options)
    if spec is not None:
        wrapped.register_comm_hook(*hvd.ddp_hook(spec))
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=lr)
    for step in range(steps):
        optimizer.zero_grad()
        wrapped(inputs(step)).square().mean().backward()
        optimizer.step()
    assert hvd.replicas_equal(own.named_parameters()), spec
    flat = [torch.view_as_real(p) if p.is_complex() else p for p in own.parameters()]
    return torch.cat([p.detach().flatten() for p in flat])


def numbers(step):
    return torch.randn(6, 8, generator=torch.Generator().manual_seed(10 * step + hvd.rank()))


def words(step):
    draw = torch.Generator().manual_seed(10 * step + hvd.rank())
    return torch.randint(0, 50, (5 + hvd.rank(),), generator=draw)


def case_complex_parameters():
    started()
    for view in (False, True):
        wanted = train(Waves(), None, numbers, gradient_as_bucket_view=view)
        before = train(Waves(), None, numbers, steps=0)
        for spec, allowed in (("none", 1e-5), ("int8 | ef", 0.1)):
            ours = train(Waves(), spec, numbers, gradient_as_bucket_view=view)
            assert (ours - wanted).norm() <= allowed * (wanted - before).norm(), (spec, view)


def case_sparse_gradients():
    started()
    wanted = train(Words(), None, words)
    for spec in ("none", "int8 | ef"):
        ours = train(Words(), spec, words)
        assert torch.allclose(ours, wanted, atol=1e-6 if spec == "none" else 1e-3), spec


def case_a_failure_is_of_our_class_and_training_goes_on():
    started()

    @register("fragile_hook")
    class Fragile(Compressor):
        """Fail where a NaN says so."""

        def compress(self, x, ctx):
            if ctx.xp.isnan(x).any():
                raise ArithmeticError(f"a NaN on rank {ctx.rank}")
            return {"all": x.copy()}

        def decompress(self, payload, out, ctx):
            out[:] = payload["all"]

    own = layers()
    wrapped = DistributedDataParallel(own)
    wrapped.register_comm_hook(*hvd.ddp_hook("fragile_hook"))
    for step in range(4):
        bad = float("nan") if step % 2 and hvd.rank() == hvd.size() - 1 else 1.0
        loss = wrapped(numbers(step)).square().mean() * bad
        if step % 2 == 0:
            loss.backward()
        else:
            with pytest.raises(CompressionFailed, match="ArithmeticError: a NaN") as told:
                loss.backward()
            digest = hashlib.blake2b(str(told.value).encode(), digest_size=8).digest()
            rows = hvd.allgather(torch.tensor([list(digest)]))
            assert bool((rows == rows[0]).all())
        grads = {n: p.grad for n, p in own.named_parameters()}
        assert step % 2 or hvd.replicas_equal(grads)
        wrapped.zero_grad()


def case_training_goes_on_whatever_has_failed_in_the_hook():
    """Also a sparse gradient, and what is found out before anything is handed in."""
    started()
    for part in ("sparse_allreduce_async", "_slices"):
        own = Words()
        wrapped = DistributedDataParallel(own)
        wrapped.register_comm_hook(*hvd.ddp_hook("int8 | ef"))
        for step in range(3):
            wrapped.zero_grad()
            loss = wrapped(words(step)).square().mean()
            if step == 1:
                odd = mock.patch.object(ddp, part, side_effect=Mismatch(f"of {part}"))
                with odd, pytest.raises(Mismatch, match=f"of {part}"):
                    loss.backward()
                continue
            loss.backward()
            grads = {n: p.grad.to_dense() for n, p in own.named_parameters()}
            assert hvd.replicas_equal(grads), (part, step)


def case_a_mapping_needs_names_that_it_matches():
    started()
    own = layers()
    with pytest.raises(ValueError, match="needs named_parameters"):
        hvd.ddp_hook({"0.*": "int8", "*": "none"})
    hvd.ddp_hook({"*": "int8"})  # needs no names
    for wrong in (own, own.parameters(), "int8", next(own.parameters())):
        with pytest.raises(ValueError, match=r"named_parameters must be .*named_parameters\(\)"):
            hvd.ddp_hook({"*": "int8"}, wrong)
    with pytest.warns(UserWarning, match=r"'wieght' matches no parameter.*'0\.weight'"):
        hvd.ddp_hook({"wieght": "int8"}, own.named_parameters())
    wrapped = DistributedDataParallel(own)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        state, hook = hvd.ddp_hook({"0.*": "int8", "*": "none"}, wrapped.named_parameters())
    wrapped.register_comm_hook(state, hook)
    wrapped(numbers(0)).sum().backward()
    used = {request.name.partition("module.")[2]: str(c) for request, c in state._requests.values()}
    assert used == {"0.weight": "int8", "0.bias": "int8", "2.weight": "none", "2.bias": "none"}


def case_shards_of_all_ranks_continue_bit_for_bit():
    started()
    finals = []
    kept = []
    for resumed in (False, True):
        own = layers()
        wrapped = DistributedDataParallel(own)
        state, hook = hvd.ddp_hook("topk(ratio=0.05) | ef", own.named_parameters())
        wrapped.register_comm_hook(state, hook)
        optimizer = torch.optim.SGD(own.parameters(), lr=0.05)
        if resumed:
            own.load_state_dict(kept[0])
            state.load_sharded(kept[1])
        for step in range(3 if resumed else 0, 6):
            if step == 3 and not resumed:
                weights = {name: value.clone() for name, value in own.state_dict().items()}
                kept += [weights, hvd.allgather_object(state.state_dict())]
            optimizer.zero_grad()
            wrapped(numbers(step)).square().mean().backward()
            optimizer.step()
        finals.append(torch.cat([p.detach().flatten() for p in own.parameters()]))
    assert torch.equal(*finals)
    with pytest.raises(ValueError, match="state of every rank once"):
        state.load_sharded(kept[1][:1])
    with pytest.raises(ValueError, match=r"takes a list of all ranks' state_dicts.*, not dict"):
        state.load_sharded(state.state_dict())
    others = kept[1][(hvd.rank() + 1) % hvd.size()]
    with pytest.warns(UserWarning, match=r"residuals of rank .* of the hook's state") as told:
        state.load_state_dict(others)
    assert "optimizer" not in str(told[0].message)


def backward_with_feedback():
    """Return the hook's state, and its model, after a backward pass that held something back."""
    own = layers()
    wrapped = DistributedDataParallel(own)
    state, hook = hvd.ddp_hook("topk(ratio=0.05) | ef", own.named_parameters())
    wrapped.register_comm_hook(state, hook)
    wrapped(numbers(0)).square().mean().backward()
    return state, wrapped


def case_residuals_are_found_though_wrappers_have_come_or_gone():
    started()
    state, _ = backward_with_feedback()
    kept, norm = state.state_dict(), state.residual_norm()
    everybodys = hvd.allgather_object(kept)
    for way in ("own", "sharded"):
        again = DistributedDataParallel(layers())
        compiled = [(f"_orig_mod.{name}", p) for name, p in again.named_parameters()]
        resumed, hook = hvd.ddp_hook("topk(ratio=0.05) | ef", compiled)
        again.register_comm_hook(resumed, hook)
        if way == "own":
            resumed.load_state_dict(kept)
        else:
            resumed.load_sharded(everybodys)
        assert resumed.residual_norm() == norm > 0
        assert all(name.startswith("_orig_mod.module.") for name in resumed._states())
    foreign = {**kept, "states": {f"x.{n}": v for n, v in kept["states"].items()}}
    with pytest.warns(UserWarning, match=r"'x\.0\.weight' is not in this job"):
        resumed.load_state_dict(foreign)


def squares(named, **options):
    """Return a model of layers of one shape, DDP around it, and the state of its hook."""
    torch.manual_seed(0)
    own = torch.nn.Sequential(*[torch.nn.Linear(600, 600, bias=False) for _ in range(5)])
    wrapped = DistributedDataParallel(own, **options)
    state, hook = hvd.ddp_hook("topk(ratio=0.5) | ef", own.named_parameters() if named else None)
    wrapped.register_comm_hook(state, hook)
    return own, wrapped, state


def case_residuals_are_found_without_names_whatever_ddp_makes_of_buckets():
    """Of one parameter alone, which is then the one whose gradient they are."""
    started()
    draw = torch.randn(8, 600)
    for named in (False, True):
        _, wrapped, state = squares(named)
        wrapped(draw).square().mean().backward()
        kept = state.state_dict()
        assert list(kept["states"]) == [f"{i}.weight" for i in range(5)]
        for name, held in kept["states"].items():
            held["residual"].fill_(1.0 if name == "0.weight" else 0.0)
        for options in ({}, {"find_unused_parameters": True}, {"bucket_cap_mb": 0.01}):
            for way in ("before", "after", "sharded"):
                again, wrapped, state = squares(not named if way == "sharded" else False, **options)
                if way == "after":  # of a first step of zeros
                    (0 * wrapped(draw)).sum().backward()
                    wrapped.zero_grad()
                if way == "sharded":
                    state.load_sharded(hvd.allgather_object(kept))
                else:
                    state.load_state_dict(kept)
                (0 * wrapped(draw)).sum().backward()
                found = [bool(p.grad.any()) for p in again.parameters()]
                assert found == [True, False, False, False, False], (named, options, way)


def case_what_was_saved_without_names_by_an_older_ringlet_is_found_by_its_place():
    started()
    draw = torch.randn(8, 600)
    own, wrapped, state = squares(named=False)
    with mock.patch.object(ddp_state, "names_in_ddp", return_value={}):
        wrapped(draw).square().mean().backward()
    old, place = state.state_dict(), state._names[id(own[0].weight)]
    assert all(name.startswith("bucket") for name in old["states"])
    old["states"]["bucket7.0"] = {"step": 1, "residual": torch.ones(8)}
    for numel in (600 * 600, 8):
        for name, held in old["states"].items():
            held["residual"].fill_(0.0)
            if name == place:
                held["residual"] = torch.ones(numel)
        again, wrapped, state = squares(named=False)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            state.load_state_dict(old)
            (0 * wrapped(draw)).sum().backward()
        told = " ".join(str(each.message) for each in caught)
        assert ("'0.weight'" in told) == (numel == 8), told
        assert [bool(p.grad.any()) for p in again.parameters()] == [numel > 8, *[False] * 4]
    old["states"]["bucket7.0"]["residual"] += 1
    _, wrapped, state = squares(named=False)
    state.load_state_dict(old)
    with pytest.warns(UserWarning, match=r"'bucket7\.0' is not in this job"):
        wrapped(draw).square().mean().backward()
    assert list(state.state_dict()["states"]) == [f"{i}.weight" for i in range(5)]


def case_what_was_saved_of_another_model_is_forgotten_with_a_warning_without_names_too():
    started()
    state, _ = backward_with_feedback()
    kept = state.state_dict()
    kept["states"] = {"x.weight": kept["states"].pop("0.weight"), **kept["states"]}
    own = layers()
    wrapped = DistributedDataParallel(own)
    state, hook = hvd.ddp_hook("topk(ratio=0.05) | ef")
    state.load_state_dict(kept)
    wrapped.register_comm_hook(state, hook)
    with pytest.warns(UserWarning, match=r"'x\.weight' is not in this job"):
        wrapped(numbers(0)).square().mean().backward()
    assert sorted(state.state_dict()["states"]) == ["0.weight", "2.weight"]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        state.load_state_dict(kept)  # at once, when the model is known
    assert any("'x.weight' is not in this job" in str(each.message) for each in caught)


def case_a_hook_that_is_found_in_no_model_forgets_what_nobody_takes():
    """Such as one that was not registered by DDP's own method."""
    started()
    state, _ = backward_with_feedback()
    kept = state.state_dict()
    wrapped = DistributedDataParallel(layers())
    state, hook = hvd.ddp_hook("topk(ratio=0.05) | ef")
    state.load_state_dict(kept)
    with mock.patch.object(ddp_state, "names_in_ddp", return_value={}):
        wrapped.register_comm_hook(state, hook)
        with pytest.warns(UserWarning, match=r"'0\.weight' is not in this job"):
            wrapped(numbers(0)).square().mean().backward()
        wrapped.zero_grad()
        wrapped(numbers(1)).square().mean().backward()
    assert len(state.state_dict()["states"]) == 2
    assert all(name.startswith("bucket") for name in state.state_dict()["states"])


def case_names_that_are_found_on_some_ranks_alone_are_used_on_none():
    started()
    wrapped = DistributedDataParallel(layers())
    state, hook = hvd.ddp_hook("topk(ratio=0.05) | ef")
    wrapped.register_comm_hook(state, hook)
    found = {} if hvd.rank() == 1 else dict(wrapped.module.named_parameters())
    with mock.patch.object(ddp_state, "names_in_ddp", return_value=found):
        wrapped(numbers(0)).square().mean().backward()
    assert all(name.startswith("bucket") for name in state.state_dict()["states"])


def case_ranks_count_alike_after_loading_rank_0s_file():
    """Shared random numbers depend on the count: ranks that differ would add up other entries."""
    started()
    own = layers()
    wrapped = DistributedDataParallel(own)
    state, hook = hvd.ddp_hook("randomk(ratio=0.3) | scaled | ef", own.named_parameters())
    wrapped.register_comm_hook(state, hook)
    for step in range(3):
        wrapped(numbers(step)).square().mean().backward()
    kept = hvd.broadcast_object(state.state_dict(), 0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state.load_state_dict(kept)
    steps = [each["step"] for name, each in state._states().items() if "weight" in name]
    assert steps == [3, 3]


def stepping(spec):
    """Return a model of its own, what trains it for a step, and the hook's state."""
    own = layers()
    wrapped = DistributedDataParallel(own)
    state, hook = hvd.ddp_hook(spec, own.named_parameters())
    wrapped.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.05)

    def step(number):
        optimizer.zero_grad()
        wrapped(numbers(number)).square().mean().backward()
        optimizer.step()

    return own, step, state


def case_a_state_that_one_rank_alone_loads_after_the_first_step_is_refused():
    """PowerSGD's factors are in common: replicas would part, and nobody would be told."""
    started()
    own, train, state = stepping("powersgd(rank=1) | ef")
    train(0)
    kept = state.state_dict()
    for step in range(1, 3):
        train(step)
    if hvd.rank() == 0:
        state.load_state_dict(kept)
    for _ in range(2):
        with pytest.raises(Mismatch, match="load on every rank what that rank saved") as told:
            train(3)
        assert len(set(hvd.allgather_object(str(told.value)))) == 1
    if hvd.rank() != 0:
        state.load_state_dict(kept)
    for step in range(3, 6):
        train(step)
    assert hvd.replicas_equal(own.state_dict())
    state.load_state_dict(state.state_dict())
    train(6)
    assert hvd.replicas_equal(own.state_dict())


def case_files_of_other_steps_on_some_ranks_part_no_replicas():
    """Such as after a crash between two ranks' saving: signs, places and turns depend on steps."""
    started()
    for spec in ("randomk(ratio=0.3) | scaled | ef", "acpsgd(rank=2) | ef", "int8 | ef21"):
        files = []
        own, step, state = stepping(spec)
        for number in range(4):
            step(number)
            files.append(state.state_dict())
        mixed = files[1 if hvd.rank() == 0 else 2]
        own, step, state = stepping(spec)
        state.load_state_dict(mixed)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what ranks had in common
            for number in range(3):
                step(number)
        assert hvd.replicas_equal(own.state_dict()), spec
        state.load_state_dict(mixed)
        with pytest.raises(Mismatch, match="load on every rank what that rank saved") as told:
            step(3)
        assert len(set(hvd.allgather_object(str(told.value)))) == 1
        state.load_state_dict(files[3])
        for number in range(3):
            step(number)
        assert hvd.replicas_equal(own.state_dict()), spec


def case_a_state_that_one_rank_alone_loads_after_a_first_step_that_failed_is_refused():
    started()
    spec = "int8 | ef21"
    _, step, state = stepping(spec)
    step(0)
    kept = state.state_dict()
    own, step, state = stepping(spec)
    asked = state._runtime.engine.submit_all
    if hvd.rank() == 1:
        other = {
            "side_effect": lambda items: asked([(replace(q, spec="int8"), *m) for q, *m in items])
        }
    else:
        other = {"side_effect": asked}
    with mock.patch.object(state._runtime.engine, "submit_all", **other), pytest.raises(Mismatch):
        step(0)
    if hvd.rank() == 0:
        state.load_state_dict(kept)
    with pytest.raises(Mismatch, match="load on every rank what that rank saved"):
        step(0)
    state.load_state_dict(kept)
    step(0)
    assert hvd.replicas_equal(own.state_dict())


def case_names_that_ranks_do_not_share_are_told():
    """Nobody would be asked for what the others wait for."""
    started()
    own = layers()
    wrapped = DistributedDataParallel(own)
    named = own.named_parameters() if hvd.rank() == 0 else None
    wrapped.register_comm_hook(*hvd.ddp_hook("int8 | ef", named))
    for _ in range(2):
        wrapped.zero_grad()
        with pytest.raises(Mismatch, match=r"names.*rank 0: 4.*rank 1: 0.*on all ranks") as told:
            wrapped(numbers(0)).square().mean().backward()
        assert len(set(hvd.allgather_object(str(told.value)))) == 1


def case_a_model_with_a_hook_is_copied_and_pickled():
    started()
    wrapped = DistributedDataParallel(layers())
    state, hook = hvd.ddp_hook("topk(ratio=0.05) | ef")
    wrapped.register_comm_hook(state, hook)
    wrapped(numbers(0)).square().mean().backward()
    mean = torch.optim.swa_utils.AveragedModel(wrapped)
    mean.update_parameters(wrapped)
    assert torch.equal(mean(numbers(1)), wrapped(numbers(1)))
    file = io.BytesIO()
    torch.save([wrapped, state, hook], file)
    file.seek(0)
    again, kept, same = torch.load(file, weights_only=False)
    assert torch.equal(again(numbers(1)), wrapped(numbers(1)))
    norm = state.residual_norm()
    wrapped(numbers(1)).square().mean().backward()
    assert state.residual_norm() != norm
    state.load_state_dict(kept.state_dict())
    assert state.residual_norm() == norm > 0
    stale = DistributedDataParallel(layers())
    stale.register_comm_hook(kept, same)
    with pytest.raises(RuntimeError, match=r"loaded from a pickle.*load_state_dict"):
        stale(numbers(0)).sum().backward()


def case_two_who_reduce_the_same_gradients_are_refused():
    started()
    own = layers()
    wrapped = DistributedDataParallel(own)
    inner = torch.optim.SGD(own.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(inner, own.named_parameters())
    with pytest.raises(RuntimeError, match=r"DistributedDataParallel reduces.*hvd\.ddp_hook"):
        wrapped(numbers(0)).sum().backward()
    del optimizer, wrapped
    own = layers()
    wrapped = DistributedDataParallel(own)
    inner = torch.optim.SGD(own.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(inner, own.named_parameters(), op=hvd.Adasum)
    wrapped(numbers(0)).sum().backward()
    before = [p.detach().clone() for p in own.parameters()]
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"DistributedDataParallel reduces.*hvd\.ddp_hook"):
            optimizer.step()
        assert all(map(torch.equal, before, own.parameters()))
    del optimizer, wrapped
    own = layers()
    wrapped = DistributedDataParallel(own)
    gc.disable()
    try:
        del wrapped  # its circles keep it until the collector runs
        inner = torch.optim.SGD(own.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(inner, own.named_parameters())
        own(numbers(0)).sum().backward()
        optimizer.step()
    finally:
        gc.enable()
    sharded = layers()
    fully_shard(sharded)
    inner = torch.optim.SGD(sharded.parameters(), lr=0.1)
    with pytest.raises(TypeError, match=r"DTensor.*hvd\.compress_fsdp"):
        hvd.DistributedOptimizer(inner, sharded.named_parameters())


def case_a_model_of_fsdp1_is_refused_with_what_to_do():
    """Ranks hold other elements of its parameters, whose mean would be nonsense."""
    started()

    def sharded():
        layer = torch.nn.Linear(8, 300, bias=False)  # whose halves have one shape
        return FullyShardedDataParallel(layer, use_orig_params=True, device_id=torch.device("cpu"))

    own = sharded()
    inner = torch.optim.SGD(own.parameters(), lr=0.1)
    for call in (
        lambda: hvd.DistributedOptimizer(inner, own.named_parameters()),
        lambda: hvd.DistributedOptimizer(inner),
        lambda: hvd.DiLoCo(inner, own.named_parameters()),
        lambda: hvd.OneBitAdam(own.named_parameters(), lr=0.1),
        lambda: hvd.broadcast_parameters(own.named_parameters()),
    ):
        with pytest.raises(TypeError, match=r"shards it.*call hvd\.compress_fsdp\(model"):
            call()
    whole = FullyShardedDataParallel(
        layers(), device_id=torch.device("cpu"), sharding_strategy=ShardingStrategy.NO_SHARD
    )
    for model in own, whole:
        model.register_comm_hook(*hvd.ddp_hook("int8 | ef"))
        with pytest.raises(RuntimeError, match=r"flat gradient.*call hvd\.compress_fsdp\(model"):
            model(numbers(0)).square().mean().backward()


def case_optimizer_states_sharded_by_torch():
    """Each rank steps on a part of the parameters, and sends that to the others by itself."""
    from torch.distributed.optim import ZeroRedundancyOptimizer  # which warns of torch.jit

    started()

    def trained(zero):
        own = layers()
        inner = torch.optim.Adam(own.parameters(), lr=0.01)
        if zero:
            inner = ZeroRedundancyOptimizer(own.parameters(), torch.optim.Adam, lr=0.01)
        optimizer = hvd.DistributedOptimizer(inner, own.named_parameters(), compression="int8 | ef")
        for i in range(4):
            optimizer.zero_grad()
            own(numbers(i)).square().mean().backward()
            optimizer.step()
        assert hvd.replicas_equal(own.state_dict())
        return own, optimizer

    (plain, _), (own, optimizer) = trained(zero=False), trained(zero=True)
    for ours, exact in zip(own.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, exact)
    optimizer.consolidate_state_dict(to=0)
    if hvd.rank() == 0:
        assert optimizer.state_dict().keys() >= {"state", "param_groups", "ringlet"}
    half = layers().bfloat16()
    zero = ZeroRedundancyOptimizer(half.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match=r"would not see the float32 masters.*amp_bf16"):
        hvd.DistributedOptimizer(zero, half.named_parameters(), precision="bf16")
    zero = ZeroRedundancyOptimizer(own.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match="part of the parameters alone: op=Adasum"):
        hvd.DistributedOptimizer(zero, own.named_parameters(), op=hvd.Adasum)
    with pytest.raises(ValueError, match="part of the parameters alone: DiLoCo"):
        hvd.DiLoCo(zero, own.named_parameters())


class Branches(torch.nn.Module):
    """Two layers of which a step uses one."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.branches = torch.nn.ModuleList(torch.nn.Linear(8, 200) for _ in range(2))

    def forward(self, x, which):
        return self.branches[which](x)


def mean_over_ranks(values):
    return hvd.allreduce(values, op=hvd.Average)


def case_what_was_held_back_for_parameters_that_nobody_uses_is_not_lost():
    started()
    for view, to_none in ((False, True), (False, False), (True, True), (True, False)):
        own, alone = Branches(), Branches()
        wrapped = DistributedDataParallel(
            own, find_unused_parameters=True, gradient_as_bucket_view=view
        )
        state, hook = hvd.ddp_hook("topk(ratio=0.05) | ef", own.named_parameters())
        wrapped.register_comm_hook(state, hook)
        delivered, wanted = (
            {n: torch.zeros_like(p) for n, p in own.named_parameters()} for _ in range(2)
        )
        for step in range(6):
            own.zero_grad(set_to_none=to_none)
            alone.zero_grad()
            for model in (wrapped, alone):
                model(numbers(step), step // 2 % 2).square().mean().backward()
            for name, p in own.named_parameters():
                if p.grad is not None:
                    delivered[name] += p.grad
            for name, p in alone.named_parameters():
                if p.grad is not None:
                    wanted[name] += p.grad
            grads = {n: p.grad for n, p in own.named_parameters() if p.grad is not None}
            assert hvd.replicas_equal(grads)
        kept = state.state_dict()["states"]
        for name, given in delivered.items():
            held = kept.get(name, {}).get("residual")
            owed = torch.zeros_like(given) if held is None else held.view(given.shape)
            assert torch.allclose(
                given + mean_over_ranks(owed), mean_over_ranks(wanted[name]), atol=1e-5
            ), (name, view, to_none)


def case_gradients_that_add_up_over_steps_hold_what_was_held_back_once():
    """Without ``zero_grad`` or ``no_sync`` DDP sends again what earlier steps have left."""
    started()
    for view in (False, True):
        own, alone = Branches(), Branches()
        options = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
        wrapped = DistributedDataParallel(own, **options)
        state, hook = hvd.ddp_hook("topk(ratio=0.05) | ef", own.named_parameters())
        wrapped.register_comm_hook(state, hook)
        for step in range(5):
            for model in (wrapped, alone):
                model(numbers(step), step % 2).square().mean().backward()
        kept = state.state_dict()["states"]
        for (name, p), q in zip(own.named_parameters(), alone.parameters(), strict=True):
            owed = torch.zeros_like(p)
            if name in kept:
                owed = kept[name]["residual"].view(p.shape)
            wanted = mean_over_ranks(q.grad)
            assert torch.allclose(p.grad + mean_over_ranks(owed), wanted, atol=1e-5), (name, view)


class Pixels(torch.nn.Module):
    """A convolution, which a step may do without, over a line that it always uses."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.line = torch.nn.Linear(8, 8)
        self.seen = torch.nn.Conv2d(8, 32, 3).to(memory_format=torch.channels_last)

    def forward(self, x, use):
        x = self.line(x)
        return self.seen(x[:, :, None, None].expand(-1, -1, 3, 3)) if use else x


def case_what_was_held_back_goes_to_its_place_in_another_memory_format():
    started()
    for view in (False, True):
        own, alone = Pixels(), Pixels()
        wrapped = DistributedDataParallel(
            own, find_unused_parameters=True, gradient_as_bucket_view=view
        )
        hook = hvd.ddp_hook("topk(ratio=0.5) | ef", own.named_parameters())
        wrapped.register_comm_hook(*hook)
        given = torch.zeros_like(own.seen.weight)
        for step in range(2):
            own.zero_grad()
            wrapped(numbers(0), not step).square().mean().backward()
            given += own.seen.weight.grad
        alone(numbers(0), True).square().mean().backward()
        assert torch.allclose(given, mean_over_ranks(alone.seen.weight.grad), atol=1e-6), view


def case_what_was_saved_in_one_memory_format_goes_on_in_another():
    started()

    def made(format_, spec):
        own = Pixels().to(memory_format=format_)
        wrapped = DistributedDataParallel(own)
        state, hook = hvd.ddp_hook(spec, own.named_parameters())
        wrapped.register_comm_hook(state, hook)
        return own, wrapped, state

    def backward(own, wrapped, factor):
        own.zero_grad()
        (factor * wrapped(numbers(0), True).square().mean()).backward()
        return own.seen.weight.grad

    formats = torch.contiguous_format, torch.channels_last
    for before, after in (formats, formats[::-1]):
        for dtype, off in (("fp32", 0), ("int8", 2**-6)):  # the latter in blocks of its own
            spec = f"topk(ratio=0.5) | ef(dtype={dtype!r})"
            own, wrapped, state = made(before, spec)
            backward(own, wrapped, 1.0)
            kept = state.state_dict()
            wanted = backward(own, wrapped, 0.0)  # half of what was held back
            assert wanted.any()
            for late in (False, True):
                own, wrapped, state = made(after, spec)
                if late:
                    backward(own, wrapped, 3.0)
                state.load_state_dict(kept)
                difference = (backward(own, wrapped, 0.0) - wanted).abs().max()
                assert difference <= off * wanted.abs().max(), (before, spec, late)
    own, wrapped, state = made(formats[0], "powersgd | ef")
    backward(own, wrapped, 1.0)
    kept = state.state_dict()
    assert not kept["orders"]
    own, wrapped, state = made(formats[1], "powersgd | ef")
    state.load_state_dict(kept)
    told = r"'seen.weight' was saved in another memory format; powersgd \| ef forgets \['right'\]"
    with pytest.warns(UserWarning, match=told):
        backward(own, wrapped, 1.0)
    order = {"seen.weight": [0, 2, 3, 1]}
    assert state.state_dict()["orders"] == order
    own, wrapped, again = made(formats[1], "powersgd | ef")
    again.load_state_dict(state.state_dict())
    assert again.state_dict()["orders"] == order  # which no gradient has told yet


def case_what_is_frozen_in_mid_training_stays_as_it_is():
    started()
    own = Branches()
    wrapped = DistributedDataParallel(own, find_unused_parameters=True)
    wrapped.register_comm_hook(*hvd.ddp_hook("topk(ratio=0.05) | ef", own.named_parameters()))
    for which in (0, 1):
        own.zero_grad()
        wrapped(numbers(which), which).square().mean().backward()
        own.branches[0].requires_grad_(False)
    assert own.branches[0].weight.grad is None


def case_what_one_rank_alone_freezes_is_refused_where_something_is_held_back():
    """The others would get what is owed to a layer that nobody uses, and it would not."""
    started()
    own = Branches()
    wrapped = DistributedDataParallel(own, find_unused_parameters=True)
    wrapped.register_comm_hook(*hvd.ddp_hook("topk(ratio=0.05) | ef", own.named_parameters()))

    def gradients():
        own.zero_grad()
        wrapped(numbers(0), 1).square().mean().backward()
        return {n: p.grad for n, p in own.named_parameters() if p.grad is not None}

    wrapped(numbers(0), 0).square().mean().backward()
    own.branches[0].requires_grad_(hvd.rank() == 0)
    with pytest.raises(Mismatch, match=r"'ddp\S+branches.0.weight'.*rank 1: frozen.*requires_grad"):
        gradients()
    own.branches[0].requires_grad_(True)
    found = gradients()
    assert "branches.0.weight" in found
    assert hvd.replicas_equal(found)


class TwoDtypes(torch.nn.Module):
    """Layers of two dtypes, which DDP puts in two buckets."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.narrow, self.wide = torch.nn.Linear(8, 40), torch.nn.Linear(40, 40).double()

    def forward(self, x):
        return self.wide(self.narrow(x).double())


def case_a_static_graph_needs_no_names():
    """In its first step all buckets have one number."""
    started()
    own = TwoDtypes()
    wrapped = DistributedDataParallel(own, static_graph=True)
    state, hook = hvd.ddp_hook("topk(ratio=0.05) | ef")
    wrapped.register_comm_hook(state, hook)
    for step in range(2):
        wrapped(numbers(step)).square().mean().backward()
    assert len(set(state._names.values())) == 4


def case_another_process_group_than_the_jobs():
    started()
    alone = [dist.new_group([rank]) for rank in range(hvd.size())][hvd.rank()]
    everybody = dist.new_group()
    for model, inputs in ((layers, numbers), (Words, words)):
        for group in (alone, everybody):
            grads = []
            for compressed in (False, True):
                own = model()
                wrapped = DistributedDataParallel(own, process_group=group)
                if compressed:
                    hook = hvd.ddp_hook("none", own.named_parameters(), process_group=group)
                    wrapped.register_comm_hook(*hook)
                wrapped(inputs(0)).square().mean().backward()
                grads.append(torch.cat([p.grad.to_dense().flatten() for p in own.parameters()]))
            assert torch.allclose(*grads, atol=1e-6)


def case_another_process_group_than_the_models_is_refused():
    """Replicas would part where the hook's is smaller, and models be mixed where it is larger."""
    started()
    alone = [dist.new_group([rank]) for rank in range(hvd.size())][hvd.rank()]
    everybody = ", ".join(map(str, range(hvd.size())))
    for model, inputs in ((layers, numbers), (lambda: Words().table, words)):
        for of_model, of_hook in ((None, alone), (alone, None)):
            wrapped = DistributedDataParallel(model(), process_group=of_model)
            wrapped.register_comm_hook(*hvd.ddp_hook("none", process_group=of_hook))
            texts = [f"ranks {everybody}", f"rank {hvd.rank()}"]
            over, hook_over = texts if of_model is None else texts[::-1]
            for _ in range(2):
                with pytest.raises(
                    RuntimeError, match=f"over {over}, but its ddp_hook over {hook_over}: pass the"
                ):
                    wrapped(inputs(0)).square().mean().backward()


def case_names_of_another_model_are_refused():
    """Of a mapping nothing but "*" would count, without a word."""
    started()
    mapping = {"*.weight": "fp16", "*": "topk(ratio=0.05) | ef"}
    for model, inputs in ((layers, numbers), (Words, words)):
        own, other = model(), model()
        for named in (other.named_parameters(), list(own.named_parameters())[:1]):
            wrapped = DistributedDataParallel(own)
            wrapped.register_comm_hook(*hvd.ddp_hook(mapping, named))
            for _ in range(2):
                with pytest.raises(ValueError, match=r"does not name .* of the model that is"):
                    wrapped(inputs(0)).square().mean().backward()
        wrapped = DistributedDataParallel(own)
        wrapped.register_comm_hook(*hvd.ddp_hook(mapping, own.named_parameters()))
        wrapped(inputs(0)).square().mean().backward()


def case_what_ddp_hook_is_not_for_is_told():
    """Before ranks wait for each other."""
    started()
    wrapped = DistributedDataParallel(torch.nn.Linear(8, 8))
    state, hook = hvd.ddp_hook("int8")
    wrapped.register_comm_hook(None, hook)
    with pytest.raises(TypeError, match=r"register both, with .*, not the hook with None"):
        wrapped(torch.ones(2, 8)).square().mean().backward()
    with pytest.raises(TypeError, match=r"process_group is what .*new_group.*, not \[0, 1\]"):
        hvd.ddp_hook("int8", process_group=[0, 1])
    for load in (state.load_state_dict, lambda given: state.load_sharded([given, given])):
        with pytest.raises(ValueError, match="not what state_dict"):
            load(wrapped.state_dict())


def case_what_does_not_fit_the_named_parameters_is_told_before_the_first_step():
    """And forgotten: it failed every backward."""
    started()
    kept = []
    for width in (64, 32):
        own = torch.nn.Sequential(torch.nn.Linear(width, 48), torch.nn.Linear(48, 48))
        state, hook = hvd.ddp_hook("topk(ratio=0.05) | ef", own.named_parameters())
        if kept:
            with pytest.warns(UserWarning, match=r"0\.weight"):
                state.load_state_dict(kept[0])
        wrapped = DistributedDataParallel(own)
        wrapped.register_comm_hook(state, hook)
        for _ in range(2):
            wrapped(torch.ones(4, width)).square().mean().backward()
        kept.append(state.state_dict())
    assert kept[1]["states"]["1.weight"]["residual"].numel() == 48 * 48
    assert kept[1]["states"]["0.weight"]["residual"].numel() == 32 * 48


def case_one_gradient_at_a_time_is_refused():
    """So does torch.compile with optimize_ddp = "python_reducer"."""
    started()
    state, hook = hvd.ddp_hook("none")
    p = torch.nn.Parameter(torch.ones(3))
    with pytest.raises(RuntimeError, match=r"python_reducer.*optimize_ddp as it is"):
        hook(state, (torch.ones(3), p))


def case_who_waits_for_ranks_without_a_hook_says_so():
    """Rank 1 comes once rank 0 has told of it; in truth it would never come."""
    started()
    told = Path(hvd.broadcast_object(tempfile.mkdtemp() if hvd.rank() == 0 else None)) / "told"

    class Telling(logging.Handler):
        def emit(self, record):
            if "has waited" in record.getMessage():
                told.with_suffix(".part").write_text(record.getMessage())
                told.with_suffix(".part").rename(told)

    handler = Telling()
    if hvd.rank() == 0:  # rank 1 may have to wait as long, for a machine that is busy
        logging.getLogger("ringlet").addHandler(handler)
    with mock.patch.dict(os.environ, {"RINGLET_STALL_CHECK_TIME_SECONDS": "0.2"}):
        if hvd.rank() == 1:
            deadline = time.monotonic() + 60
            while not told.exists() and time.monotonic() < deadline:
                time.sleep(0.02)
        hvd.ddp_hook("int8")
    logging.getLogger("ringlet").removeHandler(handler)
    assert "rank 0 has waited 0.2 s in hvd.ddp_hook() for the other 1 rank(s)" in told.read_text()


def case_a_model_that_is_gone_leaves_no_residuals():
    started()
    state, wrapped = backward_with_feedback()
    states = list(state._states().values())
    assert any("residual" in each for each in states)
    del wrapped, state
    limit = time.monotonic() + 30  # the engine's thread may not have returned from the last bucket
    while any(states) and time.monotonic() < limit:
        gc.collect()
    assert not any(states)


def case_a_warmup_is_followed():
    started()

    def gradients(spec):
        torch.manual_seed(0)
        model = DistributedDataParallel(torch.nn.Linear(60, 60))
        model.register_comm_hook(*hvd.ddp_hook(spec, model.named_parameters()))
        found = []
        for step in range(4):
            model.zero_grad()
            model(torch.full((1, 60), float(hvd.rank() + step))).square().sum().backward()
            found.append(model.module.weight.grad.clone())
        return found

    exact, found = gradients("none"), gradients("topk(ratio=0.01) | ef | warmup(dense=3)")
    kept = [torch.equal(a, b) for a, b in zip(exact, found, strict=True)]
    assert kept == [True, True, True, hvd.size() == 1]
    with pytest.raises(ValueError, match="follows a schedule"):
        hvd.allreduce(torch.ones(2000), compression="topk(ratio=0.01) | warmup(dense=3)")


def case_a_parameter_that_is_gone_leaves_its_name_to_no_other():
    started()
    gone = torch.nn.Parameter(torch.zeros(3))
    state, _ = hvd.ddp_hook("int8 | ef", {"first": gone})
    address = id(gone)
    assert state._names[address] == "first"
    del gone
    gc.collect()
    assert address not in state._names  # another tensor may have it on one rank, and not on others


def case_a_group_of_elastic_run_reduces_as_torchs_own_does():
    started()

    class Spread(torch.nn.Module):
        """With buffers, and a layer that is used now and then."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(hvd.rank())  # DDP makes replicas alike
            self.inner, self.norm = layers(), torch.nn.BatchNorm1d(8)
            self.spare = torch.nn.Linear(8, 8)
            self.uses = iter(range(9))

        def forward(self, x):
            x = self.norm(self.inner(x))
            return self.spare(x) if next(self.uses) % 2 else x

    @hvd.elastic.run
    def trained(state, group):
        found = train(
            state.model, "int8 | ef", numbers, process_group=group(), find_unused_parameters=True
        )
        return torch.cat([found, *(b.flatten() for b in state.model.norm.buffers())])

    wanted, found = (
        trained(hvd.elastic.TorchState(Spread()), group)
        for group in (lambda: None, hvd.elastic.process_group)
    )
    assert torch.equal(wanted, found)


def case_a_group_of_elastic_run_says_what_it_cannot():
    with pytest.raises(ValueError, match="outside of the function that"):
        hvd.elastic.process_group()

    @hvd.elastic.run
    def inside(state):
        group, values = hvd.elastic.process_group(), torch.tensor([1.0 + hvd.rank()])
        group.allreduce(values).wait()
        assert values.item() == 3.0
        options = dist.AllreduceOptions()
        options.reduceOp = dist.ReduceOp.BAND
        with pytest.raises(ValueError, match="reduces by SUM, AVG, MIN, MAX only"):
            group.allreduce([values], options)
        group.barrier().wait()
        # What ranks disagree about is an error behind the backward pass, of its class.
        p = torch.ones(2, requires_grad=True)
        p.register_hook(lambda grad: group.allreduce([torch.ones(1 + hvd.rank())]).wait() and None)
        with pytest.raises(Mismatch):
            p.sum().backward()
        assert p.grad is not None
        # Torch has no group of its own, perhaps, and DDP is found all the same.
        own = layers()
        wrapped = DistributedDataParallel(own, process_group=group)
        base = torch.optim.SGD(own.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(base, own.named_parameters())
        with (
            mock.patch.object(dist, "is_initialized", return_value=False),
            pytest.raises(RuntimeError, match="DistributedDataParallel reduces the gradients of"),
        ):
            wrapped(numbers(0)).sum().backward()
        del optimizer

    inside(hvd.elastic.ObjectState())


def case_a_newcomer_forgets_what_it_loads_into_a_hook_of_an_elastic_job():
    """What a checkpoint held back, which the others have gone on from; all may go back to it."""
    own, spec = layers(), "topk(ratio=0.1) | ef"
    named, state = dict(own.named_parameters()), hvd.elastic.TorchState(own)

    @hvd.elastic.run
    def epoch(_, step, load=None, held=None):
        """Take a step, with what is ``held`` before; return the hook's record, and warnings."""
        wrapped = DistributedDataParallel(own, process_group=hvd.elastic.process_group())
        kept, hook = hvd.ddp_hook(spec, own.named_parameters())
        wrapped.register_comm_hook(kept, hook)
        if load is not None:
            kept.load_state_dict(load)
        given = torch.autograd.grad(own(numbers(step)).square().mean(), [*named.values()])
        own.zero_grad()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            wrapped(numbers(step)).square().mean().backward()
        after = kept.state_dict()
        for (name, p), grad in zip(named.items(), given, strict=True):
            owed = grad.flatten() + residual_of(held, name) - residual_of(after, name)
            wanted = hvd.allreduce(owed, op=hvd.Average, name=f"owed.{name}")
            torch.testing.assert_close(p.grad.flatten(), wanted)
        return after, [str(each.message) for each in caught if "pay it" in str(each.message)]

    def residual_of(record, name):
        held = record["states"].get(name, {}) if record else {}
        return held.get("residual", torch.zeros(named[name].numel()))

    with (
        mock.patch.object(elastic_state, "is_elastic", return_value=True),
        mock.patch.object(ddp_state, "is_elastic", return_value=True),
    ):
        first, _ = epoch(state, 0)
        second, _ = epoch(state, 1, None, first)
        newcomer = hvd.rank() == 1
        if newcomer:
            memory_of(own).memory.forget()
        told = epoch(state, 2, first if newcomer else None, None if newcomer else second)[1]
        assert len(told) == newcomer
        assert epoch(state, 3, second, second)[1] == []


CASES = [value for name, value in list(globals().items()) if name.startswith("case_")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_"))
def test_ddp(run_case, case):
    run_case(case, "gloo", 2)


LACKING = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import ringlet.torch as hvd
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(64, 10))
if dist.get_rank() == 0:
    model.register_comm_hook(*hvd.ddp_hook("int8 | ef"))
model(torch.randn(8, 64)).sum().backward()
"""


def test_a_hook_that_one_rank_lacks_ends_the_job_where_stalls_do(tmp_path):
    (tmp_path / "lacking.py").write_text(LACKING)
    command = [sys.executable, "-m", "ringlet", "run", "-np", "2", sys.executable, "lacking.py"]
    env = os.environ | {"RINGLET_STALL_SHUTDOWN_TIME_SECONDS": "2"}
    done = subprocess.run(
        command, env=env, cwd=tmp_path, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 1, done.stderr
    assert "rank 0 has waited 2 s in hvd.ddp_hook() for the other 1 rank(s)" in done.stderr
    assert "RINGLET_STALL_SHUTDOWN_TIME_SECONDS ends such a wait" in done.stderr
