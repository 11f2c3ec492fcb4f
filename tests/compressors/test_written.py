"""The examples that follow "Writing one" word for word are what they claim to be."""

import sys
from pathlib import Path

import numpy as np
import pytest

from ringlet.compressors import parse
from ringlet.compressors.testing import parametrize_with_checks, simulate

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

WRITTEN = [f"written_compressors:{name}" for name in ("LogQuantiser", "CountSketch", "DeltaTopK")]
BEHIND = ["written_compressors:LogQuantiser | hadamard", "written_compressors:DeltaTopK | int8"]


@parametrize_with_checks([*WRITTEN, *BEHIND, *(f"{spec} | ef" for spec in WRITTEN)])
def test_conformance(compressor, check):
    check(compressor)


@pytest.mark.parametrize("spec", WRITTEN)
def test_what_stands_out_arrives(spec):
    x = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    x[[3, 4321]] = 100, -200
    for out in simulate(parse(spec), [x, x]):
        assert np.allclose(out[[3, 4321]], [100, -200], rtol=0.5)
