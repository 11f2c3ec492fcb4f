"""Precision policies: the registry, the loss scale as a state machine, training on real ranks."""

from __future__ import annotations

import contextlib
import copy
import io
import pickle
import runpy
import warnings
from dataclasses import replace
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import torch
from hang_watch import ended_after
from hypothesis import given
from hypothesis import strategies as st
from sklearn.datasets import load_digits

import ringlet
import ringlet.torch as hvd
from ringlet.compressors import FP16, resolve
from ringlet.compressors.specs import registry
from ringlet.job.session import current
from ringlet.precision import (
    KEPT,
    DynamicScale,
    NoScale,
    Policy,
    StaticScale,
    parse_policy,
    register_policy,
    registered_policies,
)
from ringlet.precision.reduction import carrier

pytestmark = pytest.mark.preloaded("torch")

ROOT = Path(__file__).parents[2]
IN_UNITS_OF_THE_SCALE = {"residual", "u", "v", "worker", "server", "known", "sum"}
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
        ("fp16(static={[]})", "reads like"), ("fp8_wire(format='e9')", "format must be one of"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            parse_policy(spec)
    with pytest.raises(ValueError, match="one of float32"):
        Policy("odd", parameters="int8")
    with pytest.raises(ValueError, match="registered already"):
        register_policy("fp16")(lambda: Policy("fp16"))
    with pytest.raises(TypeError, match="needs a default"):
        register_policy("odd")(lambda scale: Policy("odd"))


def test_dtypes_that_do_not_go_together_are_refused():
    for options, words in (
        ({"parameters": "float16", "compute": "bfloat16"}, "compute in float16"),
        ({"compute": "float64"}, "compute must be one of"),
        ({"reduction": "float16"}, "reduction must be one of float32, wire"),
        ({"parameters": "float8_e4m3fn"}, "take 'fp8_wire'"),
        ({"keep": "head.*"}, "tuple of patterns"),
    ):
        with pytest.raises(ValueError, match=words):
            Policy("odd", **options)
    for spec in ("fp16(static='x')", "fp16(static=float)", "fp16(interval='x')"):
        with pytest.raises(ValueError, match=r"policy|convert"):
            parse_policy(spec)
    for value in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="above 0 and finite"):
            StaticScale(value)
    for scale in (2.0**25, 2.0**-15):
        with pytest.raises(ValueError, match="must be between"):
            DynamicScale(scale=scale)
    with pytest.raises(ValueError, match="StaticScale"):
        NoScale(2.0)


def test_what_travels_and_what_sums_are_formed_in_are_chosen_apart():
    for dtype, asked, numel, found in (
        ("float32", "none", 4096, ("none", "auto")),
        ("float16", "none", 4096, ("fp16", "scatter_reduce")),
        ("bfloat16", "none", 4096, ("bf16", "scatter_reduce")),
        ("float32", "fp16", 4096, ("fp16", "scatter_reduce")),
        ("float16", "fp16 | ef", 4096, ("fp16 | ef", "scatter_reduce")),
        ("float16", "int8", 4096, ("int8", "auto")),
        ("float16", "int8", 10, ("fp16", "scatter_reduce")),  # too small to be compressed
        ("float32", "int8", 10, ("int8", "auto")),
    ):
        asked = resolve(asked)
        compressor, collective = carrier(asked, dtype, numel, "float32")
        assert (str(compressor), collective) == found
        assert carrier(asked, dtype, numel, "wire") == (asked, "auto")
    for dtype, asked, numel, found in (  # where the transport sums in float32 itself
        ("float16", "none", 4096, ("none", "auto")),
        ("bfloat16", "none", 4096, ("none", "auto")),
        ("float16", "fp16", 4096, ("none", "auto")),
        ("bfloat16", "fp16", 4096, ("fp16", "scatter_reduce")),
        ("float32", "fp16", 4096, ("fp16", "scatter_reduce")),
        ("float16", "fp16 | ef", 4096, ("fp16 | ef", "scatter_reduce")),
        ("float16", "int8", 10, ("int8", "auto")),
    ):
        compressor, collective = carrier(resolve(asked), dtype, numel, "float32", exact=True)
        assert (str(compressor), collective) == found
    assert carrier(FP16(), "float16", 9, "wire") == (resolve("none"), "auto")

    class Uncut(FP16):
        def traits(self):
            return replace(super().traits(), granularity=None)

    assert carrier(Uncut(), "float32", 4096, "float32") == (Uncut(), "allgather")


