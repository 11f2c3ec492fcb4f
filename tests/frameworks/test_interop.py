"""Our DDP hook inside other people's trainers: `make test-huggingface` has them installed."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.preloaded("torch")

WORKER = Path(__file__).with_name("worker_interop.py")


@pytest.mark.parametrize(
    ("kind", "package"),
    [("accelerate", "accelerate"), ("trainer", "transformers"), ("lightning", "lightning")],
)
def test_a_hook_is_used_and_ranks_agree(kind, package):
    pytest.importorskip(package, reason=f"{package} is not installed: make test-huggingface")
    job = [sys.executable, "-m", "ringlet", "run", "-np", "2", "--transport", "gloo"]
    done = subprocess.run(
        [*job, sys.executable, WORKER, kind], capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("DONE") == 2, done.stdout
