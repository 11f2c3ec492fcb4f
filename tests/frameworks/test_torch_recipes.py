"""Optimizer recipes on top of compressors, on in-process ranks."""

import copy
import io
import time
import warnings

import numpy as np
import pytest
import torch

import ringlet
import ringlet.torch as hvd
from ringlet.compressors import Compressor
from ringlet.fusion import CompressionFailed, Group
from ringlet.ring.errors import Mismatch

pytestmark = pytest.mark.preloaded("torch")


def problem():
    """A regression whose optimum is known, with data of its own on every rank."""
    model = torch.nn.Linear(40, 40, bias=False)
    with torch.no_grad():  # ranks are threads here and share torch's global random numbers
        model.weight.normal_(0, 0.1, generator=torch.Generator().manual_seed(9))
    target = torch.linspace(-1, 1, 40)
    numbers = torch.Generator().manual_seed(hvd.rank())

    def loss():
        x = torch.randn(16, 40, generator=numbers)
        return (model(x) - x * target).square().mean()

    return model, loss


def final(model, loss):
    with torch.no_grad():
        value = hvd.allreduce(torch.stack([loss() for _ in range(8)]).mean(), name="final")
    return value.item(), hvd.replicas_equal(model.state_dict())


def outcome(train, np=3):
    results = ringlet.run(train, np=np, transport="local")
    assert all(equal for _, equal in results)
    assert len({value for value, _ in results}) == 1
    return results[0][0]


@pytest.mark.parametrize("spec", ["none", "int8 | ef", "topk(ratio=0.5) | ef"])
def test_diloco_learns_and_agrees(spec):
    def train():
        hvd.init()
        model, loss = problem()
        inner = torch.optim.SGD(model.parameters(), lr=0.5)
        optimizer = hvd.DiLoCo(inner, model.named_parameters(), every=8, compression=spec)
        outer = 0
        for _ in range(160):
            optimizer.zero_grad()
            loss().backward()
            outer += optimizer.step()
        assert outer == 20
        return final(model, loss)

    assert outcome(train) < 0.05


def test_local_sgd_is_plain_averaging():
    def train():
        hvd.init()
        model, loss = problem()
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = hvd.DiLoCo(
            inner, model.named_parameters(), 4, "none", outer_lr=1.0, outer_momentum=0.0
        )
        for step in range(4):
            optimizer.zero_grad()
            loss().backward()
            if step == 3:
                own = model.weight.detach() - 0.1 * model.weight.grad
                mean = hvd.allreduce(own, name="own")
            optimizer.step()
        assert torch.allclose(model.weight, mean, atol=1e-6)
        return final(model, loss)

    outcome(train)


@pytest.mark.parametrize("spec", ["onebit | ef", "int8 | ef"])
def test_onebit_adam_learns_and_agrees(spec):
    def train():
        hvd.init()
        model, loss = problem()
        optimizer = hvd.OneBitAdam(model.named_parameters(), lr=0.01, warmup=40, compression=spec)
        for step in range(400):
            optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / 400)
            optimizer.zero_grad()
            loss().backward()
            optimizer.step()
        return final(model, loss)

    assert outcome(train) < 0.05


@pytest.mark.parametrize(
    ("decay", "adam"),
    [
        ({}, torch.optim.Adam),
        ({"weight_decay": 0.3}, torch.optim.Adam),
        ({"weight_decay": 0.3, "decoupled_weight_decay": True}, torch.optim.AdamW),
    ],
)
def test_onebit_adam_warms_up_as_adam(decay, adam):
    def train():
        hvd.init()
        model, loss = problem()
        twin = torch.nn.Linear(40, 40, bias=False)
        twin.load_state_dict(model.state_dict())
        optimizer = hvd.OneBitAdam(model.named_parameters(), lr=0.01, warmup=100, **decay)
        plain = adam(twin.parameters(), lr=0.01, weight_decay=decay.get("weight_decay", 0.0))
        for step in range(10):
            optimizer.zero_grad()
            loss().backward()
            twin.weight.grad = hvd.allreduce(model.weight.grad, name=f"grad{step}")
            optimizer.step()
            plain.step()
        assert torch.allclose(model.weight, twin.weight, atol=1e-6)
        return final(model, loss)

    outcome(train)


