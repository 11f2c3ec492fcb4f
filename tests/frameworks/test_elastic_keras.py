"""Elastic jobs that train a Keras model."""

from __future__ import annotations

from pathlib import Path

import pytest
from elastic_jobs import check_step, epochs, job

pytest.importorskip("tensorflow")

pytestmark = pytest.mark.preloaded("tensorflow")


@pytest.mark.parametrize("backend", ["tensorflow", "jax"])
def test_training_goes_on_from_the_step_at_hand(backend):
    """On jax from the commit: there a step that fails has taken the weights' memory."""
    do, spec = {"1": [25, "SIGKILL"]}, "topk(ratio=0.1) | ef"
    plan = {"batches": 40, "do": do, "resume": "step", "spec": spec}
    done, lines = job(["-np", "3", "--min-np", "2"], plan, "keras", KERAS_BACKEND=backend)
    assert done.returncode == 0, done.stderr
    if backend == "tensorflow":
        check_step(lines)
        return
    assert epochs(lines) == [(3, 0), (2, 20)]
    assert [line["equal"] for line in lines if "done" in line] == [True, True]


def test_training_goes_on_from_the_last_commit():
    """On jax the test above sees it."""
    plan = {"batches": 40, "do": {"0": [25, "SIGKILL"]}}
    done, lines = job(["-np", "3", "--min-np", "2"], plan, "keras", KERAS_BACKEND="tensorflow")
    assert done.returncode == 0, done.stderr
    assert epochs(lines) == [(3, 0), (2, 20)]
    assert [line["equal"] for line in lines if "done" in line] == [True, True]


def test_a_copy_of_what_a_lost_rank_held_back_goes_on_with_another():
    plan = {"batches": 40, "do": {"1": [25, "SIGKILL"]}, "redundancy": 1}
    plan["spec"] = "topk(ratio=0.1) | ef"
    done, lines = job(["-np", "3", "--min-np", "2"], plan, "keras", KERAS_BACKEND="jax")
    assert done.returncode == 0, done.stderr
    assert epochs(lines) == [(3, 0), (2, 20)]
    assert [line["equal"] for line in lines if "done" in line] == [True, True]
    assert "held back on rank 1 of before goes on with rank 1 of now: gradients" in done.stderr


def test_fit_commits_and_goes_back_where_its_program_has_the_weights():
    """On jax: a rank is lost in the first step of all, and another one behind a commit.

    Whether the step that failed had taken the weights' memory is up to jax.
    """
    worker = [str(Path(__file__).with_name("worker_elastic_fit.py"))]
    plan = {"do": {"1": [0, 0], "2": [1, 6]}}
    done, lines = job(["-np", "3", "--min-np", "1"], plan, worker=worker, KERAS_BACKEND="jax")
    assert done.returncode == 0, done.stderr
    own = [line for line in lines if line["started"] == 0]
    *begins, last = [line["begins"] for line in own[:-1]]
    assert begins == [[0, 0], [0, 0]]
    assert last in ([1, 3], [1, 5])
    gone = 11 + last[1]  # epochs begin at their start again
    assert [line["steps"] for line in own] == [0, 0, gone, gone + 10]
    for line in own:
        assert line["together"] == pytest.approx([line["steps"]] * 2, abs=1e-3)
    assert own[-1]["ends"] == 2


def test_a_process_set_without_rank_0_counts_on():
    """What schedules and shared random numbers go by is what the set's ranks have counted."""
    worker = [str(Path(__file__).with_name("worker_elastic_fit.py"))]
    plan = {"do": {"3": [1, 0]}, "set": [1, 2]}
    flags = ["-np", "4", "--min-np", "3"]
    done, lines = job(flags, plan, worker=worker, KERAS_BACKEND="tensorflow")
    assert done.returncode == 0, done.stderr
    begun = [line for line in lines if "begins" in line and line["size"] == 3]
    assert [line["begins"] for line in begun] == [[1, 0]] * 3
    assert [line["counted"] for line in begun] == [10] * 3
    last = {line["started"]: line["counted"] for line in lines if "ends" in line}
    assert last == {0: 10, 1: 20, 2: 20}
