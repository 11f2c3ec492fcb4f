"""What would let replicas drift apart, or does nothing, is said at once; on in-process ranks."""

from __future__ import annotations

import copy
import io
import pickle
import time
import warnings
from collections import defaultdict
from operator import is_

import numpy as np
import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import ringlet
import ringlet.torch as hvd
from ringlet.compressors.modifiers.residuals import wide
from ringlet.ring.errors import Mismatch, PeerLost
from ringlet.shared import drift
from ringlet.torch.ops.replica_check import _sum_of_bits as sum_of_bits
from ringlet.torch.optimizer.declared_gradients import DeclaredGradients
from ringlet.torch.optimizer.drift_check import DriftCheck

pytestmark = pytest.mark.preloaded("torch")


def network(seed=0):
    made = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 4))
    draw = torch.Generator().manual_seed(seed)  # ranks are threads, and share torch's own
    with torch.no_grad():
        for p in made.parameters():
            p.copy_(torch.randn(p.shape, generator=draw) / 8)
    return made


def wrap(model, make=torch.optim.SGD, **options):
    return hvd.DistributedOptimizer(
        make(model.parameters(), lr=0.1), model.named_parameters(), **options
    )


def backward(model, step=0):
    draw = torch.Generator().manual_seed(10 * step + hvd.rank())
    model(torch.randn(4, 8, generator=draw)).square().mean().backward()


def ranks(work, np=2):
    def main():
        hvd.init()
        return work()

    return ringlet.run(main, np=np, transport="local")


def test_clipping_before_synchronize_is_refused_with_the_cure():
    def work():
        model = network()
        optimizer = wrap(model)
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(2):
            backward(model)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            with pytest.raises(RuntimeError, match=r"clip.*optimizer\.synchronize\(\)"):
                optimizer.step()
            optimizer.zero_grad()
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        backward(model)
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        with optimizer.skip_synchronize():
            optimizer.step()
        assert hvd.replicas_equal(model.state_dict())

    ranks(work)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_gradient_that_one_rank_has_changed_is_told_to_all(replaced):
    def work():
        model = network()
        optimizer = wrap(model)
        backward(model)
        if hvd.rank() == 1:
            if replaced:
                model[0].weight.grad = model[0].weight.grad * 2
            else:
                model[0].weight.grad *= 2
            with pytest.raises(RuntimeError, match=r"'0\.weight' was changed"):
                optimizer.step()
            optimizer.zero_grad()
            return
        words = r"rank 1: abandoned: the gradient of '0\.weight' was changed"

        def go_on():
            for _ in range(2):  # rank 1 may find out when all have reduced the first step
                optimizer.step()
                optimizer.zero_grad()
                backward(model)

        with pytest.raises(hvd.StepAbandoned, match=words):
            go_on()

    ranks(work)


