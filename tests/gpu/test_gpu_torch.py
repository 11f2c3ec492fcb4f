"""On a GPU: torch tensors that are compressed and reduced there, by two ranks that share it."""

from pathlib import Path

import pytest
from jobs import run_ranks

pytestmark = pytest.mark.gpu
WORKER = Path(__file__).parent / "worker_torch.py"


def test_tensors_go_directly(cupy):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a torch that sees the GPU")
    run_ranks(WORKER, 2, timeout=300)
