"""Precision policies: the registry, the loss scale as a state machine, training on real ranks."""

from __future__ import annotations

import io
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringlet.torch as hvd
from ringlet.precision import (
    DynamicScale,
    NoScale,
    Policy,
    StaticScale,
    parse_policy,
    register_policy,
    registered_policies,
)

SPECS = ["none", "fp16", "bf16", "int8 | ef", "topk(ratio=0.1) | ef", "powersgd(rank=2) | ef"]


@given(
    overflows=st.lists(st.booleans(), max_size=60),
    interval=st.integers(1, 5),
    start=st.sampled_from([1.0, 2.0**-14, 2.0**15, 2.0**24]),
)
def test_a_dynamic_scale_halves_and_doubles_within_its_bounds(overflows, interval, start):
    scale = DynamicScale(scale=start, interval=interval)
    clean = 0
    for overflow in overflows:
        before, scale = scale, scale.after(overflow)
        clean = 0 if overflow else clean + 1
        if overflow:
            assert scale.scale == max(before.scale / 2, before.least)
        elif clean == interval:
            assert scale.scale == min(before.scale * 2, before.most)
            clean = 0
        else:
            assert scale.scale == before.scale
        assert scale.clean == clean
        assert before.least <= scale.scale <= before.most
        again = DynamicScale(interval=interval).loaded(scale.state_dict())
        assert again == scale


@given(st.lists(st.booleans(), max_size=9))
def test_other_scales_stay(overflows):
    for scale in (StaticScale(128.0), NoScale()):
        now = scale
        for overflow in overflows:
            now = now.after(overflow)
        assert now == scale
    assert StaticScale(1.0).watches
    assert not NoScale().watches


def test_the_registry_tells_mistakes_apart():
    assert {"fp32", "bf16", "fp16", "fp8_wire"} <= set(registered_policies())
    assert parse_policy(None).name == "fp32"
    assert parse_policy("fp16").scale == DynamicScale()
    assert parse_policy("fp16(static=128)").scale == StaticScale(128.0)
    assert parse_policy("fp8_wire").compression == "fp8(format='e4m3') | ef"
    for spec, words in (
        ("fp61", "did you mean 'fp16'"), ("fp16(statik=1)", "it takes static, init, interval"),
        ("fp16(static=0)", "above 0"), ("fp16(init=-1)", "above 0"), ("fp16(", "reads like"),
        ("fp16(interval=0)", "interval at least 1"), ("fp16(128)", "reads like"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            parse_policy(spec)
    with pytest.raises(ValueError, match="one of float32"):
        Policy("odd", parameters="int8")
    with pytest.raises(ValueError, match="registered already"):
        register_policy("fp16")(lambda: Policy("fp16"))
    with pytest.raises(TypeError, match="needs a default"):
        register_policy("odd")(lambda scale: Policy("odd"))


def make(precision, seed=0):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(
        torch.nn.Linear(32, 64), torch.nn.LayerNorm(64), torch.nn.ReLU(), torch.nn.Linear(64, 8)
    )
    return hvd.apply_precision(model, precision)


def wrapped(model, precision, compression=None, lr=0.1):
    return hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9),
        model.named_parameters(),
        compression,
        precision=precision,
    )


def train(model, optimizer, steps, start=0, poisoned=()):
    losses = []
    for step in range(start, start + steps):
        numbers = torch.Generator().manual_seed(1000 * step + hvd.rank())
        x = torch.randn(16, 32, generator=numbers)
        y = (x[:, :8].argmax(1) + 0).long()
        if (step, hvd.rank()) in poisoned:
            x = x * float("inf")
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        optimizer.scale(loss).backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def case_dtypes_of_a_model():
    model = make("bf16")
    assert [p.dtype for p in model.parameters()] == [
        torch.bfloat16, torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float32,
    ]  # fmt: skip
    assert model(torch.randn(2, 32)).dtype is torch.float32
    optimizer = wrapped(model, "bf16")
    held = [p.dtype for group in optimizer.param_groups for p in group["params"]]
    assert set(held) == {torch.float32}
    train(model, optimizer, 1)
    wire = {m.request.dtype for m in optimizer._ringlet._group.members.values()}
    assert wire == {"bfloat16", "float32"}  # two streams


