"""Choosing compressors by what gradients look like."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlet.compressors import Int4, Int8, OptionError, parse
from ringlet.compressors.adaptive import Accordion, assign
from ringlet.compressors.adaptive.lgreco import _cheapest, _measure


def test_accordion_compresses_little_in_critical_regimes():
    accordion = Accordion("int8", "int4")
    chosen = [accordion.choose(norm) for norm in (10.0, 9.0, 4.0, 3.9, 8.0, 7.9)]
    assert chosen == [Int8(), Int4(), Int8(), Int4(), Int8(), Int4()]
    with pytest.raises(OptionError, match="threshold"):
        Accordion("int8", "int4", threshold=0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_accordion_takes_an_overflow_for_a_critical_regime(bad):
    accordion = Accordion("int8", "int4")
    chosen = [accordion.choose(norm) for norm in (bad, 10.0, 9.0, bad, bad, 8.0, 2.0)]
    assert chosen == [Int8(), Int8(), Int4(), Int8(), Int8(), Int4(), Int8()]


@given(st.integers(1, 5), st.integers(2, 4), st.integers(0, 10_000))
@settings(max_examples=60)
def test_the_plan_is_as_cheap_as_trying_them_all(layers, options, seed):
    rng = np.random.default_rng(seed)
    errors = rng.integers(0, 20, (layers, options)).astype(float)
    sizes = rng.integers(1, 50, (layers, options)).astype(float)
    budget = errors[:, -1].sum()
    # Errors are whole numbers, so a step of 1 discretises nothing away.
    picks = _cheapest(sizes, errors, budget, int(budget) or 1)
    rows = np.arange(layers)
    feasible = [
        sizes[rows, list(plan)].sum()
        for plan in itertools.product(range(options), repeat=layers)
        if errors[rows, list(plan)].sum() <= budget
    ]
    assert errors[rows, picks].sum() <= budget
    assert sizes[rows, picks].sum() == min(feasible)


def test_assign_spends_bits_where_they_matter():
    rng = np.random.default_rng(0)
    gradients = {
        "small": rng.standard_normal(4096).astype(np.float32) * 1e-3,
        "large": rng.standard_normal(4096).astype(np.float32),
        "spiky": (rng.standard_normal(4096) * (rng.random(4096) < 0.01)).astype(np.float32),
    }
    candidates = ["maxnorm(bits=2)", "int4", "int8", "topk(ratio=0.01)", "topk(ratio=0.02)"]
    chosen = assign(gradients, candidates, reference="int4")
    assert chosen["small"] != chosen["large"]
    assert chosen["small"] == parse("topk(ratio=0.01)")

    def lost(plan):
        return sum(error(plan[name], gradients[name]) for name in gradients)

    def error(compressor, x):
        return np.array(_measure(compressor, "x", x))

    size, spent = lost(chosen)
    size_of_reference, budget = lost(dict.fromkeys(gradients, Int4()))
    assert spent <= budget * (1 + 3 / 1000)
    assert size < size_of_reference


@pytest.mark.parametrize("name", ["powersgd", "acpsgd"])
@pytest.mark.parametrize("feedback", ["", " | ef"])
def test_assign_chooses_among_ranks(name, feedback):
    """L-GreCo's own use: where little is lost by a low rank, another layer gets more of them."""
    rng = np.random.default_rng(1)
    turned = [np.linalg.qr(rng.standard_normal((n, 64)))[0] for n in (128, 256)]
    gradients = {
        "steep": (turned[0] * 0.1 ** np.arange(64) @ turned[1].T).astype(np.float32),
        "flat": rng.standard_normal((32, 48)).astype(np.float32) / 40,
        "bias": rng.standard_normal(64).astype(np.float32),
    }
    specs = [f"{name}(rank={rank}){feedback}" for rank in (1, 2, 4, 8)]
    reference = parse(f"{name}(rank=3){feedback}")
    chosen = assign(gradients, specs, reference)
    assert chosen["steep"] in (parse(specs[0]), parse(specs[1]))
    assert chosen["flat"] in (parse(specs[2]), parse(specs[3]))

    def totals(plan):
        return np.sum([_measure(plan[layer], layer, x) for layer, x in gradients.items()], axis=0)

    sent, lost = totals(chosen)
    usual, budget = totals(dict.fromkeys(gradients, reference))
    assert lost <= budget * (1 + 3 / 1000)
    assert sent < usual
    # 4 bytes for each element of both factors, of which ACP-SGD sends one in a step.
    matrix, bias = _measure(parse("powersgd(rank=2)"), "flat", gradients["flat"]), 4 * 64
    assert matrix[0] == 4 * 2 * (32 + 48)
    assert _measure(parse("powersgd(rank=2)"), "bias", gradients["bias"]) == (bias, 0.0)