class Tied(torch.nn.Module):
    """A layer of every kind that is split, kept, shared or converted as a whole."""

    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(10, 8)
        self.place = torch.nn.Parameter(torch.zeros(5, 8))
        self.attention = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm = torch.nn.LayerNorm(8)
        self.memory = torch.nn.LSTM(8, 8, batch_first=True)
        self.head = torch.nn.Linear(8, 10)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.embed(tokens) + self.place
        x = self.norm(x + self.attention(x, x, x, need_weights=False)[0])
        assert x.dtype is self.memory.weight_hh_l0.dtype
        return self.head(self.memory(x)[0])


def test_norms_biases_and_embeddings_stay_in_float32():
    tokens = torch.arange(10).reshape(2, 5)
    torch.manual_seed(0)
    plain = Tied()
    expected = plain(tokens)
    for spec in ("bf16", "fp16"):
        model = parse_policy(spec).apply(copy.deepcopy(plain))
        dtype = getattr(torch, parse_policy(spec).parameters)
        kept = {n for n, p in model.named_parameters() if p.dtype is torch.float32}
        assert kept == {
            "embed.weight", "attention.in_proj_bias", "attention.out_proj.bias", "norm.weight",
            "norm.bias", "head.bias",
        }  # fmt: skip
        others = {p.dtype for n, p in model.named_parameters() if n not in kept}
        assert others == {dtype}
        for each in (model, copy.deepcopy(model)):
            out = each(tokens)
            assert out.dtype is torch.float32
            assert torch.allclose(out, expected, atol=0.05)
            out.square().sum().backward()
            assert each.head.bias.grad.dtype is torch.float32
            with pytest.raises(IndexError):
                each(tokens + 100)
            assert each.head.bias.dtype is torch.float32  # the copy is gone, after an error too
        assert model.state_dict().keys() == plain.state_dict().keys()
        bare = parse_policy(f"{spec}(keep=('norm.*',))").apply(copy.deepcopy(plain))
        assert {n for n, p in bare.named_parameters() if p.dtype is torch.float32} == {
            "norm.weight", "norm.bias"
        }  # fmt: skip
        assert torch.allclose(bare(tokens), expected, atol=0.05)


def test_autocast_computes_in_16_bits_but_where_layers_are_kept():
    policy = parse_policy("amp_bf16")
    seen = {}

    def look(name):
        return lambda _, args, out: seen.update({name: (args[0].dtype, out.dtype)})

    model = torch.nn.Sequential(
        torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 4)
    )
    policy = Policy("mine", compute="bfloat16", keep=(*KEPT, "3.*"))
    for i, layer in enumerate(model):
        layer.register_forward_hook(look(i))
    assert policy.apply(model) is model
    wide, half = torch.float32, torch.bfloat16
    for each in (model, copy.deepcopy(model)):
        assert each(torch.ones(2, 8)).dtype is wide
        assert seen == {0: (wide, half), 1: (wide, wide), 2: (wide, half), 3: (wide, wide)}
    assert {p.dtype for p in model.parameters()} == {wide}
    with pytest.raises(RuntimeError):
        model(torch.ones(2, 9))
    assert not torch.is_autocast_enabled("cpu")
    x = torch.ones(2, 8)
    with policy.autocast("cpu"):
        assert (x @ x.T).dtype is half
    with parse_policy("bf16").autocast():
        assert (x @ x.T).dtype is wide
    with pytest.raises(ValueError, match="float32 model"):
        policy.apply(torch.nn.Linear(2, 2).bfloat16())
    with pytest.raises(TypeError, match="or a Keras model, not object"):
        policy.apply(object())


@pytest.mark.parametrize("spec", ["bf16", "amp_bf16"])
def test_a_policy_goes_together_with_compile(spec):
    torch.manual_seed(0)
    layers = torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)
    model = parse_policy(spec).apply(torch.nn.Sequential(*layers))
    x = torch.randn(2, 8)
    compiled = torch.compile(model, backend="eager")
    for _ in range(2):
        out = compiled(x)
        out.sum().backward()
    assert torch.allclose(out, model(x))
    assert not torch.is_autocast_enabled("cpu")


def test_keras_names_of_dtypes():
    names = {s: parse_policy(s).keras_dtype() for s in ("fp32", "fp16", "amp_bf16", "fp8_wire")}
    assert names == {
        "fp32": "float32", "fp16": "mixed_float16", "amp_bf16": "mixed_bfloat16",
        "fp8_wire": "float32",
    }  # fmt: skip


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
    wire = {m.request.dtype for m in optimizer._ringlet.declared.group.members.values()}
    assert wire == {"bfloat16", "float32"}  # two streams