def told_by(work, np=2):
    """Return the warnings of a job."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ranks(work, np)
    return [str(each.message) for each in caught]


def steps(model, optimizer, count=3):
    for step in range(count):
        if step == count - 1:
            hvd.barrier()  # what the first step began, and nobody waits for, has ended
        optimizer.zero_grad()
        backward(model, step)
        optimizer.step()


@pytest.mark.parametrize("base", [torch.optim.SGD, "op=Adasum", "OneBitAdam", "DiLoCo"])
def test_parameters_that_differ_at_the_first_step_are_told_of_once(base):
    def work():
        for seed in (0, hvd.rank()):
            model = network(seed)
            if base == "OneBitAdam":
                optimizer = hvd.OneBitAdam(model.named_parameters())
            elif base == "DiLoCo":
                inner = torch.optim.SGD(model.parameters(), lr=0.1)
                optimizer = hvd.DiLoCo(inner, model.named_parameters(), every=1)
            elif base == "op=Adasum":
                optimizer = wrap(model, op=hvd.Adasum)
            else:
                optimizer = wrap(model, base)
            steps(model, optimizer)

    told = told_by(work)
    assert len(told) == 1, told
    assert "'0.bias' differs between ranks" in told[0]  # the first by name of those that do
    assert "hvd.broadcast_parameters" in told[0]


@pytest.mark.parametrize("what", ["parameters", "settings"])
def test_onebit_adam_compares_its_own_in_an_elastic_job_too(what, monkeypatch):
    """And not the stand-ins by which it reduces, with which each epoch begins anew."""
    monkeypatch.setattr("ringlet.torch.optimizer.reducer.is_elastic", lambda: True)

    def work():
        odd = hvd.rank()
        model = network(odd if what == "parameters" else 0)
        rate = 0.1 + odd if what == "settings" else 0.1
        steps(model, hvd.OneBitAdam(model.named_parameters(), lr=rate))

    (told,) = told_by(work)
    assert "'0.bias'" in told if what == "parameters" else "such as lr" in told


def test_no_rank_trains_alone_where_gradients_could_not_be_declared_in_an_elastic_job(monkeypatch):
    monkeypatch.setattr("ringlet.torch.optimizer.reducer.is_elastic", lambda: True)
    declare, failed = DeclaredGradients.declare, set()

    def fail_first(declared):
        if hvd.rank() not in failed:
            failed.add(hvd.rank())
            raise MemoryError("no room")
        declare(declared)

    monkeypatch.setattr(DeclaredGradients, "declare", fail_first)

    def work():
        model = network()
        optimizer = wrap(model)
        with pytest.raises(MemoryError):
            steps(model, optimizer)
        optimizer.zero_grad()
        steps(model, optimizer)
        return hvd.replicas_equal(model.state_dict())

    assert ranks(work) == [True] * 2


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_settings_of_the_optimizer_that_differ_are_told_of_once(op):
    def work():
        model = network()
        optimizer = wrap(model, op=op)
        optimizer.param_groups[0]["lr"] = 0.1 * (hvd.rank() + 1)
        steps(model, optimizer)

    told = told_by(work)
    assert len(told) == 1, told
    assert "hvd.broadcast_optimizer_state" in told[0]


def test_steps_that_one_rank_alone_has_loaded_are_told_of_once():
    def work():
        saved = None
        for _ in range(2):
            model = network()
            optimizer = wrap(model, compression="int8 | ef")
            if saved is not None and hvd.rank() == 0:
                optimizer.load_state_dict(saved)
            hvd.broadcast_parameters(model.state_dict())
            steps(model, optimizer)
            saved = optimizer.state_dict()

    told = [text for text in told_by(work) if "hvd.broadcast_optimizer_state" in text]
    assert len(told) == 1, told
    assert "the number of steps that compressors have seen" in told[0]


@pytest.mark.parametrize("kind", ["OneBitAdam", "a rate that is a tensor"])
def test_settings_are_compared_wherever_they_are(kind):
    def work():
        model, rate = network(), 0.01 * (hvd.rank() + 1)
        if kind == "OneBitAdam":
            optimizer = hvd.OneBitAdam(model.named_parameters(), lr=rate)
        else:
            adam = torch.optim.Adam(model.parameters(), lr=torch.tensor(rate))
            optimizer = hvd.DistributedOptimizer(adam, model.named_parameters())
        steps(model, optimizer)

    told = told_by(work)
    assert len(told) == 1, told
    assert "settings, such as lr, differ" in told[0]


def test_names_that_torch_keeps_are_those_of_patterns():
    def work():
        model = network()
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.named_parameters(), lr=0.1), compression={"*.bias": "fp16"}
        )
        backward(model)
        optimizer.step()
        assert list(optimizer._ringlet.parameters) == [n for n, _ in model.named_parameters()]
        twice = [{"params": [("one", p)]} for p in model.parameters()]
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD(twice, lr=0.1))
        assert list(optimizer._ringlet.parameters)[:2] == ["param.0.0", "param.1.0"]

    assert told_by(work) == []


def test_a_precision_without_parameters_of_its_own_says_what_to_do():
    model = hvd.apply_precision(network(), "bf16")
    biases = [p for p in model.parameters() if p.dtype is torch.float32]
    for policy, words in (("bf16", "without precision="), ("fp16", "share a loss scale")):

        def work(policy=policy, words=words):
            with pytest.raises(ValueError, match=f"apply_precision.*stay in float32.*{words}"):
                hvd.DistributedOptimizer(torch.optim.SGD(biases, lr=0.1), precision=policy)
            with pytest.raises(ValueError, match=r"a name such as 'fp16'.*torch\.bfloat16"):
                hvd.DistributedOptimizer(torch.optim.SGD(biases, lr=0.1), precision=torch.bfloat16)

        ranks(work)


@pytest.mark.parametrize("what", ["lr", "parameter"])
def test_what_differs_later_is_told_of_once(what):
    def work():
        model = network()
        optimizer = wrap(model)
        for step in range(70):
            if step == 10 and what == "lr":  # as a scheduler by each rank's own metric
                optimizer.param_groups[0]["lr"] = 0.1 / (hvd.rank() + 1)
            if step == 10 and what == "parameter" and hvd.rank() == 1:
                with torch.no_grad():
                    model[2].bias.add_(1.0)
            steps(model, optimizer, 1)

    told = told_by(work)
    assert len(told) == 1, told
    assert "between ranks after 16 steps" in told[0]
    assert ("average that first" if what == "lr" else "hvd.broadcast_parameters") in told[0]


@pytest.mark.parametrize("broadcasts", [True, False])
def test_ranks_that_join_differ_from_nobody_later(broadcasts):
    def work():
        model = network()
        optimizer = wrap(model, compression="int8 | ef")
        for _ in range(2):
            steps(model, optimizer, 10)
            for _ in range(25 * hvd.rank()):  # through 16 and 32
                optimizer.zero_grad()
                backward(model)
                optimizer.step()
            last = hvd.join()
            if broadcasts:
                hvd.broadcast_parameters(model.state_dict(), root_rank=last)
        steps(model, optimizer, 17)
        # Nobody waits for a comparison that another rank has made before it joined.
        assert not optimizer._ringlet._drift._drift._under_way

    told = told_by(work)
    assert len(told) == (not broadcasts), told
    assert all("behind last = join() broadcast" in each for each in told)


def test_a_broadcast_behind_diloco_counts():
    def work():
        model = network(hvd.rank())
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DiLoCo(inner, model.named_parameters(), every=2)
        hvd.broadcast_parameters(model.state_dict())
        steps(model, optimizer, 4)
        assert hvd.replicas_equal(model.state_dict())

    assert told_by(work) == []


def test_one_rank_alone_among_several_that_torch_connects_is_warned_of(monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group=None: 2)
    with pytest.warns(UserWarning, match=r"connects 2 ranks.*hvd\.init\(.*group\.WORLD\)"):
        hvd.init()
    hvd.shutdown()


def test_optimizers_of_different_classes_are_refused():
    def work():
        model = network()
        make = torch.optim.Adam if hvd.rank() else torch.optim.SGD
        for op in (hvd.Average, hvd.Adasum):
            with pytest.raises(Mismatch, match="rank 0: SGD; rank 1: Adam"):
                wrap(model, make, op=op)
        steps(model, wrap(model))

    ranks(work)


def test_adasum_refuses_what_it_cannot_compress_at_once():
    def work():
        for spec in ("int8", "topk(ratio=0.5) | ef", {"0.*": "fp16"}):
            with pytest.raises(ValueError, match="op=Adasum"):
                wrap(network(), op=hvd.Adasum, compression=spec)
        with pytest.raises(ValueError, match="gradient_predivide_factor needs op=Average"):
            wrap(network(), op=hvd.Adasum, gradient_predivide_factor=2.0)
        for spec in (None, "none", "fp16"):
            model = network()
            steps(model, wrap(model, op=hvd.Adasum, compression=spec))
            assert hvd.replicas_equal(model.state_dict())

    ranks(work)


def test_a_rank_without_backward_has_part_in_the_step_behind_one_that_a_scaler_has_skipped():
    def work():
        model = network()
        optimizer = wrap(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(model(torch.full((1, 8), torch.inf)).sum()).backward()
        scaler.step(optimizer)  # which it does not call
        scaler.update()
        model.zero_grad(set_to_none=False)
        if hvd.rank() == 0:
            scaler.scale(model(torch.ones(1, 8)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        assert all(p.grad.any() for p in model.parameters() if p.grad.numel() > 1)
        assert hvd.replicas_equal(model.state_dict())

    ranks(work)


class _Counting(torch.optim.SGD):
    """As an optimizer does that keeps something beside its state."""

    taken = 0

    def step(self, closure=None):
        self.taken += 1
        return super().step(closure)


def test_an_optimizer_and_what_wraps_it_are_one_whatever_replaces_state_and_groups():
    def fresh():
        model = network()
        original = _Counting(model.parameters(), lr=1.0, momentum=0.9)
        return model, original, hvd.DistributedOptimizer(original, model.named_parameters())

    def again(model, original):
        return hvd.DistributedOptimizer(original, model.named_parameters())

    def work():
        model, original, first = fresh()
        scheduler = torch.optim.lr_scheduler.ExponentialLR(first, 0.5)
        steps(model, first)
        second = again(model, original)
        assert second.taken == first.taken > 0
        hvd.broadcast_optimizer_state(second)  # which loads it
        steps(model, second)
        scheduler.step()
        assert second.param_groups[0]["lr"] == original.param_groups[0]["lr"] == 0.5
        second.state = defaultdict(dict)  # begin anew
        assert not again(model, original).state
        model, original, first = fresh()
        steps(model, first)
        state = copy.deepcopy(original.state_dict())
        state["param_groups"][0]["lr"] = 0.25
        original.load_state_dict(state)
        assert first.param_groups[0]["lr"] == 0.25
        assert first.state is original.state

    ranks(work)


def test_adasum_warns_where_backward_reaches_other_parameters():
    def work():
        optimizer = wrap(network(), op=hvd.Adasum)
        model = network()
        steps(model, optimizer)
        optimizer = wrap(model, op=hvd.Adasum)  # which says nothing
        steps(model, optimizer)

    told = told_by(work)
    assert len(told) == 2, told  # on each rank
    assert all("backward() has given none of the 4 parameter(s)" in each for each in told)


def test_adasum_hands_zero_grad_what_it_is_given():
    """An optimizer of one's own need not take ``set_to_none``, and may take more."""
    given = []

    class Plain(torch.optim.SGD):
        def zero_grad(self):
            given.append(())

    class More(torch.optim.SGD):
        def zero_grad(self, set_to_none=False, more=1):
            given.append((set_to_none, more))

    def work():
        wrap(network(), Plain, op=hvd.Adasum).zero_grad()
        optimizer = wrap(network(), More, op=hvd.Adasum)
        optimizer.zero_grad()
        optimizer.zero_grad(True, more=2)

    ranks(work, np=1)
    assert given == [(), (False, 1), (True, 2)]


