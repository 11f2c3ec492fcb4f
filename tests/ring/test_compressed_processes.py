"""Compressed collectives, pipelined and over two levels, between real processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.preloaded("torch")

WORKER = Path(__file__).with_name("worker_compressed.py")
MPIEXEC = Path(sys.executable).with_name("mpiexec")


@pytest.mark.mpi
@pytest.mark.skipif(not MPIEXEC.exists(), reason="no mpiexec in this virtual environment")
@pytest.mark.parametrize("size", [2, 4])
def test_over_mpi(size):
    command = [MPIEXEC, "-n", str(size), sys.executable, WORKER, "mpi"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.split() == ["DONE"]


@pytest.mark.parametrize(("size", "distance"), [(2, "near"), (4, "near"), (3, "all far")])
def test_over_gloo(size, distance, tmp_path):
    ranks = [
        subprocess.Popen(
            [sys.executable, WORKER, "gloo", tmp_path / "store", str(rank), str(size), distance],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(size)
    ]
    try:
        outputs = [process.communicate(timeout=240)[0] for process in ranks]
        assert [process.returncode for process in ranks] == [0] * size, "\n".join(outputs)
        assert "DONE" in outputs[0]
    finally:
        for process in ranks:
            process.kill()
            process.communicate()
