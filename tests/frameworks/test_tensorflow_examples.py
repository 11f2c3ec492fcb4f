"""The TensorFlow and Keras examples run, on two ranks: all in one job, for imports take seconds."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.preloaded("tensorflow")

EXAMPLES = Path(__file__).parents[2] / "examples"
RUNS = {
    "keras_digits.py": ["--epochs", "3", "--compression", "int8 | ef", "--precision", "bf16"],
    "keras_fit.py": [],
    "tensorflow_custom_loop.py": ["--steps", "60"],
    "tensorflow_embedding.py": ["--epochs", "2"],
    "tensorflow_function.py": [],
}


def main():
    import runpy

    for script, arguments in RUNS.items():
        print(f"=={script}", flush=True)
        sys.argv = [script, *arguments]
        runpy.run_path(str(EXAMPLES / script), run_name="__main__")


@pytest.fixture(scope="module")
def told():
    """Return what rank 0 printed, by script and the first 24 letters of its lines."""
    command = [sys.executable, "-m", "ringlet", "run", "-np", "2", "--transport", "gloo"]
    ran = subprocess.run(
        [*command, sys.executable, __file__],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rank0 = [line[13:] for line in ran.stdout.splitlines() if line.startswith("[0]<stdout>: ")]
    parts = "\n".join(rank0).split("==")[1:]
    return {
        part.splitlines()[0]: {line[:24].strip(): line[24:].strip() for line in part.splitlines()}
        for part in parts
    }


def test_keras_digits(told):
    lines = told["keras_digits.py"]
    assert float(lines["accuracy (held out)"].split()[0]) > 80
    assert lines["replicas bit-equal"] == "yes"
    assert float(lines["ratio"]) > 3
    assert lines["precision"] == "bf16"


def test_keras_fit(told):
    (said,) = [line for line in told["keras_fit.py"] if line.startswith("accuracy")]
    figures = said + told["keras_fit.py"][said]
    accuracy, fewer = map(float, re.findall(r"([\d.]+) (?:%|times)", figures))
    assert accuracy > 75
    assert fewer > 3


def test_custom_loop(told):
    lines = told["tensorflow_custom_loop.py"]
    first, last = map(float, lines["loss"].split(" -> "))
    assert last < first
    assert lines["replicas bit-equal"] == "yes"


def test_embedding(told):
    lines = told["tensorflow_embedding.py"]
    assert lines["replicas bit-equal"] == "yes"
    assert lines["the tables"] == "6.4 MB"


def test_function(told):
    value, by_numpy = told["tensorflow_function.py"]["variance"].split(", by NumPy ")
    assert float(value) == pytest.approx(float(by_numpy), rel=1e-3)


if __name__ == "__main__":
    main()