def test_an_optimizer_with_adasum_cannot_be_copied_or_saved_whole():
    def work():
        for refuse in (copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match="cannot be copied or pickled"):
                refuse(wrap(network(), op=hvd.Adasum))

    ranks(work)


def test_a_pattern_without_a_parameter_is_named_and_wrappers_are_looked_through():
    def work():
        model = network()
        compiled = [(f"_orig_mod.{n}", p) for n, p in model.named_parameters()]
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        hvd.DistributedOptimizer(inner, compiled, {"2.wieght": "none", "*": "fp16"})
        optimizer = hvd.DistributedOptimizer(inner, compiled, {"0.weight": "fp16"})
        assert str(optimizer._ringlet.declared.carried("_orig_mod.0.weight")[0]) == "fp16"
        assert str(optimizer._ringlet.declared.carried("_orig_mod.2.weight")[0]) == "none"
        optimizer.set_compression({"bais": "fp16", "weigth*": "fp16"})

    told = told_by(work, 1)
    assert len(told) == 2, told
    assert "'2.wieght' matches no parameter, and compresses nothing" in told[0]
    assert "'_orig_mod.0.weight'" in told[0]
    assert "'bais', 'weigth*' match no parameter" in told[1]


def test_a_module_of_ones_own_that_is_called_module_is_no_wrapper():
    def work():
        model = nn.Module()
        model.module, model.head = nn.Linear(8, 40), nn.Linear(40, 4)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        routes = {"weight": "fp16", "module.bias": "bf16", "*": "none"}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # "weight" is no parameter's name
            optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), routes)
        used = {name: str(c) for name, c in optimizer._ringlet.memory.compressors().items()}
        assert used["module.weight"] == "none"
        assert used["module.bias"] == "bf16"
        twice = [(f"module.module.{name}", p) for name, p in network().named_parameters()]
        inner = torch.optim.SGD([p for _, p in twice], lr=0.1)
        optimizer = hvd.DistributedOptimizer(inner, twice, {"0.weight": "fp16", "*": "none"})
        assert str(optimizer._ringlet.memory.compressors()["module.module.0.weight"]) == "fp16"

    told = told_by(work, 1)
    assert not told, told