def case_losses_follow_float32():
    curves = {}
    for precision in ("fp32", "bf16", "fp16", "fp16(static=1024)", "fp8_wire"):
        model = make(precision)
        hvd.broadcast_parameters(model.state_dict())
        curves[precision] = train(model, wrapped(model, precision), 40)
        assert hvd.replicas_equal(model.state_dict()), precision
    last = {name: sum(curve[-8:]) / 8 for name, curve in curves.items()}
    first = curves["fp32"][0]
    for name, value in last.items():
        assert value < 0.6 * first, (name, value)
        assert abs(value - last["fp32"]) < 0.15 * first, (name, value, last["fp32"])


def case_an_overflow_on_one_rank_skips_the_step_on_all():
    for spec in SPECS:
        for precision in ("fp16(init=1024)", "fp16(static=256)"):
            model = make(precision)
            optimizer = wrapped(model, precision, spec)
            train(model, optimizer, 3)
            before = [p.detach().clone() for p in model.parameters()]
            scale = optimizer.loss_scale
            train(model, optimizer, 1, start=3, poisoned={(3, hvd.size() - 1)})
            assert all(
                torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)
            ), spec
            assert optimizer.skipped_steps == 1
            assert optimizer.loss_scale == (scale / 2 if "init" in precision else scale)
            assert torch.isfinite(torch.tensor(optimizer.residual_norm()))
            train(model, optimizer, 3, start=4)
            assert optimizer.skipped_steps == 1
            assert hvd.replicas_equal(model.state_dict()), spec


def case_a_growing_scale_rescales_residuals():
    precision = "fp16(init=64, interval=3)"
    model = make(precision)
    optimizer = wrapped(model, precision, "topk(ratio=0.1) | ef")
    train(model, optimizer, 2)
    assert optimizer.loss_scale == 64.0
    seen = optimizer._ringlet.rescale
    factors = []
    optimizer._ringlet.rescale = lambda factor: (factors.append(factor), seen(factor))
    train(model, optimizer, 1, start=2)
    assert (optimizer.loss_scale, factors) == (128.0, [2.0])


def case_a_checkpoint_in_mid_growth_continues_bit_for_bit():
    precision, spec = "fp16(init=64, interval=4)", "int8 | ef"
    model = make(precision)
    optimizer = wrapped(model, precision, spec)
    train(model, optimizer, 3)
    stream = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, stream)
    train(model, optimizer, 4, start=3)
    straight = [p.detach().clone() for p in model.parameters()]
    stream.seek(0)
    kept = torch.load(stream, weights_only=True)
    again = make(precision, seed=1)
    resumed = wrapped(again, precision, spec)
    again.load_state_dict(kept["model"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed.load_state_dict(kept["optimizer"])
    train(again, resumed, 4, start=3)
    assert resumed.loss_scale == optimizer.loss_scale
    assert all(torch.equal(a, b) for a, b in zip(straight, again.parameters(), strict=True))


def case_gradients_accumulate():
    model = make("bf16")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(),
        backward_passes_per_step=2, precision="bf16",
    )  # fmt: skip
    x = torch.ones(4, 32)
    for _ in range(2):
        (model(x).square().mean() / 2).backward()
    optimizer.step()
    assert hvd.replicas_equal(model.state_dict())


def case_bad_input():
    model = torch.nn.Linear(4, 4)
    with pytest.raises(ValueError, match="call apply_precision"):
        wrapped(model, "fp16")
    half = torch.nn.Linear(4, 4).half()
    with pytest.warns(UserWarning, match="there is no loss scale"):
        wrapped(half, None)
    with pytest.raises(ValueError, match="float32 model"):
        hvd.apply_precision(half, "bf16")
    counts = torch.nn.ParameterList([torch.nn.Parameter(torch.ones(2, dtype=torch.int64), False)])
    with pytest.raises(ValueError, match="has no use for"):
        hvd.apply_precision(counts, "bf16")
    optimizer = torch.optim.SGD(make("bf16").parameters(), lr=0.1)
    with pytest.raises(ValueError, match="Adasum"):
        hvd.DistributedOptimizer(optimizer, op=hvd.Adasum, precision="bf16")


CASES = [value for name, value in list(globals().items()) if name.startswith("case_")]


@pytest.mark.parametrize(("transport", "size"), [("mpi", 2), ("gloo", 4)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_"))
def test_precision(run_case, case, transport, size):
    run_case(case, transport, size)
