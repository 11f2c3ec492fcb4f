"""The JAX examples run as their first lines say, on two ranks, and print what they promise."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.preloaded("jax")

EXAMPLES = Path(__file__).parents[2] / "examples"


def run(script, *arguments, cwd):
    command = [sys.executable, "-m", "ringlet", "run", "-np", "2", sys.executable]
    done = subprocess.run(
        [*command, str(EXAMPLES / script), *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
        cwd=cwd,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_digits_and_their_resumption(tmp_path):
    first = run("jax_digits.py", "--epochs", "3", cwd=tmp_path)
    assert "replicas bit-equal: yes" in first
    kept = {path.name for path in (tmp_path / "checkpoints").iterdir()}
    assert kept == {"rank0of2", "rank1of2"}
    again = run("jax_digits.py", "--epochs", "3", "--resume", "checkpoints", cwd=tmp_path)
    assert float(re.search(r"accuracy ([\d.]+)", again)[1]) > 85
    assert "replicas bit-equal: yes" in again


def test_equinox(tmp_path):
    text = run("jax_equinox.py", "--steps", "150", cwd=tmp_path)
    assert float(re.search(r"accuracy ([\d.]+)", text)[1]) > 85
    assert "replicas bit-equal: yes" in text