def test_residuals_are_found_though_wrappers_have_come_or_gone():
    def work():
        model = nn.Sequential(nn.Linear(8, 300))
        optimizer = wrap(model, compression="topk(ratio=0.1) | ef")
        backward(model)
        optimizer.step()
        kept = optimizer.state_dict()
        named = [(f"module.{name}", p) for name, p in model.named_parameters()]
        inner = torch.optim.SGD([p for _, p in named], lr=0.1)
        again = hvd.DistributedOptimizer(inner, named, compression="topk(ratio=0.1) | ef")
        again.load_state_dict(kept)
        assert again.residual_norm() == optimizer.residual_norm() > 0

    assert not told_by(work, 2)


def test_what_fails_is_called_by_the_optimizers_class():
    def work():
        model = network()
        optimizer = wrap(model)
        backward(model)
        if hvd.rank() == 0:
            optimizer.step()
        hvd.barrier()  # all ranks have handed everything in, so rank 0's step is over
        if hvd.rank() == 1:
            with pytest.raises(RuntimeError, match="step 0 of 'SGD' was reduced on all ranks"):
                optimizer.abandon_step("too late")
            optimizer.step()
        hvd.barrier()  # rank 0 stays until then

    ranks(work)


class Scaler(torch.amp.GradScaler):
    """One of the many that clip, or log, in a method of their own."""

    def unscale_(self, optimizer):
        factor = 1.0 / self.get_scale()
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad *= factor
        self._per_optimizer_states[id(optimizer)]["found_inf_per_device"] = {
            torch.device("cpu"): torch.zeros(1)
        }


def test_a_grad_scaler_of_ones_own_waits_for_gradients():
    def work():
        model = network()
        optimizer, scaler = wrap(model), Scaler("cpu", init_scale=4.0)
        twin = network()
        plain = torch.optim.SGD(twin.parameters(), lr=0.1)
        draw = torch.Generator().manual_seed(hvd.rank())
        x = torch.randn(4, 8, generator=draw)
        scaler.scale(model(x).square().mean()).backward()
        scaler.unscale_(optimizer)
        optimizer.step()
        twin(x).square().mean().backward()
        for name, p in twin.named_parameters():
            p.grad = hvd.allreduce(p.grad, name=f"twin.{name}")
        plain.step()
        assert hvd.replicas_equal(model.state_dict())
        assert torch.allclose(model[0].weight, twin[0].weight, atol=1e-6)

    ranks(work)


def test_a_grad_scaler_that_looks_for_something_else_waits_for_nobody():
    """On one rank alone it would send zeros, beside what other ranks have to send later."""

    class Logging(torch.amp.GradScaler):
        def rate(self, optimizer):
            return [group["lr"] for group in optimizer.param_groups]

    def work():
        model = network()
        optimizer, scaler = wrap(model), Logging("cpu", init_scale=4.0)
        for step in range(2):
            if hvd.rank() == 0:
                assert scaler.rate(optimizer) == [0.1]
            backward(model, step)
            if hvd.rank() == 0:
                assert scaler.rate(optimizer) == [0.1]
            optimizer.step()
            optimizer.zero_grad()
        assert hvd.replicas_equal(model.state_dict())

    ranks(work)


def stateless(model, kind):
    """Return an optimizer that has no state yet."""
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "DiLoCo":
        return hvd.DiLoCo(inner, model.named_parameters(), every=2, compression="int4 | ef")
    if kind == "OneBitAdam":
        return hvd.OneBitAdam(model.named_parameters())
    return hvd.DistributedOptimizer(inner, model.named_parameters(), compression="int4 | ef")


@pytest.mark.parametrize("kind", ["DistributedOptimizer", "DiLoCo", "OneBitAdam"])
def test_a_checkpoint_of_torchs_takes_no_step_of_the_job(kind):
    """It lets an optimizer step with zeros, for a state to be there; here on one rank alone."""

    def work():
        ends = []
        for looks in (False, True):
            model = network()
            optimizer = stateless(model, kind)
            for step in range(5):
                before = [p.detach().clone() for p in model.parameters()]
                if looks and hvd.rank() == 0:
                    with warnings.catch_warnings(action="ignore"):  # of residuals, which it leaves
                        get_optimizer_state_dict(model, optimizer)
                assert all(map(torch.equal, model.parameters(), before))
                backward(model, step)
                optimizer.step()
                optimizer.zero_grad()
            ends.append([p.detach().clone() for p in model.parameters()])
        assert all(map(torch.equal, *ends))

    ranks(work)


