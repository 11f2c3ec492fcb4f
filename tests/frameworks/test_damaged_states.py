"""Checkpoints that are damaged, or of something else: refused whole, or told of, on every rank."""

from __future__ import annotations

import copy
import re

import numpy as np
import pytest
import torch

import ringlet.torch as hvd
from ringlet.compressors import Router, parse
from ringlet.compressors.states import fit, merged
from ringlet.ring.errors import Mismatch
from ringlet.shared.residual_store import dumps, loads, mapped
from ringlet.torch.parameters import checkpoint

pytestmark = pytest.mark.preloaded("torch")

SPEC = "topk(ratio=0.05) | ef"


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(48, 96), torch.nn.Tanh(), torch.nn.Linear(96, 8))


def train(own, optimizer, steps):
    for step in range(steps):
        numbers = torch.Generator().manual_seed(100 * step + hvd.rank())
        optimizer.zero_grad()
        batch = torch.randn(4, 48, generator=numbers).to(next(own.parameters()).dtype)
        loss = own(batch).float().square().mean()
        (optimizer.scale(loss) if hasattr(optimizer, "scale") else loss).backward()
        optimizer.step()


def replaced(state, place, value):
    """Return a copy of ``state`` with ``value`` at ``place``, and another learning rate."""
    copied = copy.deepcopy(state)
    copied["param_groups"][0]["lr"] = 0.5
    inner = copied
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return copied


def plain(*values):
    return mapped(list(values), lambda leaf: leaf.tolist() if hasattr(leaf, "tolist") else leaf)


def refused(own, optimizer, wrong, match):
    """Fail unless ``wrong`` is refused with such an error, and nothing of it is loaded."""
    before = plain(own.state_dict(), optimizer.state_dict())
    with pytest.raises(ValueError, match=match):
        optimizer.load_state_dict(wrong)
    assert plain(own.state_dict(), optimizer.state_dict()) == before


def case_a_damaged_record_is_refused_before_anything_is_loaded():
    own = model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(own.parameters(), lr=0.01, momentum=0.9), own.named_parameters(), SPEC
    )
    train(own, optimizer, 2)
    state = optimizer.state_dict()
    deep = {}
    for _ in range(3000):
        deep = {"a": deep}
    weight = ("ringlet", "states", "0.weight")
    for place, value in (
        (("ringlet",), 3),
        (("ringlet",), {}),
        (("ringlet", "rank"), -1),
        (("ringlet", "size"), "2"),
        (("ringlet", "step"), float("nan")),
        (("ringlet", "step"), 1 << 70),
        (("ringlet", "states"), []),
        (("ringlet", "specs"), None),
        (("ringlet", "specs", "0.weight"), b"int8"),
        (weight, None),
        (weight, deep),
        ((*weight, "step"), -1),
        ((*weight, "step"), torch.tensor(3)),
        ((*weight, "residual"), None),
        ((*weight, "residual"), [1.0]),
        ((*weight, "residual"), torch.zeros(4, device="meta")),
        ((*weight, "residual"), torch.zeros(4).to_sparse()),
        ((*weight, "residual"), torch.zeros(4, dtype=torch.bfloat16)),
        ((*weight, "residual"), object()),
        ((*weight, "shard.0.3.6.2.00000000"), torch.zeros(3)),
    ):
        named = "".join(f"[{key!r}]" for key in (("ringlet",) if value is deep else place))
        refused(own, optimizer, replaced(state, place, value), f"state_dict{re.escape(named)}")
    refused(own, optimizer, replaced(state, ("ringlet", "version"), 2), "is of version 2")
    with pytest.raises(ValueError, match=r"no 'param_groups'.*but a list"):
        optimizer.load_state_dict([state])
    shards = hvd.allgather_object(state)
    before = plain(optimizer.state_dict())
    for wrong, match in (
        (
            [shards[0], replaced(shards[1], (*weight, "step"), "2")],
            r"state_dicts\[1\]\['ringlet'\]",
        ),
        ([replaced(shards[0], ("ringlet", "size"), 2)] * 2, "once, and got rank 0, 0 of 2"),
        (
            [replaced(shard, ("ringlet", "size"), 2 + i) for i, shard in enumerate(shards[:2])],
            "at one time, and got rank 0 of 2; rank 1 of 3, as where a job of fewer ranks has",
        ),
    ):
        with pytest.raises(ValueError, match=match):
            optimizer.load_sharded(wrong)
    assert plain(optimizer.state_dict()) == before
    train(own, optimizer, 1)
    assert hvd.replicas_equal(own.state_dict())


