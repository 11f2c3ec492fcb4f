"""A rank that is killed in any phase of an exchange: the others say which one, and soon."""

import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.preloaded("torch")

WORKER = Path(__file__).with_name("worker_killed.py")
pytest.importorskip("torch")


@pytest.mark.parametrize("distance", ["near", "far", "levels"])
def test_survivors_name_a_rank_that_is_killed(distance, tmp_path):
    phases = runpy.run_path(str(WORKER))["PHASES"]
    process = subprocess.Popen(
        [sys.executable, WORKER, tmp_path, distance, *phases],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=240)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, output
    for phase in phases:
        for rank in (0, 2, 3)[: 3 if distance == "levels" else 2]:
            assert f"{phase}: rank {rank}: PeerLost: rank 1 is gone" in output, output