def test_a_checkpoint_of_torchs_says_that_it_knows_no_masters():
    def work():
        model = network()
        hvd.apply_precision(model, "bf16(keep=())")
        optimizer = wrap(model, precision="bf16(keep=())")
        with pytest.raises(RuntimeError, match="save and load optimizer"):
            get_optimizer_state_dict(model, optimizer)

    ranks(work)


class LineSearch(torch.optim.SGD):
    """Looks at gradients before it evaluates the closure, and clears them in its own way."""

    @torch.no_grad()
    def step(self, closure):
        (group,) = self.param_groups
        slopes = [p.grad.clone() for p in group["params"]]
        for p, slope in zip(group["params"], slopes, strict=True):
            p.sub_(slope, alpha=group["lr"])
        loss = closure()
        for p, slope in zip(group["params"], slopes, strict=True):
            p.add_(slope, alpha=group["lr"] / 2)
        return loss

    def zero_grad(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.grad = None


def test_a_step_with_a_closure_waits_for_gradients_that_are_there_already():
    def work():
        model, twin = network(), network()
        optimizer = wrap(model, LineSearch)
        for step in range(3):
            backward(model, step)

            def closure(step=step):
                optimizer.zero_grad()
                backward(model, step + 10)
                return torch.tensor(float(hvd.rank()))

            assert optimizer.step(closure) == 0.5
            optimizer.zero_grad()
            backward(twin, step)
            for name, p in twin.named_parameters():
                p.data.sub_(hvd.allreduce(p.grad, name=name), alpha=0.05)
                p.grad = None
        assert hvd.replicas_equal(model.state_dict())
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)

    ranks(work)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (lambda m: {"model": m.state_dict(), "epoch": 3}, "'model' is a .*Dict of tensors"),
        (lambda m: {"w": m[0].weight, "more": [m[0].bias]}, "'more' is a list of tensors"),
        (lambda m: {"a": [1, 2]}, r"no tensor at all \('a' is a list\)"),
        (lambda m: "weights", "no tensor at all"),
        (lambda m: torch.optim.SGD(m.parameters(), lr=1.0).state_dict(), "broadcast_optimizer_st"),
    ],
)
def test_what_holds_no_parameters_is_not_passed_over(given, told):
    def work():
        model = network()
        with pytest.raises(TypeError, match=told):
            hvd.broadcast_parameters(given(model), 0)
        hvd.broadcast_parameters({**model.state_dict(), "extra": {"version": 1}}, 0)
        hvd.broadcast_parameters({}, 0)

    ranks(work)


def test_a_grad_scaler_waits_in_steps_of_fewer_passes_too():
    """The last batches of an epoch: what it sees is reduced, and is the same on all ranks."""

    def work():
        model, twin = network(), network()
        optimizer = wrap(model, backward_passes_per_step=2)
        plain = torch.optim.SGD(twin.parameters(), lr=0.1)
        scaler, other = (torch.amp.GradScaler("cpu", init_scale=64.0) for _ in range(2))
        for epoch in range(3):
            for batch in range(3):
                draw = torch.Generator().manual_seed(10 * epoch + batch)
                x = torch.randn(hvd.size(), 4, 8, generator=draw) * 5
                spoiled = float("inf") if (epoch, batch) == (1, 2) else 1.0
                own = spoiled if hvd.rank() == 1 else 1.0
                scaler.scale(model(x[hvd.rank()]).square().mean() * own).backward()
                other.scale(twin(x.flatten(0, 1)).square().mean() * spoiled).backward()
                if batch == 0:
                    continue
                for each, scale, net in ((optimizer, scaler, model), (plain, other, twin)):
                    scale.unscale_(each)
                    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
                    scale.step(each)
                    scale.update()
                    each.zero_grad()
        assert scaler.get_scale() == other.get_scale() == 32.0
        assert hvd.replicas_equal(model.state_dict())
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)

    ranks(work)


def test_a_grad_scaler_takes_no_gradient_on_one_rank_for_zeros():
    def work():
        body, head = network(), nn.Linear(4, 2)
        hvd.broadcast_parameters(head.state_dict(), 0)
        both = wrap(body), wrap(head)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(hvd.rank()))
        for step in range(3):
            hidden = body(x)
            used = step != 1 or hvd.rank() == 0
            out = head(hidden) if used else hidden
            scaler.scale(out.square().mean()).backward()
            before = head.weight.detach().clone()
            for optimizer in both:
                scaler.step(optimizer)
            scaler.update()
            assert not torch.equal(head.weight, before)
            for optimizer in both:
                optimizer.zero_grad()
        assert hvd.replicas_equal(head.state_dict())
        assert hvd.replicas_equal(body.state_dict())

    ranks(work)