POLICIES = ["bf16", "fp16", "fp16(static=1024)", "amp_bf16", "amp_fp16", "fp8_wire"]


def curve_of(model, precision, batches):
    """Return the losses that all ranks have on average, and check that they stay replicas."""
    hvd.broadcast_parameters(model.state_dict())
    model = hvd.apply_precision(model, precision)
    optimizer = hvd.DistributedOptimizer(
        torch.optim.Adam(model.parameters(), lr=0.005), model.named_parameters(),
        precision=precision,
    )  # fmt: skip
    losses = []
    for x, y in batches:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten())
        optimizer.scale(loss).backward()
        optimizer.step()
        losses.append(loss.detach())
    assert hvd.replicas_equal(model.state_dict()), precision
    assert optimizer.skipped_steps <= 2, precision  # while a dynamic scale comes down
    return hvd.allreduce(torch.stack(losses)).numpy()


def follows(curve, plain, tolerance):
    """Assert that ``curve`` goes where ``plain`` does, a step of it being ten steps' mean."""
    coarse, wanted = (c.reshape(-1, 10).mean(1) for c in (curve, plain))
    assert wanted[-1] < 0.8 * wanted[0]
    assert np.abs(coarse - wanted).max() < tolerance * wanted[0], (coarse, wanted)


def case_losses_on_digits_follow_float32():
    digits = load_digits()
    images, labels = torch.tensor(digits.data / 16).float(), torch.tensor(digits.target)
    numbers = torch.Generator().manual_seed(hvd.rank())
    batches = [
        (images[rows], labels[rows]) for rows in torch.randint(1797, (50, 32), generator=numbers)
    ]

    def model():
        torch.manual_seed(0)
        return torch.nn.Sequential(
            torch.nn.Linear(64, 64), torch.nn.LayerNorm(64), torch.nn.ReLU(),
            torch.nn.Linear(64, 10),
        )  # fmt: skip

    plain = curve_of(model(), "fp32", batches)
    for precision in POLICIES[: 2 if hvd.size() > 2 else None]:
        follows(curve_of(model(), precision, batches), plain, 0.03)


def case_losses_of_the_byte_transformer_follow_float32():
    if hvd.size() > 2:
        return
    example = runpy.run_path(str(ROOT / "examples" / "pytorch_transformer.py"))
    text = (ROOT / "README.md").read_bytes()
    text, numbers = np.frombuffer(text, np.uint8), np.random.default_rng(hvd.rank())
    batches = [example["batch"](text, 2, numbers) for _ in range(30)]

    def model():
        torch.manual_seed(0)
        return example["ByteTransformer"](32)

    plain = curve_of(model(), "fp32", batches)
    for precision in ("bf16", "fp16", "amp_bf16", "fp8_wire"):  # layers see no more of the others
        follows(curve_of(model(), precision, batches), plain, 0.03)


def every_spec():
    """Return a spec for each registered compressor: modifiers behind one that they go with."""
    for name in registry.names():
        for spec in (name, f"int8 | {name}", f"topk(ratio=0.1) | {name}", f"qsgd | {name}"):
            try:
                yield str(resolve(spec))
                break
            except ValueError:
                continue
        else:
            raise AssertionError(f"no spec for {name}")
        if not resolve(spec).traits().stateful:
            with contextlib.suppress(ValueError):
                yield str(resolve(f"{spec} | ef"))


def remembered(state):
    """Return arrays that a compressor remembers, copied, with where they are."""
    found = {}
    for key, value in state.items():
        if isinstance(value, dict):
            found |= {(key, *place): array for place, array in remembered(value).items()}
        elif isinstance(value, np.ndarray):
            found[(key,)] = value.copy()
    return found


