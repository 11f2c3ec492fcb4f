"""Elastic jobs that train a Keras model."""

from __future__ import annotations

import pytest
from elastic_jobs import check_step, epochs, job

pytest.importorskip("tensorflow")

pytestmark = pytest.mark.preloaded("tensorflow")


def test_training_goes_on_from_the_step_at_hand():
    do, spec = {"1": [25, "SIGKILL"]}, "topk(ratio=0.1) | ef"
    plan = {"batches": 40, "do": do, "resume": "step", "spec": spec}
    done, lines = job(["-np", "3", "--min-np", "2"], plan, "keras", KERAS_BACKEND="tensorflow")
    assert done.returncode == 0, done.stderr
    check_step(lines)


def test_training_goes_on_from_the_last_commit():
    plan = {"batches": 40, "do": {"0": [25, "SIGKILL"]}}
    done, lines = job(["-np", "3", "--min-np", "2"], plan, "keras", KERAS_BACKEND="tensorflow")
    assert done.returncode == 0, done.stderr
    assert epochs(lines) == [(3, 0), (2, 20)]
    assert [line["equal"] for line in lines if "done" in line] == [True, True]
