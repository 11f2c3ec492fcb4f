"""DistributedOptimizer: checkpoints, loss scaling, abandoned steps, groups of parameters."""

from __future__ import annotations

import copy
import io
import time
import warnings
from collections import Counter

import pytest
import torch
from torch.distributed.checkpoint.state_dict import (
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import ringlet.torch as hvd
from ringlet.compressors import parse
from ringlet.ring.errors import Mismatch
from ringlet.ring.rendezvous import epochs
from ringlet.shared.compression import as_router
from ringlet.torch.elastic import state as elastic_state
from ringlet.torch.parameters import checkpoint

pytestmark = pytest.mark.preloaded("torch")


def model(seed=0):
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(48, 96), torch.nn.Tanh(), torch.nn.Linear(96, 8))


def wrapped(own, compression="topk(ratio=0.05) | ef", base=torch.optim.Adam, **options):
    return hvd.DistributedOptimizer(
        base(own.parameters(), lr=0.01), own.named_parameters(), compression, **options
    )


def train(own, optimizer, steps, start=0):
    for step in range(start, start + steps):
        numbers = torch.Generator().manual_seed(100 * step + hvd.rank())
        optimizer.zero_grad()
        own(torch.randn(4, 48, generator=numbers)).square().mean().backward()
        optimizer.step()
    return torch.cat([p.detach().flatten() for p in own.parameters()])


def stored(state):
    """Return ``state`` as it comes back from a file, read without executing anything."""
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


def trained(spec):
    """Return a model after 3 steps, its optimizer, and the states of both as a file holds them."""
    own = model()
    optimizer = wrapped(own, spec)
    train(own, optimizer, 3)
    return own, optimizer, stored({"model": own.state_dict(), "optimizer": optimizer.state_dict()})


def continue_bit_for_bit(specs):
    for spec in specs:
        own, optimizer, kept = trained(spec)
        straight = train(own, optimizer, 3, start=3)
        again = model(1)
        resumed = wrapped(again, spec)
        again.load_state_dict(kept["model"])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            resumed.load_state_dict(kept["optimizer"])
        assert torch.equal(train(again, resumed, 3, start=3), straight), spec


# Three cases, as kernels for all of these take ten seconds of a processor to compile.
def case_a_sharded_checkpoint_continues_bit_for_bit():
    continue_bit_for_bit(("topk(ratio=0.05) | ef", "powersgd(rank=2) | ef", "fp16 | ef", "none"))


def case_a_checkpoint_of_narrow_residuals_continues_bit_for_bit():
    continue_bit_for_bit(
        ("topk(ratio=0.05) | ef(dtype='bf16')", "int4 | ef(dtype='int8', reset=4)")
    )


def case_a_checkpoint_of_random_numbers_or_a_schedule_continues_bit_for_bit():
    ramped = "topk(ratio=0.2) | warmup(steps=6)"
    continue_bit_for_bit(("int4(stochastic=True) | ef", "qsgd", ramped, f"{ramped} | ef"))