def skip_steps_with(spec, numbers):
    """Train with one compressor, with an overflow on the rank and in the steps that are drawn."""
    precision = numbers.choice(["fp16(init=64)", "fp16(static=256)", "amp_fp16(init=64)"])
    torch.manual_seed(0)
    model = hvd.apply_precision(torch.nn.Linear(32, 40), precision)
    optimizer = wrapped(model, precision, {"*": spec}, lr=0.01)
    rank, skipped = int(numbers.integers(hvd.size())), 0
    bad = set(numbers.choice(5, 2, replace=False).tolist())
    for step in range(5):
        before = [p.detach().clone() for p in model.parameters()]
        scale = optimizer.loss_scale
        held = {n: remembered(s) for n, s in optimizer._ringlet.memory.states.items()}
        train(model, optimizer, 1, step, {(step, rank)} if step in bad else ())
        skipped += step in bad
        assert optimizer.skipped_steps == skipped, (spec, step)
        same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert all(same) == (step in bad), (spec, step)
        if step not in bad:
            continue
        factor = 1.0 if "static" in precision else 0.5
        assert optimizer.loss_scale == factor * scale, spec
        for name, state in optimizer._ringlet.memory.states.items():
            now = remembered(state)
            assert now.keys() == held[name].keys(), (spec, name)
            for place, array in now.items():
                wanted = held[name][place]
                assert place[-1] in IN_UNITS_OF_THE_SCALE | {"left", "right"}, (spec, place)
                if place[-1] in IN_UNITS_OF_THE_SCALE:
                    wanted = wanted * np.float32(factor)
                assert np.array_equal(array, wanted), (spec, name, place)
    assert hvd.replicas_equal(model.state_dict()), spec


def skip_steps(specs):
    """Train with each compressor, with an overflow on one rank in some steps; return how many."""
    torch.set_num_threads(1)
    hvd.init()
    numbers = np.random.default_rng(7)  # the same on every rank
    for spec in specs:
        with ended_after(60):  # for each: kernels may have to compile
            skip_steps_with(spec, numbers)
    hvd.shutdown()
    return len(specs)


EVERY = [*every_spec()]
AT_ONCE = 16  # in one job: where no kernel has been kept yet, it compiles those of all of them


@pytest.mark.parametrize(
    ("transport", "size", "specs"),
    [
        *(("mpi", 2, EVERY[first : first + AT_ONCE]) for first in range(0, len(EVERY), AT_ONCE)),
        ("gloo", 3, SPECS),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_an_overflow_on_one_rank_skips_the_step_on_all(request, transport, size, specs):
    cloudpickle.register_pickle_by_value(request.module)
    told = ringlet.run(skip_steps, (specs,), np=size, transport=transport)
    assert told == [len(specs)] * size


def case_a_growing_scale_rescales_residuals():
    precision = "fp16(init=64, interval=3)"
    model = make(precision)
    optimizer = wrapped(model, precision, "topk(ratio=0.1) | ef")
    train(model, optimizer, 2)
    assert optimizer.loss_scale == 64.0
    seen = optimizer._ringlet.memory.rescale
    factors = []
    optimizer._ringlet.memory.rescale = lambda factor: (factors.append(factor), seen(factor))
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


def case_masters_follow_what_is_written_into_the_model():
    rank = hvd.rank()
    for precision in ("bf16", "fp16(init=64)"):
        model = make(precision, seed=rank)
        optimizer = wrapped(model, precision)
        hvd.broadcast_parameters(model.state_dict())
        train(model, optimizer, 2)
        assert hvd.replicas_equal(model.state_dict())
        masters = [m.clone() for _, m in optimizer._ringlet_masters.pairs.values()]
        assert any((m != m.to(model[0].weight.dtype)).any() for m in masters)  # more bits than 16
        state = {name: value.clone() for name, value in model.state_dict().items()}
        train(model, optimizer, 2)
        model.load_state_dict(state)
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        train(model, optimizer, 1)
        for name, value in model.state_dict().items():
            assert torch.equal(value, state[name]), name


def case_an_overflow_in_one_of_several_passes():
    model = make("fp16(init=64)")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), model.named_parameters(), "int8 | ef",
        backward_passes_per_step=2, precision="fp16(init=64)",
    )  # fmt: skip
    for step in range(3):
        before = model[0].weight.detach().clone()
        optimizer.zero_grad()
        for part in range(2):
            x = torch.ones(4, 32) * (hvd.rank() + 1)
            x = x * float("inf") if (step, part, hvd.rank()) == (1, 0, 1) else x
            optimizer.scale(model(x)[:, 0].square().mean() / 2).backward()
        optimizer.step()
        assert optimizer.skipped_steps == (step > 0)
        assert torch.equal(model[0].weight, before) == (step == 1)
        assert hvd.replicas_equal(model.state_dict())
    assert optimizer.loss_scale == 32.0


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


def case_loss_scales_restored_with_autocast():
    precision = "amp_fp16(init=64, interval=4)"
    model = make(precision)
    optimizer = wrapped(model, precision)
    train(model, optimizer, 3)
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, 1, start=3)
    assert optimizer.loss_scale == 128.0
    again = make(precision)
    resumed = wrapped(again, precision)
    resumed.load_state_dict(state)
    train(again, resumed, 1, start=3)
    assert resumed.loss_scale == 128.0


