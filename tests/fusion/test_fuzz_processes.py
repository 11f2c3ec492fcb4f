"""Random operations, mismatches, failed steps, joins and process sets on real ranks.

More of them: ``ringlet run -np 3 python tests/fusion/worker_fuzz.py --operations 10000 --seed 7``.
"""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.preloaded("torch")
WORKER = Path(__file__).with_name("worker_fuzz.py")


@pytest.mark.parametrize(
    ("transport", "size", "seed"),
    [("gloo", 3, 1), pytest.param("mpi", 2, 4, marks=pytest.mark.mpi)],
)
def test_every_rank_gets_what_it_must_get(transport, size, seed):
    process = subprocess.Popen(
        [sys.executable, "-m", "ringlet", "run", "-np", str(size), "--transport", transport,
         sys.executable, WORKER, "--operations", "250", "--seed", str(seed)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        start_new_session=True,
    )  # fmt: skip
    try:
        output = process.communicate(timeout=280)[0]
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
    assert process.returncode == 0, output
    assert f"seed {seed}, {size} ranks over {transport}: " in output