@pytest.mark.parametrize("shape", [(2000, 50), (50, 2000)])
def test_factors_that_are_sent_in_turn_both_count(shape):
    gradient = np.random.default_rng(0).standard_normal(shape).astype(np.float32)
    sent, _ = _measure(parse("acpsgd(rank=4)"), "w", gradient)
    assert sent == 4 * 4 * (2000 + 50) / 2


@pytest.mark.parametrize("spec", ["powersgd(rank=2)", "acpsgd | ef"])
def test_flat_gradients_tell_nothing_of_a_low_rank(spec):
    flat = {"w": np.ones(4096, np.float32)}
    for candidates, reference in (([spec], "int4"), (["int4"], spec)):
        with pytest.raises(OptionError, match=r"all gradients are flat.*tensors' shapes"):
            assign(flat, candidates, reference)
    assign(flat | {"m": np.ones((64, 64), np.float32)}, [spec], "int4")


def test_no_error_is_allowed_where_the_reference_makes_none():
    gradient = np.random.default_rng(0).standard_normal(4096).astype(np.float32) * 1e-3
    assert assign({"w": gradient}, ["int4"], "none") == {"w": parse("none")}


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_assign_refuses_gradients_that_are_not_finite(bad):
    gradients = {f"layer{i}": np.ones((64, 64), np.float32) for i in range(4)}
    gradients["layer2"][3, 3] = bad
    with pytest.raises(OptionError, match=r"the gradient of 'layer2' is not finite"):
        assign(gradients, ["int4", "topk"], "int8")


def test_tensors_that_travel_uncompressed_cost_what_they_do():
    bias = np.random.default_rng(0).standard_normal(512).astype(np.float32)
    assert _measure(parse("topk(ratio=0.01)"), "bias", bias) == (2048, 0)
    assert _measure(parse("topk(ratio=0.01) | min_size(0)"), "bias", bias)[0] < 100
    # What a reference would lose of small tensors, if it compressed them, is nobody's to spend.
    weight = np.random.default_rng(1).standard_normal(4096).astype(np.float32)
    small = {f"bias{i}": 100 * bias for i in range(4)}
    chosen = assign({"weight": weight} | small, ["topk(ratio=0.01)", "int8"], "int4")
    assert chosen["weight"] == Int4()


def test_assign_of_nothing_is_nothing():
    assert assign({}, ["int8"], "int4") == {}
    with pytest.raises(OptionError, match="resolution"):
        assign({}, ["int8"], "int4", resolution=0)


def test_what_overflows_is_not_chosen_and_is_no_budget():
    wide = np.random.default_rng(1).normal(size=(64, 64)).astype(np.float32)
    layers = {"wide": 1e5 * wide, "usual": wide}
    chosen = assign(layers, ["topk(ratio=0.05) | fp16"], "int8")
    assert str(chosen["wide"]) == "int8"
    with pytest.raises(OptionError, match="fp16 overflows on these gradients"):
        assign(layers, ["int4"], "fp16")