@pytest.mark.parametrize("kind", ["op=Adasum", "OneBitAdam", "DiLoCo"])
def test_a_grad_scaler_is_refused_where_ranks_meet_in_step(kind):
    """On every rank, and before one of them skips its step."""

    def work():
        model = network()
        named = list(model.named_parameters())
        if kind == "op=Adasum":
            optimizer = wrap(model, op=hvd.Adasum)
        elif kind == "OneBitAdam":
            optimizer = hvd.OneBitAdam(named, lr=0.1)
        else:
            optimizer = hvd.DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1), named)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale(model(torch.ones(4, 8)).sum() * (float("inf") if hvd.rank() else 1)).backward()
        if hvd.size() > 1:
            with pytest.raises(RuntimeError, match=f"does not go together with {kind}: ranks meet"):
                scaler.step(optimizer)
            optimizer.zero_grad()
            backward(model)
        else:
            scaler.step(optimizer)
            scaler.update()
        assert optimizer.param_groups[0]["lr"] == 0.1
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.step()

    ranks(work)
    ranks(work, np=1)


@pytest.mark.parametrize("predivide", [1.0, 2.0])
@pytest.mark.parametrize("spec", ["topk(ratio=0.05) | ef", "topk(ratio=0.05) | ef(dtype='int8')"])
def test_one_rank_that_is_left_gives_back_what_all_held_back(spec, predivide):
    """Nothing travels there any more, so that nothing else would deliver it."""

    def weight():
        return nn.Parameter(torch.zeros(80, 64))

    def made(p):
        inner = torch.optim.SGD([p], lr=1.0)
        return hvd.DistributedOptimizer(
            inner, [("weight", p)], compression=spec, gradient_predivide_factor=predivide
        )

    def saving():
        p = weight()
        optimizer, draw = made(p), torch.Generator().manual_seed(hvd.rank())
        owed = torch.zeros(80, 64)
        for _ in range(6):
            optimizer.zero_grad()
            own = torch.randn(80, 64, generator=draw)
            owed += hvd.allreduce(own, name="owed")
            (p * own).sum().backward()
            optimizer.step()
        return optimizer.state_dict(), owed + p.detach()  # p is minus what was delivered

    def loading():
        first = made(weight())
        first.load_sharded([state for state, _ in saved])
        p = weight()
        optimizer = made(p)
        optimizer.load_state_dict(first.state_dict())  # saved before its first step
        assert optimizer.residual_norm() > 0
        for _ in range(2):
            optimizer.zero_grad()
            (p * 0.5).sum().backward()
            optimizer.step()
        assert optimizer.residual_norm() == 0
        return -p.detach() - 1.0

    saved = ranks(saving, np=2)
    (delivered,) = ranks(loading, np=1)
    states = [state["ringlet"]["states"]["weight"] for state, _ in saved]
    held = [wide({key: np.asarray(value) for key, value in s.items()}) for s in states]
    owed = torch.from_numpy(sum(held) / 2 * predivide).view(80, 64)
    torch.testing.assert_close(delivered, owed, rtol=0, atol=1e-5)
    if "int8" not in spec:  # which loses something in each step
        torch.testing.assert_close(delivered, saved[0][1], rtol=0, atol=1e-4)


@pytest.mark.parametrize("spec", ["topk(ratio=0.1) | ef", "int8 | momentum_correction"])
def test_parameters_that_are_added_or_unfrozen_leave_residuals_alone(spec):
    def work():
        model = network()
        model[0].weight.requires_grad_(False)
        head = nn.Linear(4, 300)
        hvd.broadcast_parameters(head.state_dict(), 0)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        options = {"compression": {"2.*": spec, "*": "none"}} if "topk" in spec else {}
        options = options or {"compression": spec}
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), **options)
        big = {"2.weight": optimizer._ringlet.memory.states["2.weight"]}
        steps(model, optimizer)
        before, step = dict(big["2.weight"]), optimizer._ringlet.step
        model[0].weight.requires_grad_(True)
        inner.add_param_group({"params": list(head.parameters()), "lr": 0.01})
        backward(model)
        with pytest.raises(RuntimeError, match=r"wrap the original optimizer again.*residuals"):
            optimizer.step()
        everything = [*model.named_parameters(), *head.named_parameters(prefix="head")]
        optimizer = hvd.DistributedOptimizer(inner, everything, **options)
        after = optimizer._ringlet.memory.states["2.weight"]
        assert after.keys() == before.keys()
        assert optimizer._ringlet.step >= step
        steps(nn.Sequential(model, head), optimizer)
        assert hvd.replicas_equal(model.state_dict())
        assert hvd.replicas_equal(head.state_dict())

    ranks(work)


@pytest.mark.parametrize("op", [hvd.Average, hvd.Adasum])
def test_zeros_on_what_is_frozen_are_no_gradient_that_was_left_out(op):
    """``zero_grad(set_to_none=False)`` leaves them there, also when the optimizer is made anew."""

    def work():
        model = network()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), op=op)
        steps(model, optimizer)
        model[0].requires_grad_(False)
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), op=op)
        before = [p.detach().clone() for p in model.parameters()]
        for _ in range(2):
            optimizer.zero_grad(set_to_none=False)
            backward(model)
            optimizer.step()
        still = [torch.equal(p, was) for p, was in zip(model.parameters(), before, strict=True)]
        assert still == [not p.requires_grad for p in model.parameters()]
        assert hvd.replicas_equal(model.state_dict())
        model[0].weight.grad += 1 + hvd.rank()  # which would move it otherwise on each
        backward(model)
        with pytest.raises(RuntimeError, match="was added or unfrozen"):
            optimizer.step()

    ranks(work)