def test_demo_is_a_spec_and_a_sign():
    """Peng, Quesnelle and Kingma, "DeMo", 2024: momentum is error feedback with decay."""

    def train():
        hvd.init()
        model, loss = problem()
        spec = "block_topk(ratio=0.25, block=64, dct=True) | ef(decay=0.9)"
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=0.01), model.named_parameters(), spec
        )
        for step in range(200):
            optimizer.param_groups[0]["lr"] = 0.02 * (1 - step / 200)
            optimizer.zero_grad()
            loss().backward()
            optimizer.synchronize()
            model.weight.grad.sign_()
            with optimizer.skip_synchronize():
                optimizer.step()
        return final(model, loss)

    assert outcome(train) < 0.05


def made(kind, model, spec=None):
    named = model.named_parameters()
    if kind == "onebit":
        return hvd.OneBitAdam(named, lr=0.01, warmup=4, compression=spec or "onebit | ef")
    inner = torch.optim.Adam(model.parameters(), lr=0.01)
    return hvd.DiLoCo(inner, named, every=3, compression=spec or "topk(ratio=0.1) | ef")


def train(model, optimizer, loss, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()


def stored(state):
    """Return ``state`` as it comes back from a file, read without executing anything."""
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


@pytest.mark.parametrize("way", ["own", "sharded", "broadcast"])
@pytest.mark.parametrize("before", [2, 7])
@pytest.mark.parametrize("kind", ["onebit", "diloco"])
def test_a_checkpoint_continues_bit_for_bit(kind, before, way):
    def work():
        hvd.init()
        model, loss = problem()
        optimizer = made(kind, model)
        train(model, optimizer, loss, before)
        kept = stored({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        shards = hvd.allgather_object(kept["optimizer"])

        again, loss_again = problem()
        resumed = made(kind, again)
        for _ in range(before):
            loss_again()  # as many numbers drawn
        train(model, optimizer, loss, 5)
        again.load_state_dict(kept["model"])
        if way == "sharded":
            resumed.load_sharded(shards)
        else:
            resumed.load_state_dict(kept["optimizer"])
        if way == "broadcast" and kind == "onebit":
            hvd.broadcast_optimizer_state(resumed, 0)
        train(again, resumed, loss_again, 5)
        assert torch.equal(model.weight, again.weight)
        assert resumed.residual_norm() == optimizer.residual_norm() > 0

    ringlet.run(work, np=2, transport="local")


@pytest.mark.parametrize("loads", [("late", "early"), ("", "late"), ("late", "")])
@pytest.mark.parametrize("begun", [True, False])
def test_states_of_other_steps_are_told_of_until_all_have_one(begun, loads):
    """Warm-up ends after four steps, and with it the way in which ranks reduce."""

    def work():
        hvd.init()
        model, loss = problem()
        optimizer = made("onebit", model)
        kept = {"early": None, "late": None}
        for name in kept:
            train(model, optimizer, loss, 3)
            kept[name] = stored(optimizer.state_dict())
        train(model, optimizer, loss, 1)
        if not begun:
            optimizer = made("onebit", model)
        asked = loads[hvd.rank() == 1]
        if asked:
            optimizer.load_state_dict(kept[asked])
        for _ in range(3):
            with pytest.raises(Mismatch, match=r"OneBitAdam: 'steps taken' differs .*rank 1: "):
                train(model, optimizer, loss, 1)
        optimizer.load_state_dict(kept["late"])
        train(model, optimizer, loss, 4)
        return final(model, loss)

    outcome(work)


@pytest.mark.parametrize("way", ["own", "sharded"])
@pytest.mark.parametrize("kind", ["onebit", "diloco"])
def test_what_was_loaded_is_saved_again_before_a_step(kind, way):
    def work():
        hvd.init()
        model, loss = problem()
        optimizer = made(kind, model)
        train(model, optimizer, loss, 6)
        kept = stored(optimizer.state_dict())
        resumed = made(kind, model)
        if way == "sharded":
            resumed.load_sharded(hvd.allgather_object(kept))
        else:
            resumed.load_state_dict(kept)
        again = stored(resumed.state_dict())
        assert again["ringlet"].keys() == kept["ringlet"].keys()
        assert all(
            again["ringlet"][key] == kept["ringlet"][key] for key in ("rank", "size", "step")
        )
        for name, state in kept["ringlet"]["states"].items():
            for key, value in state.items():
                found = again["ringlet"]["states"][name][key]
                same = torch.equal if isinstance(value, torch.Tensor) else lambda a, b: a == b
                assert same(found, value), (name, key)

    ringlet.run(work, np=2, transport="local")


@pytest.mark.filterwarnings("error:backward.. has given none")
@pytest.mark.filterwarnings("ignore:what compressors remember was loaded on rank")
@pytest.mark.parametrize("spec", [None, "randomk(ratio=0.1, unbiased=False) | ef", "powersgd | ef"])
@pytest.mark.parametrize("kind", ["onebit", "diloco"])
def test_rank_0_alone_may_load_and_broadcast(kind, spec):
    def work():
        hvd.init()
        model, loss = problem()
        optimizer = made(kind, model, spec)
        train(model, optimizer, loss, 6)
        kept = stored({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
        again, _ = problem()
        resumed = made(kind, again, spec)
        if hvd.rank() == 0:
            again.load_state_dict(kept["model"])
            resumed.load_state_dict(kept["optimizer"])
        hvd.broadcast_parameters(again.state_dict(), 0)
        hvd.broadcast_optimizer_state(resumed, 0)
        assert resumed.steps == 6
        train(again, resumed, loss, 6)
        assert hvd.replicas_equal(again.state_dict())

    ringlet.run(work, np=2, transport="local")


def test_another_number_of_ranks_loads_what_all_have_saved():
    def saved(kind):
        hvd.init()
        model, loss = problem()
        optimizer = made(kind, model)
        train(model, optimizer, loss, 6)
        return stored(optimizer.state_dict())

    def resumed(kind, states):
        hvd.init()
        model, loss = problem()
        optimizer = made(kind, model)
        optimizer.load_sharded(states)
        train(model, optimizer, loss, 6)
        assert optimizer.steps == 12
        return hvd.replicas_equal(model.state_dict())

    for kind in ("onebit", "diloco"):
        states = ringlet.run(saved, (kind,), np=3, transport="local")
        assert all(ringlet.run(resumed, (kind, states), np=2, transport="local"))


def test_schedulers_take_diloco():
    def work():
        hvd.init()
        model, loss = problem()
        optimizer = made("diloco", model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        for step in range(3):
            assert optimizer.inner.param_groups[0]["lr"] == 0.01 * 0.5**step
            train(model, optimizer, loss, 1)
            scheduler.step()
        assert float(optimizer.step(loss).detach()) > 0  # a closure's loss, as with any optimizer
        with pytest.raises(RuntimeError, match="make a new one"):
            optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))]})
        with pytest.raises(ValueError, match="not saved by a DiLoCo"):
            optimizer.load_state_dict(optimizer.inner.state_dict())

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ringlet.run(work, np=2, transport="local")


@pytest.mark.parametrize("options", [{"every": 0}, {"outer_lr": 0}, {"outer_momentum": 1}])
def test_diloco_refuses_settings_out_of_range(options):
    model = torch.nn.Linear(2, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=next(iter(options))):
        hvd.DiLoCo(inner, model.named_parameters(), **options)


class Half(Compressor):
    calls = 0

    def compress(self, x, ctx):
        if ctx.rank == 1 and ctx.step == 2:
            self.__class__.calls += 1
            if self.__class__.calls == 2:
                raise KeyError("moody")
        return {"values": np.where(np.arange(x.size) % 4, 0, x).astype(np.float32)}

    def decompress(self, payload, out, ctx):
        out[:] = payload["values"]


def fail_to_hand_in(monkeypatch, late):
    """Let rank 1 raise TypeError in its third step, when one weight was compressed, or ``late``.

    That is when all ranks have reduced the step.
    """
    submit_all, turns = Group.submit_all, []

    def some(group, tensors):
        if hvd.rank() == 1:
            turns.append(group.turn)
        if hvd.rank() == 0 or len(turns) != 3:
            return submit_all(group, tensors)
        residual = group.members[tensors[0][0]].state["residual"]
        before, until = residual.copy(), time.monotonic() + 30
        submit_all(group, tensors if late else tensors[:1])
        while not group.ended if late else np.array_equal(residual, before):
            if time.monotonic() > until:
                pytest.fail("nothing happens")
            time.sleep(0.01)
        raise TypeError("moody")

    monkeypatch.setattr(Group, "submit_all", some)


@pytest.mark.parametrize("where", ["compressing", "handing in", "behind that"])
def test_an_outer_step_that_fails_is_made_up_for_by_the_next(where, monkeypatch):
    """What moved, and is still held back, is what all inner steps moved: nothing counts twice."""

    Half.calls = 0 if where == "compressing" else 2  # where nothing is raised
    if where != "compressing":
        monkeypatch.setenv("RINGLET_FUSION_THRESHOLD", str(4 * 64 * 64))  # a bucket for each weight
        fail_to_hand_in(monkeypatch, late=where == "behind that")

    def train():
        hvd.init()
        model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 64))
        hvd.broadcast_parameters(model.state_dict())
        named = list(model.named_parameters())
        start = {name: p.detach().clone() for name, p in named}
        optimizer = hvd.DiLoCo(
            torch.optim.SGD(model.parameters(), lr=1.0),
            named,
            every=2,
            compression=f"{__name__}:Half | ef",
            outer_lr=1.0,
            outer_momentum=0.0,
        )
        failed = 0
        for _ in range(12):
            for _, p in named:
                p.grad = torch.full_like(p, hvd.rank() + 1.0)
            try:
                optimizer.step()
            except (CompressionFailed, hvd.StepAbandoned, TypeError):
                failed += 1
            except RuntimeError:  # all ranks had reduced it
                assert optimizer.step()  # that one, which the other rank has taken
        left = optimizer.state_dict()["ringlet"]["states"]
        for name, p in named:
            held = left.get(name, {}).get("residual")
            held = torch.zeros(p.numel()) if held is None else held
            owed = hvd.allreduce(held.reshape(p.shape), name=name)
            assert torch.allclose(start[name] - p.detach() + owed, torch.tensor(18.0), atol=1e-3)
        return failed

    failed = [0, 0] if where == "behind that" else [1, 1]
    assert ringlet.run(train, np=2, transport="local") == failed


