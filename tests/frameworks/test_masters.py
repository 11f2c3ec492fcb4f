"""What masters are given: sums in float32, unscaled, that a caller can clip; sparse ones too."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringlet.torch as hvd
from ringlet.compressors.kernels.cpu.common.unscale import unscale
from ringlet.precision import Policy, StaticScale

pytestmark = pytest.mark.preloaded("torch")

VALUES = st.floats(width=32, allow_nan=True, allow_infinity=True)
SCALED = "fp16(static=1024)"


@given(st.lists(VALUES, max_size=70), st.sampled_from([1.0, 2.0**-16, 3.0, 2.0**14]))
def test_a_scale_is_taken_off_and_overflow_seen_in_one_pass(values, factor):
    x = np.array(values, np.float32)
    with np.errstate(all="ignore"):
        expected = x * np.float32(factor)
    finite = unscale(x, np.float32(factor))
    assert np.array_equal(x, expected, equal_nan=True)
    assert finite == bool(np.isfinite(expected).all())


def half(n, precision, lr=1.0, **options):
    p = torch.nn.Parameter(torch.zeros(n).half())
    inner = torch.optim.SGD([p], lr=lr)
    return p, hvd.DistributedOptimizer(inner, precision=precision, **options)


def case_sums_reach_masters_without_being_rounded_to_16_bits():
    size = hvd.size()
    for compression in ("int8(bucket=64)", "topk(ratio=1.0)", "powersgd(rank=4) | ef", "none"):
        wire = "wire" if compression == "none" else "float32"
        policy = Policy("half", "float16", scale=StaticScale(1.0), reduction=wire)
        p = torch.nn.Parameter(torch.zeros(64, 64).half())
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD([p], lr=1.0), compression=compression, precision=policy
        )
        # 1 + 2**-10 on one rank and 1 on the others: the mean needs more bits than a half has.
        (p * (1.0 + 2.0**-10 * (hvd.rank() == 0))).sum().backward()
        optimizer.synchronize()
        (master,) = optimizer.master_parameters()
        assert master.grad.dtype is torch.float32
        exact = 1.0 + 2.0**-10 / size
        if compression.startswith("topk"):
            assert torch.equal(master.grad, torch.full((64, 64), exact))
        assert torch.allclose(master.grad, torch.full((64, 64), exact), rtol=8e-3), compression
        with optimizer.skip_synchronize():
            optimizer.step()
        assert torch.equal(p, master.half()), compression
        assert hvd.replicas_equal({"p": p, "master": master})


def case_masters_are_clipped():
    p, optimizer = half(8, SCALED)
    for _ in range(2):
        optimizer.zero_grad()
        optimizer.scale((p * (hvd.rank() + 1)).sum()).backward()
        optimizer.synchronize()
        optimizer.synchronize()  # once is enough
        mean = (hvd.size() + 1) / 2
        assert torch.allclose(p.grad, torch.full((8,), mean).half())
        norm = torch.nn.utils.clip_grad_norm_(optimizer.master_parameters(), 1.0)
        assert norm.item() == pytest.approx(mean * 8**0.5)
        before = p.detach().float()
        optimizer.step()
        assert torch.allclose(before - p.float(), torch.full((8,), 8**-0.5), rtol=1e-3)


def case_clipping_the_model_under_a_loss_scale_is_refused():
    p, optimizer = half(8, SCALED)
    optimizer.scale(p.sum()).backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_([p], 0.5)
    with optimizer.skip_synchronize(), pytest.raises(RuntimeError, match="master_parameters"):
        optimizer.step()


def case_without_a_loss_scale_the_model_can_be_clipped_as_well():
    p = torch.nn.Parameter(torch.zeros(8).bfloat16())
    optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), precision="bf16")
    p.sum().backward()
    optimizer.synchronize()
    torch.nn.utils.clip_grad_norm_([p], 1.0)
    with optimizer.skip_synchronize():
        optimizer.step()
    assert torch.allclose(p.float(), torch.full((8,), -(8**-0.5)), rtol=1e-2)


def case_sparse_gradients_of_16_bits_stay_sparse():
    torch.manual_seed(0)
    table = torch.nn.Embedding(1 << 13, 16, sparse=True)  # large enough for rows, after one step
    table.weight.data = torch.zeros_like(table.weight).half()
    policy = Policy("half", "float16", keep=(), scale=StaticScale(64.0))
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([table.weight], lr=1.0), compression="none", precision=policy
    )
    for step in range(3):
        before = table.weight.detach().float()
        optimizer.zero_grad()
        optimizer.scale(table(torch.tensor([step, 5])).float().sum()).backward()
        optimizer.step()
        moved = before - table.weight.float()
        expected = torch.zeros_like(moved)
        expected[[step, 5]] = 1.0
        assert torch.equal(moved, expected), step
        (master,) = optimizer.master_parameters()
        assert torch.equal(master.detach().half(), table.weight)
        assert hvd.replicas_equal(table.state_dict())


def case_an_overflow_beside_a_large_sparse_gradient_is_seen_in_the_first_step_too():
    """After that step gradients are declared anew, as rows, and its verdict is still asked for."""
    for precision in ("amp_fp16", "fp16(init=65536)"):
        for spec in ("none", "int8 | ef"):
            for bad in (0, 1):
                torch.manual_seed(0)
                table, head = torch.nn.Embedding(1 << 13, 8, sparse=True), torch.nn.Linear(8, 1)
                model = torch.nn.Sequential(table, head)
                if precision != "amp_fp16":
                    model.half()
                optimizer = hvd.DistributedOptimizer(
                    torch.optim.SGD(model.parameters(), lr=0.01),
                    model.named_parameters(),
                    compression=spec,
                    precision=precision,
                )
                for step in range(3):
                    optimizer.zero_grad()
                    loss = model(torch.arange(8)).float().mean() * 1e-3
                    if step == bad and hvd.rank() == 0:
                        loss = loss * float("inf")
                    optimizer.scale(loss).backward()
                    optimizer.step()
                    assert optimizer.skipped_steps == (step >= bad), (precision, spec, bad, step)
                assert all(p.isfinite().all() for p in model.parameters())
                assert hvd.replicas_equal(model.state_dict())


def case_a_changed_scale_counts_from_the_next_step_on():
    p, optimizer = half(1 << 12, "fp16(init=256, interval=1)", compression="int8")
    for step in range(3):
        optimizer.zero_grad()
        assert optimizer.loss_scale == 256.0 * 2**step
        optimizer.scale(p.sum() / 8).backward()
        optimizer.synchronize()
        (master,) = optimizer.master_parameters()
        assert torch.allclose(master.grad, torch.full((1 << 12,), 0.125), rtol=1e-2), step
        optimizer.step()


def case_a_step_that_is_given_up_after_synchronize_leaves_nothing():
    ways = {
        "optimizer": lambda p, optimizer: optimizer.zero_grad(),
        "in place": lambda p, optimizer: optimizer.zero_grad(set_to_none=False),
        "model": lambda p, optimizer: setattr(p, "grad", None),
    }
    for precision, dtype in ((SCALED, torch.float16), ("bf16", torch.bfloat16)):
        for way, clear in ways.items():
            for shown in (False, True):
                p = torch.nn.Parameter(torch.zeros(8, dtype=dtype))
                optimizer = hvd.DistributedOptimizer(
                    torch.optim.SGD([p], lr=1.0), precision=precision
                )
                optimizer.scale((p * 3).sum()).backward()
                optimizer.synchronize()
                clear(p, optimizer)
                optimizer.scale((p * (hvd.rank() + 1)).sum()).backward()
                if shown:
                    optimizer.synchronize()
                optimizer.step()
                mean = (hvd.size() + 1) / 2
                assert p.tolist() == [-mean] * 8, (precision, way, shown)


def case_backward_onto_gradients_without_the_loss_scale_is_refused():
    for precision, p in (
        (SCALED, torch.nn.Parameter(torch.zeros(8).half())),
        ("amp_fp16(static=1024)", torch.nn.Parameter(torch.zeros(8))),
    ):
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), precision=precision)
        optimizer.scale(p.sum()).backward()
        optimizer.synchronize()
        optimizer.scale(p.sum()).backward()
        with pytest.raises(RuntimeError, match="had taken the loss scale off"):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.scale(p.sum()).backward()
        optimizer.step()
        assert p.tolist() == [-1.0] * 8, precision


def case_clipping_before_synchronize_is_refused():
    for precision in ("bf16", SCALED):
        dtype = torch.bfloat16 if precision == "bf16" else torch.float16
        p = torch.nn.Parameter(torch.zeros(8, dtype=dtype))
        optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), precision=precision)
        optimizer.scale(p.sum()).backward()
        with pytest.raises(RuntimeError, match="in synchronize"):
            optimizer.master_parameters()
        torch.nn.utils.clip_grad_norm_([p], 0.5)
        with pytest.raises(RuntimeError, match="between backward"):
            optimizer.step()
        optimizer.zero_grad()
        optimizer.scale(p.sum()).backward()
        optimizer.step()
        assert p.tolist() == [-1.0] * 8


def case_a_forgotten_scale_is_warned_of():
    p, optimizer = half(8, SCALED)
    hvd.broadcast_optimizer_state(optimizer, 0)
    for expected in (1, 0):  # once is enough
        optimizer.zero_grad()
        p.sum().backward()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            optimizer.step()
        assert [w.filename for w in told if "optimizer.scale" in str(w.message)] == (
            [__file__] * expected
        )
    p, optimizer = half(8, SCALED)
    for ask in (lambda: optimizer.scale(p.sum()), lambda: p.sum() * optimizer.loss_scale):
        optimizer.zero_grad()
        ask().backward()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            optimizer.step()


def case_results_of_a_size_of_their_own_are_warned_of_under_a_loss_scale():
    p = torch.nn.Parameter(torch.zeros(8).half())
    for precision, wire in ((SCALED, {"*": "signsgd"}), (SCALED, "onebit | ef")):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            inner = torch.optim.SGD([p], lr=1.0)
            hvd.DistributedOptimizer(inner, precision=precision, compression=wire)
        odd = [w.filename for w in told if "goes by absolute sizes" in str(w.message)]
        assert odd == [__file__] * (wire != "onebit | ef")


def case_parameters_of_16_bits_that_are_unfrozen_later_are_refused():
    p = torch.nn.Parameter(torch.zeros(8).half())
    frozen = torch.nn.Parameter(torch.zeros(8).half(), requires_grad=False)
    inner = torch.optim.SGD([p, frozen], lr=1.0)
    optimizer = hvd.DistributedOptimizer(inner, [("p", p)], precision=SCALED)
    frozen.requires_grad_(True)
    optimizer.scale((p + frozen).sum()).backward()
    with pytest.raises(RuntimeError, match=r"parameter 1 of group 0.*unfrozen"):
        optimizer.step()
    # The step may have been reduced by now, so that it cannot be given up.
    inner = torch.optim.SGD([p, frozen], lr=1.0)
    optimizer = hvd.DistributedOptimizer(inner, [("p", p), ("q", frozen)], precision=SCALED)
    optimizer.zero_grad()
    optimizer.scale((p + frozen).sum()).backward()
    optimizer.step()
    assert p.tolist() == frozen.tolist() == [-1.0] * 8


def case_broadcasts_reach_masters_before_the_first_step_and_later():
    p, optimizer = half(8, SCALED)
    with torch.no_grad():
        p.fill_(float(hvd.rank()))
    last = hvd.size() - 1
    hvd.broadcast_optimizer_state(optimizer, last)
    assert p.grad.tolist() == [0.0] * 8
    for start in (float(last), 20.0):
        with torch.no_grad():
            if hvd.rank() == last:
                p.fill_(start)
        hvd.broadcast_parameters([("p", p)], last)
        optimizer.zero_grad()
        optimizer.scale(p.sum()).backward()
        optimizer.step()
        assert p.tolist() == [start - 1] * 8


def case_gradients_of_64_bits_keep_their_digits():
    p = torch.nn.Parameter(torch.zeros(8).double())
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD([p, torch.nn.Parameter(torch.zeros(1))], lr=1.0),
        precision="amp_fp16(static=1024)",
        compression="none",
    )
    for factor, skipped in ((1.0 + 2.0**-40, 0), (float("inf"), 1)):
        optimizer.zero_grad()
        optimizer.scale((p * factor).sum()).backward()
        optimizer.step()
        assert p.tolist() == [-1.0 - 2.0**-40] * 8
        assert optimizer.skipped_steps == skipped


def case_what_the_original_remembered_is_widened():
    p = torch.nn.Parameter(torch.zeros(8).half())
    inner = torch.optim.Adam([p], lr=0.1)
    p.sum().backward()
    inner.step()
    optimizer = hvd.DistributedOptimizer(inner, precision=SCALED)
    (master,) = optimizer.master_parameters()
    assert optimizer.state[master]["exp_avg_sq"].dtype is torch.float32
    assert float(optimizer.state[master]["step"]) == 1


def case_a_checkpoint_of_another_policy_keeps_to_the_chosen_scale():
    def made(precision, dtype):
        p = torch.nn.Parameter(torch.zeros(1 << 11, dtype=dtype))
        inner = torch.optim.SGD([p], lr=1.0)
        spec = "topk(ratio=0.1) | ef"
        return p, hvd.DistributedOptimizer(inner, precision=precision, compression=spec)

    p, saved = made("fp16(init=4096)", torch.float16)
    saved.scale((p * torch.linspace(0.5, 1, 1 << 11)).sum()).backward()
    saved.step()
    state = saved.state_dict()
    held = saved.residual_norm() / 4096
    assert (held > 0) == (hvd.size() > 1)
    for precision, dtype, scale in (
        ("fp16", torch.float16, 4096.0),
        ("fp16(static=8)", torch.float16, 8.0),
        ("bf16", torch.bfloat16, 1.0),
        ("fp32", torch.float32, 1.0),
    ):
        _, optimizer = made(precision, dtype)
        optimizer.load_state_dict(state)
        assert optimizer.loss_scale == scale, precision
        assert optimizer.residual_norm() == pytest.approx(held * scale), precision
    for precision, dtype, scale in (
        ("bf16", torch.bfloat16, 65536.0),
        ("amp_fp16(init=16)", torch.float32, 16.0),  # has no masters
    ):
        p, optimizer = made("fp16", torch.float16)
        optimizer.load_state_dict(made(precision, dtype)[1].state_dict())
        assert optimizer.loss_scale == scale
        with torch.no_grad():
            p.fill_(3.0)  # as a model's load_state_dict does
        optimizer.scale(p.sum() / 64).backward()
        optimizer.step()
        assert torch.allclose(optimizer.master_parameters()[0], torch.tensor(3 - 1 / 64), atol=0.02)
    _, autocast = made("amp_fp16", torch.float32)
    state["param_groups"][0]["lr"] = 0.5
    with pytest.raises(ValueError, match="this policy has none"):
        autocast.load_state_dict(state)
    assert autocast.param_groups[0]["lr"] == 1.0  # nothing of it was loaded


def case_what_is_written_after_synchronize_is_taken_over():
    for precision, dtype in (("bf16", torch.bfloat16), (SCALED, torch.float16)):
        for first in (0, 1):  # before the first step, and later on
            p = torch.nn.Parameter(torch.zeros(8, dtype=dtype))
            optimizer = hvd.DistributedOptimizer(torch.optim.SGD([p], lr=1.0), precision=precision)
            places = [p, optimizer.master_parameters()[0]]
            for written, place in ((2.0, places[first]), (4.0, places[1 - first])):
                optimizer.zero_grad()
                optimizer.scale(p.sum()).backward()
                optimizer.synchronize()
                with torch.no_grad():
                    place.fill_(written)
                with optimizer.skip_synchronize():
                    optimizer.step()
                assert p.tolist() == [written - 1.0] * 8, (precision, first, written)


def case_what_is_owed_to_one_rank_outlasts_an_overflow():
    if hvd.size() > 1:
        return
    saving = half(4, SCALED, compression="topk(ratio=0.5) | ef")[1].state_dict()
    memory = saving["ringlet"] | {"size": 2, "specs": {"param.0.0": "topk(ratio=0.5) | ef"}}
    shards = [
        saving | {"ringlet": memory | {"rank": r, "states": {"param.0.0": {"residual": held}}}}
        for r, held in enumerate([torch.full((4,), 1024.0), torch.full((4,), 3072.0)])
    ]
    p, optimizer = half(4, SCALED, compression="topk(ratio=0.5) | ef")
    optimizer.load_sharded(shards)
    for factor, there in ((float("inf"), 0.0), (1.0, -3.0), (float("inf"), -3.0), (1.0, -4.0)):
        optimizer.zero_grad()
        optimizer.scale((p * factor).sum()).backward()
        optimizer.step()
        assert p.tolist() == [there] * 4, factor
    assert optimizer.skipped_steps == 2


CASES = [value for name, value in list(globals().items()) if name.startswith("case_")]


@pytest.mark.parametrize(("transport", "size"), [("mpi", 1), ("gloo", 3)])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__.removeprefix("case_"))
def test_masters(run_case, case, transport, size):
    run_case(case, transport, size)