@pytest.mark.parametrize("precision", ["bf16", "fp16(init=256)"])
def test_wrapping_again_keeps_masters(precision):
    """Their values and their momenta: training goes on bit for bit."""

    def trained(again, thawed):
        model = hvd.apply_precision(network(), precision)
        model[2].requires_grad_(not thawed)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

        def made():
            named, spec = model.named_parameters(), "topk(ratio=0.05) | ef"
            return hvd.DistributedOptimizer(inner, named, compression=spec, precision=precision)

        optimizer = made()
        for step in range(6):
            if step == 3:
                model[2].requires_grad_(True)
                if again or thawed:
                    held = optimizer.master_parameters()
                    optimizer = made()
                    assert all(map(is_, held, optimizer.master_parameters()))
            before = model[2].weight.detach().clone()
            optimizer.zero_grad()
            draw = torch.Generator().manual_seed(10 * step + hvd.rank())
            optimizer.scale(model(torch.randn(4, 8, generator=draw)).square().mean()).backward()
            optimizer.step()
            assert torch.equal(before, model[2].weight) is (thawed and step < 3)
        assert hvd.replicas_equal(model.state_dict())
        with pytest.raises(ValueError, match="wrap it again with precision="):
            hvd.DistributedOptimizer(inner, model.named_parameters())
        return [p.detach().clone() for p in optimizer.master_parameters()]

    def work():
        assert all(map(torch.equal, trained(False, False), trained(True, False)))
        trained(True, True)

    ranks(work)


@pytest.mark.parametrize("precision", ["fp16(init=256)", "amp_fp16(init=256)"])
def test_wrapping_again_keeps_the_loss_scale(precision):
    def work():
        model = hvd.apply_precision(network(), precision)
        inner = torch.optim.SGD(model.parameters(), lr=0.1)

        def made(policy):
            named = model.named_parameters()
            return hvd.DistributedOptimizer(inner, named, compression="int8 | ef", precision=policy)

        optimizer = made(precision)
        for factor in (1.0, 1e30):
            optimizer.zero_grad()
            loss = model(torch.ones(4, 8) + hvd.rank()).float().square().mean()
            optimizer.scale(loss * factor).backward()
            optimizer.step()
        scale, held = optimizer.loss_scale, optimizer.residual_norm()
        assert optimizer.skipped_steps == 1
        assert scale == 128
        optimizer = made(precision)
        assert (optimizer.loss_scale, optimizer.skipped_steps) == (scale, 1)
        assert optimizer.residual_norm() == held
        optimizer = made(precision.replace("256", "64"))  # which somebody has chosen
        assert (optimizer.loss_scale, optimizer.skipped_steps) == (64, 0)
        assert optimizer.residual_norm() == pytest.approx(held * 64 / scale)

    ranks(work)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_a_nested_tensor_is_told_as_what_it_is(layout):
    def work():
        nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=layout)
        for call in (hvd.allreduce, hvd.allgather, lambda each: hvd.broadcast(each, 0)):
            with pytest.raises(TypeError, match=r"tensor is nested.*to_padded_tensor"):
                call(nested)

    ranks(work, np=1)


def test_a_tensor_with_a_negative_bit_travels():
    """As a loss that is made of complex numbers may have it: NumPy cannot look at it."""

    def work():
        negative = torch.tensor([1 + 2j]).conj().imag
        assert negative.is_neg()
        for call in (hvd.allreduce, hvd.allgather, hvd.reducescatter):
            assert call(negative).tolist() == [-2.0]
        assert hvd.broadcast(negative, 0).tolist() == [-2.0]
        assert hvd.grouped_allreduce([negative])[0].tolist() == [-2.0]

    ranks(work, np=1)


def test_a_shard_of_fsdp2_is_refused_with_what_to_do():
    class Shard(torch.Tensor):
        """What a DTensor looks like."""

        device_mesh = "a mesh"

    p = nn.Parameter(torch.ones(3)).as_subclass(Shard)

    def work():
        for call in (
            lambda: hvd.allreduce(p),
            lambda: hvd.broadcast_parameters({"p": p}),
        ):
            with pytest.raises(TypeError, match=r"DTensor.*compress_fsdp"):
                call()

    ranks(work, 1)


