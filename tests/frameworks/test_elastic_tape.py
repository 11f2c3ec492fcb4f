"""Elastic jobs that train by a tape, or an optimizer of TensorFlow 1, and what these hold back."""

from __future__ import annotations

from pathlib import Path

import pytest
from elastic_jobs import job

pytest.importorskip("tensorflow")

pytestmark = pytest.mark.preloaded("tensorflow")
WORKER = [str(Path(__file__).with_name("worker_elastic_tape.py"))]


@pytest.mark.parametrize(
    ("state", "resume"), [("variables", "commit"), ("session", "commit"), ("model", "step")]
)
def test_what_a_tape_holds_back_goes_on_and_goes_back(state, resume):
    """A rank is lost between commits, and later on another: the one that is left pays it back."""
    plan = {"state": state, "resume": resume, "batches": 30, "do": {"1": 15, "2": 25}}
    done, lines = job(["-np", "3", "--min-np", "1"], plan, worker=WORKER)
    assert done.returncode == 0, done.stderr
    begun = [line for line in lines if "begins" in line and line["started"] == 0]
    places = [(3, 0), (2, 15), (1, 25)] if resume == "step" else [(3, 0), (2, 10), (1, 20)]
    assert [(line["size"], line["begins"]) for line in begun] == places
    for line in begun:
        assert line["together"] == pytest.approx([line["begins"]] * 2, abs=1e-3)
    assert all(line["owed"] > 100 for line in begun[1:])
    (last,) = [line for line in lines if "ends" in line]
    assert last["done"] == pytest.approx(30, abs=1e-3)
    assert last["together"] == pytest.approx([30, 30], abs=1e-3)


def test_one_rank_alone():
    """An elastic job may begin so, and others may come later."""
    plan = {"state": "variables", "batches": 3, "do": {}}
    done, lines = job(["-np", "1", "--min-np", "1"], plan, worker=WORKER)
    assert done.returncode == 0, done.stderr
    assert lines[-1]["done"] == pytest.approx(3)
