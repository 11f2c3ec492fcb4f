"""Many buckets of rounds under way at the same time, on real ranks."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

pytestmark = pytest.mark.preloaded("torch")
WORKER = Path(__file__).with_name("worker_rounds.py")
FOUND = re.compile(r"hash (\w+), buckets (\d+), error ([\d.]+)")


@pytest.mark.parametrize(
    ("transport", "size"), [("gloo", 3), pytest.param("mpi", 2, marks=pytest.mark.mpi)]
)
@pytest.mark.parametrize(
    ("spec", "error"), [("powersgd(rank=16) | ef", 2.0), ("shared_int | ef", 0.1)]
)
def test_their_sums_are_not_taken_for_one_another(spec, error, transport, size):
    done = subprocess.run(
        [sys.executable, "-m", "ringlet", "run", "-np", str(size), "--transport", transport,
         sys.executable, WORKER, spec],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, "OMP_NUM_THREADS": "1", "RINGLET_FUSION_THRESHOLD": "600000"},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    found = FOUND.findall(done.stdout)
    assert len(found) == size
    assert len({hashed for hashed, _, _ in found}) == 1
    for _, buckets, far in found:
        assert int(buckets) > 10
        assert float(far) < error
