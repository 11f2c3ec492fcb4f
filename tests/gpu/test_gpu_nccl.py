"""On a GPU: collectives over NCCL, with several ranks that share it."""

from pathlib import Path

import pytest
from jobs import run_ranks

pytestmark = pytest.mark.gpu
WORKER = Path(__file__).parent / "worker_nccl.py"


@pytest.mark.parametrize("size", [2, 3, 4])
def test_collectives(size, cupy):
    pytest.importorskip("torch")
    run_ranks(WORKER, size)


def test_payloads_go_over_two_levels(cupy):
    pytest.importorskip("torch")
    run_ranks(WORKER.with_name("worker_levels.py"), 4)