def case_a_state_that_is_loaded_before_wrapping_is_told_of():
    for spec, told in (("topk(ratio=0.05) | ef", 1), ("none", 0)):
        _, _, kept = trained(spec)
        own = model(1)
        plain = torch.optim.Adam(own.parameters(), lr=0.01)
        plain.load_state_dict(kept["optimizer"])
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            optimizer = hvd.DistributedOptimizer(plain, own.named_parameters(), spec)
        assert len(warned) == told
        assert all("wrap first, and load into" in str(each.message) for each in warned)
        assert all("remembers" not in key for group in plain.param_groups for key in group)
        train(own, optimizer, 1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.load_state_dict(kept["optimizer"])
            again = hvd.DistributedOptimizer(plain, own.named_parameters(), spec)
        assert again.residual_norm() == optimizer.residual_norm()


def case_torchs_get_state_dict_tells_what_it_leaves_out():
    own, optimizer, _ = trained("topk(ratio=0.05) | ef")
    norm, kept = optimizer.residual_norm(), optimizer.state_dict()["ringlet"]
    with pytest.warns(UserWarning, match="leaves out what compression holds back"):
        saved = stored(get_optimizer_state_dict(own, optimizer))
    again = model()
    resumed = wrapped(again)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # it holds nothing back yet that could be lost
        set_optimizer_state_dict(again, resumed, saved)
    resumed.load_state_dict({**resumed.state_dict(), "ringlet": kept})
    assert resumed.residual_norm() == norm > 0
    again.load_state_dict(own.state_dict())
    assert torch.equal(train(again, resumed, 2, start=3), train(own, optimizer, 2, start=3))


def case_torch_makes_adasums_state_on_one_rank_alone():
    """It takes a step of zeros, in which other ranks have no part."""
    own = model()
    inner = torch.optim.Adam(own.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(inner, own.named_parameters(), op=hvd.Adasum)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which wraps step
    before = [p.detach().clone() for p in own.parameters()]
    if hvd.rank() == 0:
        assert get_optimizer_state_dict(own, optimizer)["state"]
    assert all(map(torch.equal, before, own.parameters()))
    optimizer.zero_grad()
    own(torch.ones(4, 48)).sum().backward()
    optimizer.step()
    assert hvd.replicas_equal(own.state_dict())


def case_rank_0s_checkpoint_resets_residuals_with_a_warning():
    own = model()
    optimizer = wrapped(own)
    train(own, optimizer, 3)
    state = hvd.broadcast_object(stored(optimizer.state_dict()), 0)
    if hvd.rank() == 0:
        optimizer.load_state_dict(state)
        assert optimizer.residual_norm() > 0
    else:
        with pytest.warns(UserWarning, match="holds the residuals of rank 0"):
            optimizer.load_state_dict(state)
        assert optimizer.residual_norm() == 0
    train(own, optimizer, 2)
    hvd.broadcast_parameters(own.state_dict())
    plain = {k: v for k, v in state.items() if k != "ringlet"}
    with pytest.warns(UserWarning, match="holds no residuals"):
        optimizer.load_state_dict(plain)
    train(own, optimizer, 1)


def case_all_shards_at_once():
    own = model()
    optimizer = wrapped(own)
    train(own, optimizer, 3)
    shards = hvd.allgather_object(optimizer.state_dict())
    kept = copy.deepcopy(own.state_dict())
    straight = train(own, optimizer, 2, start=3)
    own.load_state_dict(kept)
    optimizer.load_sharded(shards)
    assert torch.equal(train(own, optimizer, 2, start=3), straight)
    with pytest.raises(ValueError, match=r"takes a list of all ranks' state_dicts.*, not dict"):
        optimizer.load_sharded(shards[0])
    with pytest.raises(ValueError, match="not an empty list"):  # a folder without files
        optimizer.load_sharded([])
    with pytest.raises(ValueError, match="state of every rank once"):
        optimizer.load_sharded([shards[0], shards[0]])
    with pytest.raises(ValueError, match="no 'param_groups'"):
        optimizer.load_sharded([kept] * hvd.size())


def case_all_shards_of_what_remembers_nothing():
    """So that a program need not ask what its compression remembers."""
    own = model()
    plain = wrapped(own, "fp16")
    train(own, plain, 3)
    shards = hvd.allgather_object(plain.state_dict())
    kept = copy.deepcopy(own.state_dict())
    straight = train(own, plain, 2, start=3)
    own.load_state_dict(kept)
    plain.load_sharded(shards)
    assert torch.equal(train(own, plain, 2, start=3), straight)
    with_feedback = wrapped(own)
    with_feedback.load_sharded(shards)
    train(own, with_feedback, 2)
    assert with_feedback.residual_norm() > 0
    with pytest.warns(UserWarning, match="holds no residuals"):
        with_feedback.load_sharded(shards)
    assert with_feedback.residual_norm() == 0


def case_shards_of_different_steps_are_refused_before_anything_is_loaded():
    """As a job leaves them that is killed while it saves: with those, replicas part."""
    own = model()
    optimizer = wrapped(own)
    train(own, optimizer, 3)
    older = hvd.allgather_object(optimizer.state_dict())
    train(own, optimizer, 2, start=3)
    shards = hvd.allgather_object(optimizer.state_dict())
    before = stored(optimizer.state_dict())
    mixed = [shards[0], *older[1:]]
    for more in (0, 1):  # ranks that there were once
        size = hvd.size() + more
        kept = [copy.deepcopy(state) for state in [*mixed, *older[1 : 1 + more]]]
        for rank, state in enumerate(kept):
            state["ringlet"] |= {"rank": rank, "size": size}
        others = ", ".join(map(str, range(1, size)))
        told = f"at one step, and got step 3: rank {others}; step 5: rank 0, as where a job ended"
        with pytest.raises(ValueError, match=told):
            optimizer.load_sharded(kept)
    after = stored(optimizer.state_dict())
    assert torch.equal(*(state["state"][0]["exp_avg"] for state in (before, after)))


def case_a_checkpoint_of_another_rank_goes_on_with_rows_that_fit():
    for ranks in ((8, 2), (2, 5)):
        before, after = (f"powersgd(rank={rank})" for rank in ranks)
        own = model()
        optimizer = wrapped(own, f"{before} | ef", base=torch.optim.SGD)
        train(own, optimizer, 3)
        saved, norm = stored(optimizer.state_dict()), optimizer.residual_norm()
        optimizer = wrapped(own, f"{after} | ef", base=torch.optim.SGD)
        lost = after == "powersgd(rank=2)"
        told = r"'0.weight' keeps 2 of the 8 rows of its 'right'"
        with pytest.warns(UserWarning, match=told) if lost else warnings.catch_warnings():
            warnings.simplefilter("always" if lost else "error", UserWarning)
            optimizer.load_state_dict(saved)
        assert optimizer.residual_norm() == norm
        train(own, optimizer, 20, start=3)
        assert hvd.replicas_equal(own.state_dict())


def case_a_checkpoint_of_another_spec_says_what_is_forgotten():
    own = model()
    optimizer = wrapped(own, "topk(ratio=0.05) | momentum_correction", base=torch.optim.SGD)
    train(own, optimizer, 2)
    saved = stored(optimizer.state_dict())
    optimizer = wrapped(own, "int8 | ef", base=torch.optim.SGD)
    told = r"'0.weight' was saved by 'topk\(ratio=0.05\) \| momentum_correction'; .* \['u', 'v'\]"
    with pytest.warns(UserWarning, match=told):
        optimizer.load_state_dict(saved)
    assert optimizer.residual_norm() == 0
    train(own, optimizer, 2, start=2)


def case_a_checkpoint_of_another_shape_says_so():
    own = model()
    optimizer = wrapped(own, "topk(ratio=0.05) | momentum_correction", base=torch.optim.SGD)
    train(own, optimizer, 2)
    saved = stored(optimizer.state_dict())
    other = torch.nn.Sequential(torch.nn.Linear(48, 960), torch.nn.Tanh(), torch.nn.Linear(960, 8))
    optimizer = wrapped(other, "topk(ratio=0.05) | momentum_correction", base=torch.optim.SGD)
    told = r"'0.weight' has 46080 elements; its 'u', float32\[4608\], is forgotten"
    with pytest.warns(UserWarning, match=told):
        optimizer.load_state_dict(saved)
    train(other, optimizer, 2, start=2)


def case_rank_0s_checkpoint_is_enough_where_nothing_is_remembered():
    specs = ["randomk(ratio=0.1)", "topk(ratio=0.02) | warmup(steps=4)", "fp16"]
    # Of more ranks, each holds back of its part of the sum.
    for spec in [*specs, "qsgd"] if hvd.size() == 2 else specs:
        own, optimizer, kept = trained(spec)
        kept = hvd.broadcast_object(kept, 0)
        straight = train(own, optimizer, 3, start=3)
        for loading in range(hvd.size()), [0]:
            again = model(seed=1)
            resumed = wrapped(again, spec)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                if hvd.rank() in loading:
                    again.load_state_dict(kept["model"])
                    resumed.load_state_dict(copy.deepcopy(kept["optimizer"]))
                hvd.broadcast_parameters(again.state_dict(), 0)
                hvd.broadcast_optimizer_state(resumed, 0)
            assert torch.equal(train(again, resumed, 3, start=3), straight), spec
    own = model()
    assert checkpoint.STATE_KEY not in wrapped(own, "fp16").state_dict()


def case_broadcasting_state_leaves_residuals_alone():
    own = model()
    optimizer = wrapped(own)
    train(own, optimizer, 2)
    before = optimizer.residual_norm()
    assert before > 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hvd.broadcast_optimizer_state(optimizer, 0)


def case_grad_scaler_needs_no_change():
    for spec in ("none", "fp16 | ef", "int8 | ef", "topk(ratio=0.05) | ef", "powersgd | ef"):
        own = model()
        optimizer = wrapped(own, spec, base=torch.optim.SGD)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        poisoned = 2
        for step in range(5):
            optimizer.zero_grad()
            numbers = torch.Generator().manual_seed(step + hvd.rank())
            loss = own(torch.randn(4, 48, generator=numbers)).square().mean()
            if step == poisoned and hvd.rank() == hvd.size() - 1:
                loss = loss * float("inf")
            before = [p.detach().clone() for p in own.parameters()]
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(own.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            moved = any(
                not torch.equal(a, b) for a, b in zip(before, own.parameters(), strict=True)
            )
            assert moved == (step != poisoned), (spec, step)
            assert torch.isfinite(torch.tensor(optimizer.residual_norm()))
        scales = hvd.allgather_object(scaler.get_scale())
        assert len(set(scales)) == 1
        assert hvd.replicas_equal(own.state_dict()), spec


def case_a_failed_backward_can_be_given_up():
    own = model()
    optimizer = wrapped(own, "int8 | ef")
    train(own, optimizer, 1)
    optimizer.zero_grad()
    if hvd.rank() == 0:
        out = own(torch.ones(2, 48))
        out.register_hook(lambda grad: None)
        own[0].weight.register_hook(_broken)
        with pytest.raises(KeyError, match="bad batch"):
            out.sum().backward()
        with pytest.raises(RuntimeError, match="abandon_step"):
            optimizer.zero_grad()
        optimizer.abandon_step("bad batch")
        own[0].weight._backward_hooks.clear()
    else:
        own(torch.ones(2, 48)).sum().backward()
        with pytest.raises(hvd.StepAbandoned, match="rank 0: abandoned: bad batch"):
            optimizer.step()
    train(own, optimizer, 2)
    assert hvd.replicas_equal(own.state_dict())


def case_a_step_that_was_reduced_is_taken_not_given_up():
    own = model()
    optimizer = wrapped(own, "none")
    train(own, optimizer, 1)
    optimizer.zero_grad()
    own(torch.ones(2, 48)).sum().backward()
    if hvd.rank() == 0:
        optimizer.step()
    hvd.barrier()  # all ranks have handed everything in, so rank 0's step is over
    if hvd.rank() != 0:
        with pytest.raises(RuntimeError, match="was reduced on all ranks before"):
            optimizer.abandon_step("too late")
        optimizer.step()
    train(own, optimizer, 2)
    assert hvd.replicas_equal(own.state_dict())


def case_a_step_is_given_up_before_its_first_gradient():
    own = model()
    optimizer = wrapped(own, "int8 | ef")
    train(own, optimizer, 1)
    for _ in range(2):  # twice in a row: the others are told twice
        optimizer.zero_grad()
        if hvd.rank() == 0:
            optimizer.abandon_step("the batch cannot be read")
            continue
        own(torch.ones(2, 48)).sum().backward()
        with pytest.raises(hvd.StepAbandoned, match="rank 0: abandoned: the batch cannot be read"):
            optimizer.step()
        optimizer.abandon_step("nothing: it was given up already")
    train(own, optimizer, 2)
    assert hvd.replicas_equal(own.state_dict())


def _broken(grad):
    raise KeyError("bad batch")


def case_a_dropped_optimizer_leaves_the_engine_alive():
    own = model()
    optimizer = wrapped(own, "int8 | ef")
    own(torch.ones(2, 48)).sum().backward()
    del optimizer
    hvd.barrier()
    train(own, wrapped(own, "int8 | ef"), 2)
    assert hvd.replicas_equal(own.state_dict())


def case_groups_of_parameters():
    reference = None
    for groups in (None, 1, 2, 100, "explicit"):
        own = model()
        chosen = [list(own[0].parameters())] if groups == "explicit" else groups
        # Not Adam, which makes steps of one size of gradients that are zero but for rounding.
        moved = train(own, wrapped(own, "none", torch.optim.SGD, groups=chosen), 3)
        reference = moved if reference is None else reference
        assert torch.allclose(moved, reference, atol=1e-6)
    own = model()
    for bad in ([[torch.ones(1)]], [[own[0].weight], [own[0].weight]], -1, [1]):
        with pytest.raises(ValueError, match="groups"):
            wrapped(own, "none", groups=bad)
    with pytest.warns(DeprecationWarning, match="groups=N"):
        wrapped(own, "none", num_groups=2)


def case_set_compression_carries_residuals_in_their_units():
    own = model()
    optimizer = wrapped(own, "fp16 | ef")
    train(own, optimizer, 2)
    before = optimizer.residual_norm()
    optimizer.set_compression("topk(ratio=0.1) | ef")
    assert optimizer.residual_norm() == pytest.approx(before * hvd.size(), rel=1e-5)
    train(own, optimizer, 2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer.set_compression("int8 | ef21")
    assert optimizer.residual_norm() == 0
    assert len(told) == (hvd.rank() == 0)
    assert all("ef21 forgets ['residual'" in str(each.message) for each in told)
    train(own, optimizer, 2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        optimizer.set_compression("int8(bucket=256) | ef21")
    assert not any("worker" in str(each.message) for each in told)
    train(own, optimizer, 2)
    assert hvd.replicas_equal(own.state_dict())


def case_a_refused_change_leaves_what_is_held_back():
    """Another spec than on other ranks, where it is set, and where an optimizer is wrapped anew."""
    own = model()
    inner = torch.optim.SGD(own.parameters(), lr=0.01)
    optimizer = hvd.DistributedOptimizer(inner, own.named_parameters(), "topk(ratio=0.05) | ef")
    train(own, optimizer, 2)

    def saved():
        stream = io.BytesIO()
        torch.save(optimizer.state_dict()["ringlet"], stream)
        return stream.getvalue()

    kept = saved()
    other = ("fp16 | ef", "int8 | ef")[hvd.rank() % 2]
    for refused in (
        lambda: optimizer.set_compression(other),
        lambda: hvd.DistributedOptimizer(inner, own.named_parameters(), other),
    ):
        with pytest.raises(Mismatch):
            refused()
        assert saved() == kept
        assert optimizer.residual_norm() > 0
    train(own, optimizer, 2, start=2)
    assert hvd.replicas_equal(own.state_dict())
    optimizer.set_compression("fp16 | ef")
    assert optimizer.residual_norm() > 0
    train(own, optimizer, 2, start=4)
    assert hvd.replicas_equal(own.state_dict())


def case_residuals_follow_the_predivide_factor():
    """What is held back is of gradients that were divided; it is paid back as it was owed."""
    n = 5000
    draw = torch.Generator().manual_seed(hvd.rank())
    x = torch.randn(n, generator=draw)
    owed = hvd.allreduce(x)

    def made(p, inner, ratio, factor):
        spec = f"topk(ratio={ratio}) | ef"
        return hvd.DistributedOptimizer(
            inner, [("p", p)], compression=spec, gradient_predivide_factor=factor
        )

    for way in ("wrapped again", "loaded", "sharded", "loaded from an older file"):
        p = torch.nn.Parameter(torch.zeros(n))
        inner = torch.optim.SGD([p], lr=0.0)
        then, now = (1.0, 4.0) if "older" not in way else (2.0, 2.0)
        optimizer = made(p, inner, 0.01, then)
        (p * x).sum().backward()
        optimizer.step()
        sent, kept = p.grad.clone(), optimizer.state_dict()
        if way != "wrapped again":
            p = torch.nn.Parameter(torch.zeros(n))
            inner = torch.optim.SGD([p], lr=0.0)
        optimizer = made(p, inner, 1.0, now)
        if "older" in way:
            del kept["ringlet"]["predivide"]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # another spec
            if "loaded" in way:
                optimizer.load_state_dict(kept)
            elif way == "sharded":
                optimizer.load_sharded(hvd.allgather_object(kept))
        optimizer.zero_grad()
        (p * 0.0).sum().backward()
        optimizer.step()
        torch.testing.assert_close(sent + p.grad, owed, rtol=1e-5, atol=1e-5, msg=way)


def case_hyperparameters_are_loaded_and_broadcast():
    for base in (torch.optim.SGD, torch.optim.AdamW):
        own = model()
        optimizer = wrapped(own, "int8 | ef", base=base)
        train(own, optimizer, 1)
        state = optimizer.state_dict()
        state["param_groups"][0]["lr"] = 0.001
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == 0.001
        optimizer.param_groups[0]["lr"] = 0.1 * (hvd.rank() + 1)
        hvd.broadcast_optimizer_state(optimizer, 0)
        assert optimizer.param_groups[0]["lr"] == 0.1
        train(own, optimizer, 2)
        assert hvd.replicas_equal(own.state_dict())


def case_horovods_way_to_resume():
    """Rank 0 loads alone: what it alone would remember of what is common is forgotten."""
    lost, parted = "the residuals of rank(s) 1", "what ranks have in common is forgotten on all"
    for spec, said in {
        "none": [], "randomk(ratio=0.1)": [], "int8 | ef": [lost],
        "topk(ratio=0.2) | warmup(steps=6) | ef": [lost], "powersgd(rank=2) | ef": [lost, parted],
        "acpsgd(rank=2) | ef": [lost, parted], "int8 | ef21": [lost, parted],
    }.items():  # fmt: skip
        _, _, kept = trained(spec)
        again = model(1)
        resumed = wrapped(again, spec)
        if hvd.rank() == 0:
            again.load_state_dict(kept["model"])
            resumed.load_state_dict(kept["optimizer"])
        hvd.broadcast_parameters(again.state_dict(), 0)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            hvd.broadcast_optimizer_state(resumed, 0)
            hvd.broadcast_optimizer_state(resumed, 0)  # what was told is not told again
        told = [str(w.message) for w in caught]
        assert len(told) == (bool(said) and hvd.rank() == 0), (spec, told)
        for text in told:
            assert all(words in text for words in said), text
            assert (parted in text) == (parted in said), text
            assert "Save and load optimizer.state_dict() on every rank" in text
            assert caught[0].filename == train.__code__.co_filename  # or cloudpickle's word for it
        kept_some = spec.endswith("| ef") and hvd.rank() == 0
        assert (resumed.residual_norm() > 0) == kept_some, spec
        train(again, resumed, 2, start=3)
        assert hvd.replicas_equal(again.state_dict()), spec


def case_all_ranks_load_the_file_of_rank_0():
    """With a broadcast or without: factors are for all, of EF21's estimates each has a part."""
    for spec in ("powersgd(rank=2) | ef", "acpsgd(rank=2) | ef", "int8 | ef21"):
        _, _, kept = trained(spec)
        for broadcasts in (True, False):
            file = hvd.broadcast_object(kept["optimizer"], 0)  # Adam goes on in what it loads
            again = model(1)
            resumed = wrapped(again, spec)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                resumed.load_state_dict(file)
                if broadcasts:
                    hvd.broadcast_parameters(again.state_dict(), 0)
                    hvd.broadcast_optimizer_state(resumed, 0)
            told = [str(w.message) for w in caught]
            ef21 = spec == "int8 | ef21"
            expected = ["the residuals of rank 0"] if hvd.rank() else []
            if ef21 and broadcasts and hvd.rank() == 0:
                expected = ["factors or estimates of"]
            assert len(told) == len(expected), (spec, told)
            assert all(map(str.__contains__, told, expected)), (spec, told)
            assert ("0.weight" in resumed._ringlet.memory.in_common()) == (
                not ef21 or (hvd.rank() == 0 and not broadcasts)
            )
            if broadcasts or not ef21:
                train(again, resumed, 2, start=3)
                assert hvd.replicas_equal(again.state_dict()), spec


def case_what_is_loaded_is_compared_by_name_and_not_by_place():
    def made():
        torch.manual_seed(0)
        own = torch.nn.Sequential(torch.nn.Linear(48, 96), torch.nn.Linear(96, 48))
        named = list(own.named_parameters())
        inner = torch.optim.Adam(own.parameters(), lr=0.01)
        named = named if hvd.rank() else named[::-1]
        return own, hvd.DistributedOptimizer(inner, named, compression="powersgd(rank=2) | ef")

    own, optimizer = made()
    train(own, optimizer, 3)
    again, resumed = made()
    resumed.load_state_dict(stored(optimizer.state_dict()))
    assert [name for name, _ in resumed._ringlet.memory.loaded_in_common] == [
        "0.weight",
        "1.weight",
    ]
    train(again, resumed, 2, start=3)
    assert hvd.replicas_equal(again.state_dict())


def case_what_rank_0_alone_has_loaded_is_not_trained_with_until_it_is_broadcast():
    """Where ranks have something in common; the first step finds it, and is not applied."""
    for spec, loading in (
        ("int8 | ef", [0]), ("powersgd(rank=2) | ef", [0]), ("int8 | ef21", [0]),
        ("int8 | ef21", range(hvd.size())),
    ):  # fmt: skip
        _, _, kept = trained(spec)
        kept = hvd.broadcast_object(kept["optimizer"], 0)
        again = model(1)
        resumed = wrapped(again, spec)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if hvd.rank() in loading:
                resumed.load_state_dict(kept)
        if spec == "int8 | ef":
            train(again, resumed, 1)
            continue
        before = [p.detach().clone() for p in again.parameters()]
        where = r"is there on rank\(s\) 0 but not on rank\(s\) 1"
        with pytest.raises(Mismatch, match=f"{where}.*call hvd.broadcast_optimizer_state"):
            train(again, resumed, 1)
        assert all(map(torch.equal, again.parameters(), before)), spec
        if len(loading) == 1:  # Adam's moments
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                hvd.broadcast_optimizer_state(resumed, 0)
        train(again, resumed, 2, start=3)
        assert hvd.replicas_equal(again.state_dict()), spec


def case_files_of_different_steps_are_told_of():
    """Whoever has loaded one says so in time, however late its step comes."""
    loaded, counted = "factors or estimates that were loaded", "steps that compressors have counted"
    for spec, told in (
        ("randomk(ratio=0.1)", (counted, counted)), ("int8 | hadamard", (counted, counted)),
        ("int8 | ef21", (loaded, counted)), ("powersgd(rank=2) | ef", (loaded, loaded)),
    ):  # fmt: skip
        own = model()
        optimizer = wrapped(own, spec, base=torch.optim.SGD)
        files = []
        for _ in range(hvd.size()):
            train(own, optimizer, 1)
            files.append(stored(optimizer.state_dict()))
        for first in (0, 1):  # rank 0 has loaded nothing, and then a file of its own
            again = model()
            resumed = wrapped(again, spec, base=torch.optim.SGD)
            train(again, resumed, first)
            if first or hvd.rank():
                resumed.load_state_dict(files[hvd.rank()])
            before = [p.detach().clone() for p in again.parameters()]
            again(torch.ones(2, 48)).sum().backward()
            while hvd.rank() and not resumed._ringlet.declared.group.ended:
                time.sleep(0.001)
            with pytest.raises(Mismatch, match=f"{told[first]}.*in one step"):
                resumed.step()
            assert all(map(torch.equal, again.parameters(), before)), spec
            train(again, resumed, 2)
            assert hvd.replicas_equal(again.state_dict()), spec
            counted = hvd.allgather_object(resumed._ringlet.step)
            assert set(counted) == {hvd.size() + 3}


def case_broadcasting_state_after_loading_ones_own_keeps_residuals():
    for spec in ("topk(ratio=0.05) | ef", "acpsgd(rank=2) | ef", "int8 | ef21"):
        own, optimizer, kept = trained(spec)
        straight = train(own, optimizer, 2, start=3)
        again = model(1)
        resumed = wrapped(again, spec)
        again.load_state_dict(kept["model"])
        resumed.load_state_dict(kept["optimizer"])
        hvd.broadcast_parameters(again.state_dict(), 0)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            hvd.broadcast_optimizer_state(resumed, 0)
        assert torch.equal(train(again, resumed, 2, start=3), straight), spec


def case_all_ranks_give_up_the_same_step():
    own = model()
    optimizer = wrapped(own, "int8 | ef")
    for step in range(3):
        if hvd.rank() == 1 and step == 0:
            torch.ones(2000, 2000) @ torch.ones(2000, 2000)  # so that others fail first
        try:
            own(torch.ones(2, 48)).sum().backward()
            if step == 0:
                raise ValueError("alike on every rank")
            optimizer.step()
            optimizer.zero_grad()
        except ValueError:
            optimizer.abandon_step()
            optimizer.zero_grad()
    assert hvd.replicas_equal(own.state_dict())


def case_a_replaced_gradient_is_refused():
    own = model()
    optimizer = wrapped(own, "none", base=torch.optim.SGD)
    own(torch.full((2, 48), 1.0 + hvd.rank())).sum().backward()
    for p in own.parameters():
        p.grad = p.grad * 0.5
    with pytest.raises(RuntimeError, match="was changed between backward"):
        optimizer.step()
    optimizer.zero_grad()
    train(own, optimizer, 1)
    assert hvd.replicas_equal(own.state_dict())


def case_looking_at_param_groups_changes_nothing():
    a, b = torch.nn.Parameter(torch.ones(4)), torch.nn.Parameter(torch.ones(4))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([a, b], lr=1.0), [("a", a), ("b", b)], op=hvd.Sum
    )
    (a * 1.0).sum().backward()
    assert optimizer.param_groups[0]["lr"] == 1.0
    exec("assert len(optimizer.param_groups) == 1", {"optimizer": optimizer})  # in no module
    (b * 1.0).sum().backward()
    optimizer.step()
    assert a.tolist() == b.tolist() == [1.0 - hvd.size()] * 4


def case_who_has_changed_compressors_follows_who_has_not():
    own = model()
    optimizer = wrapped(own)
    train(own, optimizer, 2)
    memory, held = optimizer._ringlet.memory, optimizer.residual_norm()
    if hvd.rank() == 1:  # and a rank was lost before the others came there, in an elastic job
        memory.change(as_router("int4 | ef"))
    memory.follow(hvd.broadcast_object(memory.changed))
    optimizer._ringlet.declared.declare()
    assert {str(c) for c in memory.compressors().values()} == {str(parse("topk(ratio=0.05) | ef"))}
    assert optimizer.residual_norm() == held > 0
    train(own, optimizer, 1)
    assert hvd.replicas_equal(own.state_dict())


def two_of_each():
    """Return two models, their optimizers, and a committed state of all four."""
    models = [model(), model(1)]
    optimizers = [wrapped(own) for own in models]
    rest = {"model2": models[1], "optimizer2": optimizers[1]}
    state = hvd.elastic.TorchState(models[0], optimizers[0], **rest)
    state.keep_steps()
    return models, optimizers, state


def backward_of(*models):
    draw = torch.Generator().manual_seed(hvd.rank())
    for own in models:
        own(torch.randn(4, 48, generator=draw)).square().mean().backward()


def case_a_state_goes_back_while_two_optimizers_reduce():
    models, optimizers, state = two_of_each()
    for own, optimizer in zip(models, optimizers, strict=True):
        train(own, optimizer, 2)
    state.save()
    before = [p.detach().clone() for own in models for p in own.parameters()]
    held = [optimizer.residual_norm() for optimizer in optimizers]
    for fails in (0, 1):
        for own, optimizer in zip(models, optimizers, strict=True):
            train(own, optimizer, 1, start=2)
            optimizer.zero_grad()
        if hvd.rank() == 0:
            backward_of(models[1 - fails])
            optimizers[fails].abandon_step()
        else:
            backward_of(*models)
            with pytest.raises(RuntimeError, match="the script gave the step up"):
                optimizers[fails].step()
        state.restore()
        for optimizer in optimizers:
            optimizer.zero_grad()
    assert all(map(torch.equal, [p for own in models for p in own.parameters()], before))
    for _ in range(2):
        assert [optimizer.residual_norm() for optimizer in optimizers] == held
        for optimizer in optimizers:
            optimizer._ringlet.take_back()  # as ``sync`` does once ranks have changed
    for own, optimizer in zip(models, optimizers, strict=True):
        train(own, optimizer, 1)
        assert hvd.replicas_equal(own.state_dict())


def case_an_optimizer_that_was_wrapped_again_forgets_a_failed_step():
    for commits in (False, True):
        own = model()
        base = torch.optim.Adam(own.parameters(), lr=0.01)
        named, spec = list(own.named_parameters()), "topk(ratio=0.05) | ef"
        state = hvd.elastic.TorchState(own, hvd.DistributedOptimizer(base, named, spec))
        state.keep_steps()
        if commits:  # another one, which remembers nothing of the first
            base = torch.optim.Adam(own.parameters(), lr=0.01)
        state.optimizer = hvd.DistributedOptimizer(base, named, spec)
        if commits:
            state.save()
        train(own, state.optimizer, 2)
        held = state.optimizer.residual_norm()
        backward_of(own)
        while not state.optimizer._ringlet.declared.group.ended:
            time.sleep(0.01)
        state.take_back()
        assert state.optimizer.residual_norm() == held > 0
        state.optimizer.zero_grad()


def case_a_step_that_one_of_two_optimizers_has_taken_is_not_taken_twice():
    models, optimizers, state = two_of_each()
    parameters = [p for own in models for p in own.parameters()]
    committed = [p.detach().clone() for p in parameters]

    def step(*taken):
        backward_of(*models)
        for optimizer in taken:
            optimizer.step()

    def taken_back():
        state.take_back()
        for optimizer in optimizers:
            optimizer.zero_grad()
        return [p.detach().clone() for p in parameters]

    step(*optimizers)
    taken = [p.detach().clone() for p in parameters]
    step()  # and is lost before the first of them steps
    assert all(map(torch.equal, taken_back(), taken))
    step(optimizers[0])
    assert all(map(torch.equal, taken_back(), committed))
    assert [optimizer.residual_norm() for optimizer in optimizers] == [0, 0]
    step(*optimizers)
    assert all(map(torch.equal, parameters, taken))


def case_ranks_change_while_one_of_two_optimizers_reduces():
    models, optimizers, state = two_of_each()
    for own, optimizer in zip(models, optimizers, strict=True):
        train(own, optimizer, 1)
    before = [p.detach().clone() for p in models[1].parameters()]
    held = optimizers[1].residual_norm()
    backward_of(models[1])
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(elastic_state, "is_elastic", lambda: True)
        state.sync()
    assert all(map(torch.equal, models[1].parameters(), before))
    assert optimizers[1].residual_norm() == held
    train(models[1], optimizers[1], 1)
    assert hvd.replicas_equal(models[1].state_dict())


def case_a_newcomer_forgets_what_a_checkpoint_that_others_went_on_from_holds_back():
    """Else it would pay once more what they have paid since, or will: some keep copies."""
    own = model()
    optimizer = wrapped(own)
    train(own, optimizer, 3)
    shards = hvd.allgather_object(optimizer.state_dict())
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(elastic_state, "is_elastic", lambda: True)
        patched.setattr(epochs, "is_elastic", lambda: True)
        optimizer.load_sharded(shards)
        state = hvd.elastic.TorchState(own, optimizer)
        held = optimizer.residual_norm()
        state.sync()
        assert optimizer.residual_norm() == held > 0  # all have loaded it
        for steps in (0, 2):  # that the others have taken
            train(own, optimizer, steps)
            held, told = optimizer.residual_norm(), []
            if hvd.rank() == hvd.size() - 1:
                optimizer.load_sharded(shards)
                state = hvd.elastic.TorchState(own, optimizer)
                held, told = 0.0, ["the ranks that it joins have gone on from it, and pay it"]
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                state.sync()
            found = [str(each.message).partition(": ")[2] for each in caught]
            assert [text for text in found if "pay it" in text] == told
            assert optimizer.residual_norm() == held
    assert optimizer._ringlet.step == 5
    train(own, optimizer, 1)
    assert hvd.replicas_equal(own.state_dict())


def case_nothing_is_loaded_between_backward_and_step():
    own = model()
    optimizer = wrapped(own, base=torch.optim.SGD)
    train(own, optimizer, 1)
    kept = copy.deepcopy(optimizer.state_dict())
    kept["param_groups"][0]["lr"] = 3.0
    backward_of(own)
    for name, load in (
        ("load_state_dict", lambda: optimizer.load_state_dict(kept)),
        ("load_sharded", lambda: optimizer.load_sharded([kept] * hvd.size())),
    ):
        with pytest.raises(RuntimeError, match=rf"{name} between backward\(\) and step\(\)"):
            load()
    assert optimizer.param_groups[0]["lr"] == 0.01
    optimizer.step()
    assert hvd.replicas_equal(own.state_dict())


def case_a_state_of_half_a_step_is_told_of():
    own = model()
    optimizer = wrapped(own)
    train(own, optimizer, 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.state_dict()
    backward_of(own)
    with pytest.warns(UserWarning, match=r"state_dict\(\) between backward\(\) and step\(\)"):
        optimizer.state_dict()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match=r"state_dict\(\) between backward\(\) and step\(\)"):
        optimizer.state_dict()
    with optimizer.skip_synchronize():
        optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.state_dict()
        plain = wrapped(own, "none")  # of which nothing is lost
        backward_of(own)
        plain.state_dict()
        plain.step()


def case_an_optimizer_of_parameters_that_the_model_has_no_more_is_warned_of_once():
    own = model()
    optimizer = wrapped(own)
    copied = copy.deepcopy(own)  # as fully_shard puts others into the model
    backward_of(copied)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            optimizer.step()
    (told,) = [str(w.message) for w in caught if "fully_shard" in str(w.message)]
    assert "none of the 4 parameter(s) of this DistributedOptimizer a gradient" in told
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(own, wrapped(own), 1)  # nor where gradients are put there
        by_hand = wrapped(own)
        for p in own.parameters():
            p.grad = torch.ones_like(p)
        by_hand.step()


CASES = [value for name, value in list(globals().items()) if name.startswith("case_")]


@pytest.mark.parametrize(("transport", "size"), [("mpi", 2), ("gloo", 3)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_"))
def test_state(run_case, case, transport, size):
    run_case(case, transport, size)


def test_another_number_of_ranks_keeps_the_mean_of_residuals():
    old = [{"w": {"step": 7, "residual": torch.randn(9).numpy()}} for _ in range(3)]
    shards = [checkpoint.saved(states, rank, 3, 7) for rank, states in enumerate(old)]
    for size in (1, 2, 5):
        new = [{"w": {}} for _ in range(size)]
        for rank, states in enumerate(new):
            tensors = {"w": (parse("topk | ef"), 9)}
            assert checkpoint.reshard(states, shards, rank, size, tensors) == 7
        mean = sum(s["w"]["residual"] for s in old) / 3
        again = sum(s["w"]["residual"] for s in new) / size
        assert abs(mean - again).max() < 1e-6
    # The same where they took a byte each, and one scale of 2**-6.
    steps = torch.arange(27, dtype=torch.int8).reshape(3, 9).numpy()
    scales = torch.tensor([0x3C80], dtype=torch.int16).numpy()
    narrow = [{"w": {"step": 7, "residual_int8": s, "residual_scales": scales}} for s in steps]
    shards = [checkpoint.saved(states, rank, 3, 7) for rank, states in enumerate(narrow)]
    new = {"w": {}}
    assert checkpoint.reshard(new, shards, 0, 2, {"w": (parse("topk | ef(dtype='int8')"), 9)}) == 7
    assert abs(new["w"]["residual"] - steps.mean(0) / 64).max() < 1e-6
    assert checkpoint.norm(narrow[0]) == pytest.approx((steps[0] ** 2 / 64**2).sum() ** 0.5)


def test_what_other_ranks_cannot_go_on_with_is_told():
    held = {"w": {"step": 7, "u": torch.randn(9).numpy(), "v": torch.randn(9).numpy()}}
    before = {"w": parse("topk | momentum_correction")}
    # Rank 0 remembers nothing of "w", and says nothing of its spec.
    shards = [checkpoint.saved({}, 0, 2, 7), checkpoint.saved(held, 1, 2, 7, before)]
    states, tensors = {"w": {}}, {"w": (parse("topk | ef"), 9)}
    with pytest.warns(UserWarning, match=r"'w' was saved by 'topk \| momentum.*\['u', 'v'\]"):
        assert checkpoint.reshard(states, shards, 0, 3, tensors) == 7
    assert states == {"w": {"step": 7}}


def test_a_spec_that_divides_first_divides_by_the_ranks_that_reduce():
    held = {"w": {"step": 7, "residual": torch.ones(9).numpy()}}
    shards = [checkpoint.saved(held, rank, 4, 7, {"w": parse("topk | ef")}) for rank in range(4)]
    tensors = {"w": (parse("fp16 | ef"), 9)}
    for among, share in ((2, 1 / 2), (None, 1 / 4)):
        states = {"w": {}}
        checkpoint.restore(states, shards[1], 1, 4, tensors, among=among)
        assert states["w"]["residual"].tolist() == [share] * 9
        states = {"w": {}}
        checkpoint.reshard(states, shards, 1, 4, tensors, among=among)
        assert states["w"]["residual"].tolist() == [share] * 9


def test_what_replaces_a_model_or_an_optimizer_is_gone_back_to_as_it_was_put_there():
    models = [torch.nn.Linear(2, 3), torch.nn.Linear(5, 1)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5 / (i + 1)) for i, m in enumerate(models)]
    state = hvd.elastic.TorchState(models[0], optimizers[0], epoch=0, other=None)
    state.epoch = 1
    state.commit()
    state.model, state.optimizer = models[1], optimizers[1]
    state.epoch, state.other = 2, models[0]
    kept = models[1].weight.detach().clone()
    with torch.no_grad():
        models[1].weight += 1
    optimizers[1].param_groups[0]["lr"] = 3.0
    state.restore()
    assert state.model is models[1]
    assert torch.equal(models[1].weight, kept)
    assert (optimizers[1].param_groups[0]["lr"], state.epoch) == (0.25, 1)
    assert state.other is models[0]


def test_what_is_counted_is_gone_back_to_as_it_was():
    optimizer = torch.optim.SGD(torch.nn.Linear(2, 3).parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 3], gamma=0.5)
    seen = Counter(cats=3)
    state = hvd.elastic.TorchState(scheduler=scheduler, seen=seen, inner={"seen": seen.copy()})
    state.save()
    state.seen["cats"] += 1
    state.restore()
    assert scheduler.milestones == {2: 2, 3: 1}
    assert (state.seen, state.inner) == ({"cats": 3}, {"seen": {"cats": 3}})


def test_an_elastic_state_is_saved_into_the_memory_of_the_last_time():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = hvd.elastic.TorchState(model, optimizer, batch=0, odd=[1])

    def step():
        optimizer.zero_grad()
        model(torch.randn(4, 3)).square().sum().backward()
        optimizer.step()
        state.batch += 1

    step()
    state.save()
    first = state._saved["model"]["0.weight"]
    step()
    assert not torch.equal(model[0].weight, first)
    state.save()
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    moment = optimizer.state[model[0].weight]["momentum_buffer"].clone()
    assert state._saved["model"]["0.weight"] is first
    assert state._saved["model"]._metadata == model.state_dict()._metadata
    for _ in range(2):  # nothing that was restored is what is kept
        step()
        state.odd.append(2)
        state.restore()
        for name, value in model.state_dict().items():
            assert torch.equal(value, kept[name])
        assert torch.equal(optimizer.state[model[0].weight]["momentum_buffer"], moment)
        assert (state.batch, state.odd) == (2, [1])