@pytest.mark.parametrize("kind", ["diloco", "onebit", "adasum"])
def test_parameters_that_are_unfrozen_or_added_are_refused(kind):
    """Ranks would not agree on them: each would have its own."""

    def train():
        hvd.init()
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        hvd.broadcast_parameters(model.state_dict())
        model[0].requires_grad_(False)
        named = list(model.named_parameters())
        inner = torch.optim.SGD(model.parameters(), lr=0.1)
        if kind == "diloco":
            optimizer = hvd.DiLoCo(inner, named, every=2)
        elif kind == "onebit":
            optimizer = hvd.OneBitAdam(named, warmup=1)
            optimizer.add_param_group({"params": list(model[0].parameters())})
        else:
            optimizer = hvd.DistributedOptimizer(inner, named, op=hvd.Adasum)

        def step(closure=None):
            optimizer.zero_grad()
            model(torch.ones(2, 4) * (hvd.rank() + 1)).sum().backward()
            optimizer.step(closure)

        step()
        step()
        model[0].requires_grad_(True)
        for closure in (None, lambda: None):
            with pytest.raises(RuntimeError, match="unfrozen after"):
                step(closure)
        if kind == "diloco":
            with pytest.raises(ValueError, match="does not name"):
                hvd.DiLoCo(inner, named[:2])

    ringlet.run(train, np=2, transport="local")


