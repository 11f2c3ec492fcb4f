"""Elastic jobs that train by a tape, or an optimizer of TensorFlow 1, and what these hold back."""

from __future__ import annotations

from pathlib import Path

import pytest
from elastic_jobs import job

pytest.importorskip("tensorflow")

pytestmark = pytest.mark.preloaded("tensorflow")
WORKER = [str(Path(__file__).with_name("worker_elastic_tape.py"))]


def test_one_rank_alone():
    """An elastic job may begin so, and others may come later."""
    plan = {"state": "variables", "batches": 3, "do": {}}
    done, lines = job(["-np", "1", "--min-np", "1"], plan, worker=WORKER)
    assert done.returncode == 0, done.stderr
    assert lines[-1]["done"] == pytest.approx(3)
