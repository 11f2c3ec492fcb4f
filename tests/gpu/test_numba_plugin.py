"""The example of a plugin with kernels in Numba: in the simulator, and by the conformance kit."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from ringlet.compressors.specs import registry
from ringlet.compressors.testing import check_compressor

pytest.importorskip("torch")

EXAMPLE = Path(__file__).parents[2] / "examples" / "numba_compressor.py"


def test_kernels_give_what_the_array_code_gives():
    done = subprocess.run(
        [sys.executable, str(EXAMPLE), "--simulate"],
        env=os.environ | {"NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the kernels give what the array code gives") == 3


def test_the_plugin_conforms(monkeypatch):
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    spec = importlib.util.spec_from_file_location("numba_compressor", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "numba_compressor", module)  # pickles name it
    spec.loader.exec_module(module)
    check_compressor(module.BlockInt8())