def test_a_scheduler_of_adasums_original_goes_on_after_loading():
    def train():
        hvd.init()
        model = torch.nn.Linear(3, 1)
        inner = torch.optim.SGD(model.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.StepLR(inner, 1, 0.1)
        optimizer = hvd.DistributedOptimizer(inner, model.named_parameters(), op=hvd.Adasum)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)

    ringlet.run(train, np=2, transport="local")


def test_adasum_meets_on_all_ranks_after_some_of_them_had_an_optimizer_of_their_own():
    def train():
        hvd.init()
        pair = hvd.add_process_set([0, 1])

        def stepped(process_set):
            torch.manual_seed(0)
            model = torch.nn.Linear(3, 1)
            inner, named = torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters()
            optimizer = hvd.DistributedOptimizer(
                inner, named, op=hvd.Adasum, process_set=process_set
            )
            model(torch.full((1, 3), hvd.rank() + 1.0)).sum().backward()
            optimizer.step()
            return model.state_dict()

        if pair.included():
            stepped(pair)
        return hvd.replicas_equal(stepped(hvd.global_process_set))

    assert ringlet.run(train, np=3, transport="gloo") == [True] * 3


@pytest.mark.parametrize(
    "options", [{"lr": 0}, {"betas": (1.0, 0.9)}, {"warmup": 0}, {"weight_decay": -1}]
)
def test_onebit_adam_refuses_settings_out_of_range(options):
    model = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=next(iter(options))):
        hvd.OneBitAdam(model.named_parameters(), **options)