def case_residuals_that_cannot_be_gone_on_with_are_forgotten_on_that_rank_with_a_warning():
    own = model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(own.parameters(), lr=0.01), own.named_parameters(), SPEC
    )
    train(own, optimizer, 2)
    place = ("ringlet", "states", "0.weight", "residual")
    for value, told in (
        (torch.full((96 * 48,), float("nan")), r"'residual'\] that are not finite"),
        (torch.zeros(96 * 48, dtype=torch.float64), "'residual' as float64"),
        ({}, "'residual' as dict"),
    ):
        with pytest.warns(UserWarning, match=told):
            optimizer.load_state_dict(replaced(optimizer.state_dict(), place, value))
        train(own, optimizer, 1)
        assert all(bool(p.isfinite().all()) for p in own.parameters())
        assert hvd.replicas_equal(own.state_dict())


def case_momenta_of_another_dtype_are_forgotten_on_that_rank_with_a_warning():
    own = model()
    spec = "topk(ratio=0.1) | momentum_correction"
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(own.parameters(), lr=0.01), own.named_parameters(), spec
    )
    train(own, optimizer, 2)
    for name in ("u", "v"):
        place = ("ringlet", "states", "0.weight", name)
        wrong = torch.zeros(96 * 48, dtype=torch.float64)
        with pytest.warns(UserWarning, match=rf"holds '{name}' as float64\[4608\]; all but its"):
            optimizer.load_state_dict(replaced(optimizer.state_dict(), place, wrong))
        train(own, optimizer, 1)
        assert hvd.replicas_equal(own.state_dict())


def case_estimates_of_another_type_on_one_rank_do_not_let_replicas_part():
    own = model()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(own.parameters(), lr=0.01), own.named_parameters(), "int8 | ef21"
    )
    train(own, optimizer, 2)
    state = optimizer.state_dict()
    place = ("ringlet", "states", "0.weight", "server")
    for wrong in (torch.zeros(96 * 48, dtype=torch.float64), {}):
        if hvd.rank() == 1:
            with pytest.warns(UserWarning, match="holds 'server' as .*; all but its step is forg"):
                optimizer.load_state_dict(replaced(state, place, wrong))
        else:
            optimizer.load_state_dict(state)
        with pytest.raises(Mismatch, match=r"'0.weight' is there on rank\(s\) 0 but not on"):
            train(own, optimizer, 1)
        optimizer.load_state_dict(state)
        train(own, optimizer, 1)
        assert hvd.replicas_equal(own.state_dict())


def case_damaged_masters_are_refused_before_anything_is_loaded():
    own = hvd.apply_precision(model(), "fp16")
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(own.parameters(), lr=0.01), own.named_parameters(), precision="fp16"
    )
    train(own, optimizer, 2)
    state, at = optimizer.state_dict(), "ringlet_precision"
    for place, value in (
        ((at,), None),
        ((at, "scale"), 3),
        ((at, "scale", "scale"), float("nan")),
        ((at, "scale", "scale"), "65536"),
        ((at, "scale", "scale"), -1.0),
        ((at, "scale", "interval"), "x"),
        ((at, "scale", "clean"), -5),
        ((at, "skipped"), -1),
        ((at, "masters"), []),
        ((at, "masters", "0.weight"), torch.zeros(3)),
        ((at, "masters", "0.weight"), None),
    ):
        refused(own, optimizer, replaced(state, place, value), rf"state_dict\['{at}'\]")


