"""What DDP hooks remember in an elastic job, between one hook and the next: without any ranks."""

from __future__ import annotations

import gc
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from ringlet.compressors import parse
from ringlet.shared.memory import Undo
from ringlet.torch.elastic import hook_memory
from ringlet.torch.elastic.hook_memory import HookMemory, kept_for, memory_of, register, reopen

TOPK, INT8 = parse("topk(ratio=0.1) | ef"), parse("int8 | ef")


@pytest.fixture
def kept(monkeypatch):
    """Return what hooks keep, and a function that lets it go on among so many ranks."""
    made = HookMemory()

    def among(size):
        runtime = SimpleNamespace(identity=object(), size=size)
        monkeypatch.setattr(hook_memory, "current", lambda: runtime)
        made.join_epoch()

    return made, among


def held(values):
    return np.array(values, np.float32)


def test_the_next_hook_goes_on_with_what_the_last_one_held_back(kept):
    made, among = kept
    among(3)
    state = made.adopt("w", TOPK)
    state |= {"residual": held([1, 2]), "step": 7}
    among(2)
    assert made.adopt("w", INT8) is state  # another spec
    np.testing.assert_array_equal(state["residual"], [1, 2])
    assert (made.step, made.memory.steps) == (7, {"w": 7})
    assert made.memory.norm() == pytest.approx(5**0.5)


def test_what_is_owed_to_a_mean_stays_where_ranks_come_or_go(kept):
    made, among = kept
    made.memory.owes = True
    among(4)
    made.adopt("w", TOPK)["residual"] = held([4, 8])
    among(3)
    made.memory.take_over({"w": {"residual": held([4, 0])}}, 4)
    np.testing.assert_allclose(made.memory.own()["w"]["residual"], [6, 6])


def test_what_another_rank_owed_waits_for_the_first_hook(kept):
    made, among = kept
    made.memory.owes = True
    among(4)
    made.memory.take_over({"w": {"residual": held([4, 8])}}, 4)
    assert made.memory.own() == {}
    among(2)
    np.testing.assert_allclose(made.adopt("w", TOPK)["residual"], [2, 4])


def test_a_backward_pass_that_failed_is_taken_back_and_one_that_ended_is_not(kept):
    made, among = kept
    among(2)
    made.memory.keep_steps()
    state = made.adopt("w", TOPK)
    for number, ends in enumerate((True, False)):
        made.began(number)
        state |= {"residual": held([1 + ends, 2]), "step": 1 + state.get("step", 0)}
        if ends:
            made.ended()
        made.memory.take_back()
    np.testing.assert_array_equal(state["residual"], [2, 2])
    assert state["step"] == 1


@pytest.mark.parametrize("failed", [7, 6])
def test_a_backward_pass_of_two_hooks_that_failed_for_one_is_taken_back_for_both(kept, failed):
    made, among = kept
    among(2)
    made.memory.keep_steps()
    state = made.adopt("w", TOPK)
    state |= {"residual": held([1, 2]), "step": 1}
    for step in (2, 3):  # two hooks compress in one pass, and the model of one is reduced
        made.began(7)
        state |= {"residual": held([step, 0]), "step": step}
    made.ended()
    reopen(failed)
    made.memory.take_back()
    assert (state["residual"].tolist(), state["step"]) == (
        ([1, 2], 1) if failed == 7 else ([3, 0], 3)
    )


def test_a_commit_knows_nothing_of_what_was_remembered_first_after_it():
    undo, states = Undo(), {"a": {"residual": held([1])}}
    undo.restore(states)  # before there is a copy it changes nothing
    undo.remember(states)
    states["b"] = new = {"residual": held([2]), "step": 3}
    undo.restore(states, counters=True)
    assert states == {"a": {"residual": held([1])}, "b": {}}
    assert states["b"] is new


def test_a_number_of_numpys_that_a_plugin_keeps_is_gone_back_to():
    undo, states = Undo(), {"a": {"peak": held([3, 1]).max(), "sums": held(0.0)}}
    for _ in range(2):  # the second copy goes where the first one is
        undo.remember(states)
        states["a"]["peak"] = states["a"]["peak"] * 2
        states["a"]["sums"] += 1
    undo.restore(states)
    assert states == {"a": {"peak": 6, "sums": 1}}


def test_parameters_are_known_while_they_live():
    model = torch.nn.Linear(2, 3)
    made = memory_of(model)
    assert kept_for(model.weight) == (made, "weight")
    model.extra = torch.nn.Parameter(torch.zeros(1))
    assert kept_for(model.extra) is None
    assert register(model) is made is memory_of(model)
    assert kept_for(model.extra) == (made, "extra")
    assert register(torch.nn.Sequential(model)) is not made  # whoever named it first keeps it
    assert kept_for(model.weight) == (made, "weight")
    known = {id(p) for p in model.parameters()}
    assert known <= hook_memory._by_parameter.keys()
    del model
    gc.collect()
    assert not known & hook_memory._by_parameter.keys()