def case_sums_accumulate_in_float32():
    """With a transport that adds float16 itself, as gloo does between hosts."""
    comm = current().engine.comm
    native = [c for c in (comm, *comm._siblings.values()) if hasattr(c, "_spread")]
    for each in native:
        each._spread = True
    size, rank, n = hvd.size(), hvd.rank(), 1 << 16  # small ones are combined by all ranks at once
    values = torch.full((n,), 0.25 * size)
    values[torch.arange(n) % size == rank] = 512.0 * size
    exact = torch.full((n,), 512.0 + 0.25 * (size - 1)).half()
    for reduction in ("float32", "wire"):
        for spec in ("none", "fp16"):
            p = torch.nn.Parameter(torch.zeros(n).half())
            optimizer = hvd.DistributedOptimizer(
                torch.optim.SGD([p], lr=1.0), compression=spec,
                precision=Policy("half", "float16", scale=StaticScale(1.0), reduction=reduction),
            )  # fmt: skip
            (p * values.half()).sum().backward()
            optimizer.synchronize()
            (member,) = optimizer._ringlet.declared.group.members.values()
            # Others sum in float32 themselves, and the sum of two is rounded once in any case.
            by_codec = reduction == "float32" and bool(native) and size > 2
            assert (member.strategy == "scatter_reduce") == by_codec
            if reduction == "float32":
                assert torch.equal(p.grad, exact), (spec, p.grad)
            elif native:
                assert torch.equal(p.grad, exact) == (size == 2), (spec, p.grad)
            with optimizer.skip_synchronize():
                optimizer.step()
    for each in native:
        each._spread = False


def case_averages_of_float16_divide_before_they_add():
    for precision in ("fp16", "fp16(reduction='wire')"):
        p = torch.nn.Parameter(torch.zeros(8).half())
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), precision=precision)
        (p * 60000).sum().backward()
        optimizer.synchronize()
        (master,) = optimizer.master_parameters()
        assert torch.equal(master.grad * 65536, torch.full((8,), 60000.0).half().float())
        with optimizer.skip_synchronize():
            optimizer.step()
        assert optimizer.skipped_steps == 0


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
    with pytest.warns(UserWarning, match="computes in float16"):
        wrapped(torch.nn.Linear(4, 4), Policy("odd", compute="float16"))
    optimizer = torch.optim.SGD(make("bf16").parameters(), lr=0.1)
    with pytest.raises(ValueError, match="Adasum"):
        hvd.DistributedOptimizer(optimizer, op=hvd.Adasum, precision="bf16")
    model = make("amp_fp16")
    optimizer = wrapped(model, "amp_fp16")
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 32)).sum()).backward()
    with pytest.raises(RuntimeError, match="without a GradScaler"):
        scaler.unscale_(optimizer)
    optimizer.step()


def case_fp8_travels_without_a_dtype_of_torchs():
    names = [name for name in dir(torch) if name.startswith("float8")]
    kept = {name: getattr(torch, name) for name in names}
    for name in names:
        delattr(torch, name)
    try:
        model = make("fp8_wire")
        optimizer = wrapped(model, "fp8_wire")
        first, *_, last = train(model, optimizer, 20)
        assert last < first
    finally:
        for name in names:
            setattr(torch, name, kept[name])


@pytest.mark.parametrize(
    "place",
    [
        "casting _cast_input",
        "casting _cast_output",
        "autocasting _enter",
        "autocasting _leave",
        "sync_batch_norm SyncBatchNorm",
    ],
)
def test_models_that_were_saved_whole_are_found_again(place):
    # What pickle wrote of a model's hooks and layers: these modules keep their names.
    module, name = place.split()
    found = pickle.loads(f"cringlet.torch.{module}\n{name}\n.".encode())
    assert found.__module__ == f"ringlet.torch.{module}"


@pytest.mark.parametrize("spec", ["fp16(static=128.0)", "amp_bf16"])
def test_a_model_is_saved_whole(spec):
    model = hvd.apply_precision(torch.nn.Sequential(torch.nn.Linear(3, 2)), spec)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    x = torch.ones(1, 3)
    assert torch.equal(loaded(x), model(x))


CASES = [value for name, value in list(globals().items()) if name.startswith("case_")]


@pytest.mark.parametrize(("transport", "size"), [("mpi", 2), ("gloo", 3)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_"))
def test_precision(run_case, case, transport, size):
    run_case(case, transport, size)
