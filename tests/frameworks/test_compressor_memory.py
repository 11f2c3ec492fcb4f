"""What compressors remember between steps: without any ranks."""

from __future__ import annotations

import numpy as np
import pytest

from ringlet.compressors import parse
from ringlet.shared.memory import Memory

TOPK = parse("topk(ratio=0.1) | ef")


def held(*values):
    return np.array(values, np.float32)


@pytest.fixture
def memory():
    made = Memory({"w": TOPK, "late": TOPK}.get, averages=True)
    made.states["w"] = {"residual": held(1, 2), "step": 3}
    return made


def residual(memory, name="w"):
    return memory.states[name]["residual"].tolist()


def test_a_step_that_failed_leaves_no_trace(memory):
    memory.keep_steps()
    memory.began()
    memory.states["w"] |= {"residual": held(5, 6), "step": 4}
    memory.began(fresh=False)  # more of the same step
    memory.take_back()
    assert (residual(memory), memory.steps) == ([1, 2], {"w": 3})


def test_a_step_that_ended_is_not_taken_back_unless_it_is_opened_again(memory):
    memory.keep_steps()
    memory.began()
    memory.states["w"]["residual"] = held(5, 6)
    memory.ended()
    memory.take_back()
    assert residual(memory) == [5, 6]
    memory.reopen()
    memory.take_back()
    assert residual(memory) == [1, 2]


def test_a_step_that_is_skipped_counts(memory):
    memory.keep_steps()
    memory.began()
    memory.states["w"] |= {"residual": held(5, 6), "step": 4}
    memory.ended()
    memory.undo()
    assert (residual(memory), memory.steps) == ([1, 2], {"w": 4})


def test_without_copies_nothing_is_taken_back(memory):
    memory.began()
    memory.states["w"]["residual"] = held(5, 6)
    memory.take_back()
    memory.undo()
    assert residual(memory) == [5, 6]


def test_ranks_count_alike_also_what_one_of_them_has_never_compressed(memory):
    memory.align({"late": 7})
    assert memory.steps == {"w": 0, "late": 7}
    assert residual(memory) == [1, 2]


def test_what_was_another_ranks_waits_for_a_tensor_that_is_not_known_yet(memory):
    memory.resize(2)
    memory.take_over({"w": {"residual": held(1, 1)}, "late": {"residual": held(4, 8)}}, 2)
    assert residual(memory) == [2, 3]
    assert sorted(memory.own()) == ["w"]
    assert memory.adopt("late")["residual"].tolist() == [4, 8]
    assert memory.adopt("late") is memory.states["late"]  # taken over once
    assert residual(memory, "late") == [4, 8]


def test_of_what_no_compressor_is_known_nothing_changes(memory):
    memory.states["other"] = {"residual": held(1)}
    memory.rescale(2.0)
    memory.resize(4)
    assert residual(memory, "other") == [1]
    assert residual(memory) == [2, 4]
    assert memory.norm() == pytest.approx(21**0.5)
