"""The example scripts, as a user would run them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.preloaded("torch")

ROOT = Path(__file__).parents[2]
RINGLET = [sys.executable, "-m", "ringlet"]


def launch(transport: str, script: str, *arguments: str) -> str:
    """Run an example on two ranks; return what it printed."""
    program = [sys.executable, str(ROOT / "examples" / script), *arguments]
    ended = subprocess.run(
        [*RINGLET, "run", "-np", "2", "--transport", transport, "--no-prefix", *program],
        capture_output=True,
        text=True,
        check=False,
        timeout=90,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_digits_with_compression(tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    summary = tmp_path / "summary.json"
    spec = "int8 | ef"
    out = launch(
        "gloo", "pytorch_digits.py", "--epochs", "2", "--compression", spec, "--json", str(summary)
    )
    said = dict(re.split(r"\s{2,}", line, maxsplit=1) for line in out.splitlines())
    assert said["compression"] == "int8 | ef on 2 workers"
    assert said["replicas bit-equal"] == "yes"
    assert float(said["accuracy (held out)"].split()[0]) > 50
    assert 3.5 < float(said["ratio"]) <= 4.0
    assert float(said["final residual norm"]) > 0
    assert re.fullmatch(r"[0-9.]+ s for 84 steps", said["training time"])
    raw, wire = (float(said[f"{kind} bytes per rank"].split()[0]) for kind in ("raw", "wire"))
    told = json.loads(summary.read_text())
    assert (told["workers"], told["replicas_equal"]) == (2, True)
    assert told["raw_bytes"] / 1e6 == pytest.approx(raw, abs=0.01)
    assert raw / wire == pytest.approx(told["ratio"], rel=0.01)


def test_a_compressor_of_ones_own() -> None:
    lines = launch("mpi", "custom_compressor.py").splitlines()
    losses = [float(line.split()[-1]) for line in lines if line.startswith("step")]
    assert len(losses) == 5
    assert losses[-1] < losses[0] / 2
    assert lines[-1].startswith("replicas bit-equal: True; ")
    assert float(lines[-1].split()[3]) > 20
