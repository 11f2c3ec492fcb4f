"""Elastic jobs that train a Keras model."""

from __future__ import annotations

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
