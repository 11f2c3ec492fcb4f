"""Elastic jobs of ``frameworks/worker_elastic.py``, or another, and what their ranks told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

WORKER = Path(__file__).with_name("frameworks") / "worker_elastic.py"


def job(flags, plan, framework="torch", command=list, worker=None, **env):
    launch = [sys.executable, "-m", "ringlet", "run", "--no-prefix", *flags]
    done = subprocess.run(
        command([*launch, sys.executable, *(worker or [str(WORKER), framework]), json.dumps(plan)]),
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return done, lines


def begun(lines):
    """Return what ranks said when an epoch began."""
    return [line for line in lines if "residual" in line and "committed" not in line]


def epochs(lines):
    """Return the size, and the batch at the start, of each epoch of the job."""
    return list(dict.fromkeys((line["size"], line["batch"]) for line in begun(lines)))


def check_step(lines):
    """Check that both survivors went on from batch 25 with what they held back before it."""
    assert epochs(lines) == [(3, 0), (2, 25)]
    for started in (0, 2):
        own = [line for line in lines if line["started"] == started]
        before = [line["before"] for line in own if "before" in line]
        assert len(before) == 2  # the step that failed, and once more
        assert before[0] > 0
        assert before == pytest.approx([before[0]] * 2, rel=1e-6)
    assert [line["equal"] for line in lines if "done" in line] == [True, True]


def owed(lines):
    """Return what these ranks owe together, and a scale for it."""
    told = np.array([line["owed"] for line in lines])
    return told[:, :2].sum(0), told[:, 2].sum()


def committed(lines, batch, of=range(9)):
    return [line for line in lines if line.get("commits") == batch and line["started"] in of]


def check_kept(lines, size, batch, of=range(9)):
    """Check that ``size`` ranks begin at a batch with what others owed at that commit.

    Return how much that is off, of how much it is.
    """
    now, _ = owed([line for line in begun(lines) if (line["size"], line["batch"]) == (size, batch)])
    then, scale = owed(committed(lines, batch, of))
    assert scale > 0
    np.testing.assert_allclose(now, then, atol=1e-6 * scale)
    return np.abs(now - then).max() / scale
