"""Our DDP hook inside other people's trainers: `make test-huggingface` has them installed."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.preloaded("torch")

PACKAGES = {"accelerate": "accelerate", "trainer": "transformers", "lightning": "lightning"}


def two_ranks_of(kind, worker):
    """Run a job with one of these libraries, to its end."""
    package = PACKAGES[kind]
    pytest.importorskip(package, reason=f"{package} is not installed: make test-huggingface")
    job = [sys.executable, "-m", "ringlet", "run", "-np", "2", "--transport", "gloo"]
    program = [sys.executable, Path(__file__).with_name(worker), kind]
    done = subprocess.run([*job, *program], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("DONE") == 2, done.stdout


@pytest.mark.parametrize("kind", PACKAGES)
def test_a_hook_is_used_and_ranks_agree(kind):
    two_ranks_of(kind, "worker_interop.py")


@pytest.mark.parametrize("kind", PACKAGES)
def test_training_goes_on_from_the_librarys_own_checkpoint(kind):
    two_ranks_of(kind, "worker_interop_checkpoints.py")