@pytest.mark.parametrize("precision", ["bf16", "fp16", "amp_bf16", "bf16(keep=['*.bias'])"])
def test_a_model_with_a_precision_can_be_saved_whole(precision):
    model = hvd.apply_precision(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), precision)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    again = torch.load(stream, weights_only=False)
    x = torch.ones(2, 8)
    assert torch.equal(again(x), model(x))
    assert again(x).dtype is torch.float32


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (3,), (8, 6), (5, 7)])
def test_a_sum_of_bits_is_of_the_values_however_they_lie(dtype, shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    room = torch.zeros(x.numel() + 1, dtype=dtype)
    room[1:] = x.flatten()
    own = sum_of_bits(x)
    assert own == sum_of_bits(room[1:].view(shape))
    if x.dim() == 2:
        assert own == sum_of_bits(x.t().contiguous().t())
    changed = x.clone()
    changed.view(-1)[-1] = ~changed.view(-1)[-1] if dtype is torch.bool else 17.0
    assert own != sum_of_bits(changed)


def test_rows_of_a_step_that_a_rank_gives_up_before_it_begins_are_no_later_steps():
    def work():
        table = nn.Embedding(4096, 32, sparse=True)
        nn.init.zeros_(table.weight)
        model = nn.Sequential(table, nn.Linear(32, 1, bias=False))
        nn.init.ones_(model[1].weight)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters())
        told = []
        for step in range(7):
            optimizer.zero_grad()
            if step == 4 and hvd.rank() == 1:
                optimizer.abandon_step("this rank has no data")
                continue
            model(torch.tensor([step])).sum().backward()
            try:
                optimizer.step()
            except hvd.StepAbandoned:
                told.append(step)
        used = table.weight.detach()[:7].abs().sum(1) > 0
        return told, used.tolist(), hvd.replicas_equal(model.state_dict())

    used = [True] * 4 + [False] + [True] * 2
    assert ranks(work) == [([4], used, True), ([], used, True)]


def test_a_comparison_that_a_rank_left_before_fails_no_step_of_those_who_stay():
    def work():
        if hvd.rank() == 1:
            return
        check = DriftCheck({"w": torch.ones(3)}, "alike", hvd.global_process_set)
        check.look([], dict)
        until_told(check)
        with pytest.raises(PeerLost, match="rank 1"):
            hvd.allreduce(torch.ones(3))

    ranks(work)


def until_told(check):
    while check._drift._under_way:
        time.sleep(0.01)
        check.look([], dict)


def test_nor_does_one_that_cannot_begin_because_a_rank_has_ended(monkeypatch):
    """A script may end with its first step, on one rank before the other."""

    def closed(*_, **__):
        raise PeerLost("rank 0, the coordinator, closed the control plane", [0])

    monkeypatch.setattr(drift, "RankComparison", closed)

    def work():
        check = DriftCheck({"w": torch.ones(3)}, "late", hvd.global_process_set)
        check.look([], dict)
        assert not check._drift._under_way
        check.look([], dict)

    ranks(work, np=1)


def test_a_comparison_of_other_parameters_on_each_rank_is_no_secret():
    """No operation after it would tell that ranks differ."""

    def work():
        parameters = {"w": torch.ones(3), **({"v": torch.ones(3)} if hvd.rank() else {})}
        check = DriftCheck(parameters, "others", hvd.global_process_set)
        check.look([], dict)
        with pytest.raises(Mismatch, match=r"others\.alike1"):
            until_told(check)

    ranks(work)


@pytest.mark.parametrize("sparse", [True, False])
def test_the_last_rank_pays_what_was_held_back_to_what_is_trained(sparse):
    """To sparse gradients as such, as SparseAdam takes no other; and to frozen ones later."""
    make = torch.optim.SparseAdam if sparse else torch.optim.SGD

    def train(shards=None):
        hvd.init()
        table = nn.Embedding(512, 8, sparse=sparse, _weight=torch.ones(512, 8))
        optimizer = wrap(table, make, compression="topk(ratio=0.01) | ef")

        def step():
            optimizer.zero_grad()
            table(torch.arange(0, 512, 2)).square().sum().backward()
            optimizer.step()

        if shards is None:
            step()
            assert optimizer.residual_norm() > 0
            return optimizer.state_dict()
        optimizer.load_sharded(shards)
        if not sparse:
            table.weight.requires_grad_(False)
            optimizer.zero_grad()
            optimizer.step()
            assert table.weight.eq(1).all()
            assert optimizer.residual_norm() > 0
            table.weight.requires_grad_(True)
        step()
        return optimizer.residual_norm()

    shards = ringlet.run(train, np=2, transport="local")
    assert ringlet.run(train, args=(shards,), np=1, transport="local") == [0]


def test_no_name_is_taken_any_more_when_a_sparse_reduction_has_failed():
    """Who tried again at once was told of a duplicate name."""

    def work():
        rows = torch.eye(3).to_sparse()
        if hvd.rank():
            with pytest.raises(Mismatch):
                hvd.allgather(torch.zeros(3), name="rows.indices")  # of another shape and dtype
            time.sleep(0.2)  # in which the other rank, if it did not wait, has tried again
            hvd.allgather(torch.ones(3), name="rows.values")
        else:
            with pytest.raises(Mismatch):
                hvd.synchronize(hvd.sparse_allreduce_async(rows, "rows", hvd.Sum))
        found = hvd.synchronize(hvd.sparse_allreduce_async(rows, "rows", hvd.Sum))
        return found.to_dense().tolist()

    assert ranks(work) == [(2 * torch.eye(3)).tolist()] * 2


def test_a_handle_of_one_tensor_is_a_handle_in_all_respects():
    """It lacked a result of the kind that its base has."""

    def work():
        x, y = torch.ones(3), torch.ones(3)
        hvd.allreduce_(x, name="x")  # the second call of a name has a handle of its own kind
        one, several = hvd.allreduce_async_(x, name="x"), hvd.grouped_allreduce_async_([y])
        assert type(one) is not type(several)
        assert one.wait() is one._outcome() is x
        assert several.wait()[0] is several._outcome()[0] is y
        return True

    assert ranks(work) == [True] * 2