@pytest.mark.parametrize("kind", ["diloco", "onebit_adam"])
def test_neither_can_be_copied_or_saved_whole(kind):
    def train():
        hvd.init()
        model, _ = problem()
        named = list(model.named_parameters())
        if kind == "diloco":
            made = hvd.DiLoCo(torch.optim.SGD(model.parameters(), lr=0.1), named)
        else:
            made = hvd.OneBitAdam(named)
        with pytest.raises(TypeError, match="cannot be copied or pickled"):
            copy.deepcopy(made)

    ringlet.run(train, np=1, transport="local")


def after_a_step():
    """Return a model and the OneBitAdam that has taken its first step."""
    model, loss = problem()
    made = hvd.OneBitAdam(model.named_parameters())
    loss().backward()
    made.step()
    return model, made


def test_a_checkpoint_of_onebit_adam_without_weight_decay_is_loaded():
    def train():
        hvd.init()
        _, made = after_a_step()
        old = made.state_dict()
        for name in ("weight_decay", "decoupled_weight_decay"):
            del old["param_groups"][0][name]
        made.load_state_dict(old)
        made.step()
        assert made.param_groups[0]["weight_decay"] == 0

    ringlet.run(train, np=1, transport="local")


def test_a_checkpoint_of_onebit_adam_without_steps_is_refused_whole():
    def train():
        hvd.init()
        model, made = after_a_step()
        old = copy.deepcopy(made.state_dict())
        before = made.steps, made.state[model.weight]["exp_avg"].clone()
        for state in old["state"].values():
            del state["step"]
            state["exp_avg"] = state["exp_avg"] + 1
        with pytest.raises(ValueError, match="does not say after how many steps"):
            made.load_state_dict(old)
        assert made.steps == before[0]
        assert made.state[model.weight]["exp_avg"].equal(before[1])

    ringlet.run(train, np=1, transport="local")