def case_a_damaged_state_of_diloco_or_onebit_adam_is_refused_before_anything_is_loaded():
    own = model()
    inner = torch.optim.SGD(own.parameters(), lr=0.01, momentum=0.9)
    optimizer = hvd.DiLoCo(inner, own.named_parameters(), every=1, compression=SPEC)
    train(own, optimizer, 2)
    state, at = optimizer.state_dict(), "ringlet_diloco"
    for place, value, told in (
        ((at,), 3, "not saved by a DiLoCo"),
        ((at, "agreed", "0.weight"), torch.zeros(3), r"\['agreed'\]\['0.weight'\] is \[3\]"),
        ((at, "steps"), -1, "no number of steps"),
        ((at, "steps"), float("nan"), "no number of steps"),
        ((at, "outer"), None, "no 'param_groups'"),
        ((at, "outer", "param_groups"), [], "different number of parameter groups"),
        ((at, "outer", "state", 0), None, "no dict of dicts"),
        ((at, "outer", "state", 0, "momentum_buffer"), torch.zeros(3), "momentum_buffer.* is .3"),
        (("ringlet", "step"), "2", r"state_dict\['ringlet'\]\['step'\]"),
    ):
        refused(own, optimizer, replaced(state, place, value), told)
    own = model()
    adam = hvd.OneBitAdam(own.named_parameters(), lr=0.01, warmup=1, compression="onebit | ef")
    train(own, adam, 2)
    state = adam.state_dict()
    for place, value, told in (
        (("state",), None, "no dict of dicts"),
        (("state", 0, "step"), float("nan"), "no number of steps"),
        (("state", 0, "step"), -1, "no number of steps"),
        (("state", 0, "exp_avg"), torch.zeros(3), r"\['exp_avg'\] is \[3\]"),
        (("state", 9), {"step": 2}, "of no parameter"),
        (("ringlet", "step"), "2", r"state_dict\['ringlet'\]\['step'\]"),
    ):
        refused(own, adam, replaced(state, place, value), told)
    train(own, adam, 1)


CASES = [value for name, value in list(globals().items()) if name.startswith("case_")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_"))
def test_damaged(run_case, case):
    run_case(case, "mpi", 2)


def test_a_tensor_that_was_loaded_onto_a_gpu_or_needs_a_gradient_is_taken():
    given = checkpoint.saved({"w": {"step": 1, "residual": np.ones(4, np.float32)}}, 0, 1)
    given["states"]["w"]["residual"].requires_grad_()
    states = {"w": {}}
    assert checkpoint.restore(states, given, 0, 1) == 1
    assert states["w"]["residual"].tolist() == [1.0] * 4


@pytest.mark.parametrize("spec", [SPEC, "powersgd(rank=2) | ef", "int4 | ef(dtype='bf16')"])
def test_what_is_not_finite_is_forgotten_by_whom_it_belongs_to_and_among_others(spec):
    compressor = parse(spec)
    names = {"powersgd(rank=2) | ef": "left", "int4 | ef(dtype='bf16')": "residual_bf16"}
    name = names.get(spec, "residual")
    bad = (
        np.full(4, 0x7FC0, np.int16) if name == "residual_bf16" else np.full(4, np.inf, np.float32)
    )
    state = {"step": 3, name: bad}
    (told,) = fit(dict(state), spec, compressor, 4, 2)
    assert "not finite" in told
    assert name in told
    found, told = merged([state, {"step": 3}], spec, compressor, 1)
    assert name not in found
    assert "residual" not in found
    assert any("not finite" in each for each in told)
    assert state[name] is bad  # of a checkpoint that others may load


@pytest.mark.parametrize(("rank", "step", "key"), [(0, -1, "step"), (-1, 1, "rank")])
def test_bytes_of_what_is_damaged_are_refused_and_the_place_named(rank, step, key):
    data = dumps({"w": {"step": step}}, rank, 2, 1, Router("int8"))
    with pytest.raises(ValueError, match=f"{key}'] is -1, not a whole"):
        loads(data, 0, 2, Router("int8"))