@pytest.mark.parametrize("spec", ["none", "int4 | ef"])
def test_diloco_moves_nothing_that_was_frozen_since_the_last_outer_step(spec):
    def train():
        hvd.init()
        model, loss = problem()
        extra = torch.nn.Parameter(torch.ones(2000))
        named = [*model.named_parameters(), ("extra", extra)]
        inner = torch.optim.SGD([p for _, p in named], lr=0.1)
        optimizer = hvd.DiLoCo(inner, named, every=2, compression=spec)
        for step in range(16):
            extra.requires_grad_(step not in (4, 5, 6, 7, 10))  # two rounds, and half of one
            before = extra.detach().clone()
            optimizer.zero_grad()
            if step == 6:  # a checkpoint says what has moved
                optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
            (loss() + (extra * (hvd.rank() + 1)).sum()).backward()
            optimizer.step()
            assert torch.equal(extra, before) is (step in (4, 5, 6, 7, 10)), step
        extra.requires_grad_(hvd.rank() > 0)
        optimizer.zero_grad()
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        (loss() + extra.sum() * hvd.rank()).backward()
        with pytest.raises(Mismatch, match="set requires_grad alike on all ranks"):
            optimizer.step()
        return True

    assert ringlet.run(train, np=2, transport="local") == [True] * 2


def test_onebit_adam_passes_over_what_is_frozen():
    """As Adam does, in both phases, on all ranks alike; where they differ all are told."""

    def train():
        hvd.init()
        model, loss = problem()
        extra = torch.nn.Parameter(torch.ones(2000))
        named = [*model.named_parameters(), ("extra", extra)]
        optimizer = hvd.OneBitAdam(named, lr=0.01, warmup=3)
        for step in range(8):
            extra.requires_grad_(step not in (2, 6))
            before = extra.detach().clone()
            optimizer.zero_grad()
            (loss() + (extra * (hvd.rank() + 1)).sum()).backward()
            optimizer.step()
            assert torch.equal(extra, before) is (step in (2, 6)), step
            assert len(optimizer.state[extra]) == 3
        optimizer.zero_grad()
        extra.requires_grad_(hvd.rank() > 0)
        with pytest.raises(Mismatch, match="set requires_grad alike on all ranks"):
            optimizer.step()
        return hvd.replicas_equal(dict(named))

    assert ringlet.run(train, np=2, transport="local") == [True] * 2


def test_onebit_adam_leaves_what_had_no_gradient_in_the_warm_up():
    """A black margin, say: a bit has no zero, and was divided by epsilon alone."""

    def train():
        hvd.init()
        torch.manual_seed(0)
        model = torch.nn.Linear(40, 3)
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
        before = model.weight.detach().clone()
        lit = torch.ones(40)
        lit[:8], lit[8:12] = 0.0, 1e-6  # black, and next to black
        numbers = torch.Generator().manual_seed(hvd.rank())
        optimizer = hvd.OneBitAdam(model.named_parameters(), lr=0.01, warmup=5)
        for step in range(40):
            optimizer.zero_grad()
            model(torch.randn(16, 40, generator=numbers) * lit).square().sum().backward()
            last = model.weight.detach().clone()
            optimizer.step()
            assert (model.weight - last).abs().max() <= 0.01 * 0.1 / 0.001**0.5 * 1.001, step
        assert torch.equal(model.weight[:, :8], before[:, :8])
        assert not torch.equal(model.weight[:, 12:], before[:, 12:])
        return hvd.replicas_equal(model.state_dict())

    with pytest.warns(UserWarning, match="24 of 120 elements of 'weight' had no") as told:
        assert ringlet.run(train, np=2, transport="local") == [True] * 2
    assert len(told) == 2


@pytest.mark.filterwarnings("ignore:OneBitAdam")
def test_onebit_adam_refuses_sparse_gradients_on_all_ranks():
    def train():
        hvd.init()
        table = torch.nn.Embedding(50, 40, sparse=hvd.rank() == 1, _weight=torch.ones(50, 40))
        optimizer = hvd.OneBitAdam([("table", table.weight)], warmup=2)
        table(torch.arange(4)).square().sum().backward()
        with pytest.raises(RuntimeError, match=r"gradient of 'table' is sparse.*sparse=False"):
            optimizer.step()
        table.sparse = False
        for _ in range(4):
            optimizer.zero_grad()
            table(torch.arange(4) + hvd.rank()).square().sum().backward()
            optimizer.step()
        return hvd.replicas_equal([("table", table.weight)])

    assert ringlet.run(train, np=2, transport="local") == [True] * 2
