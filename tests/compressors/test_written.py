"""The examples that follow "Writing one" word for word are what they claim to be."""

import sys
from pathlib import Path

import numpy as np
import pytest

from ringlet.compressors import Context, parse
from ringlet.compressors.states import fit, rescale
from ringlet.compressors.testing import parametrize_with_checks, simulate

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from written_compressors import SketchFeedback

WRITTEN = [f"written_compressors:{name}" for name in ("LogQuantiser", "CountSketch", "DeltaTopK")]
BEHIND = [
    "written_compressors:LogQuantiser | hadamard",
    "written_compressors:DeltaTopK | int8",
    "written_compressors:CountSketch | shared_int | ef",
    "written_compressors:SketchFeedback",
    "written_compressors:SketchFeedback | shared_int",
]


@parametrize_with_checks([*WRITTEN, *BEHIND, *(f"{spec} | ef" for spec in WRITTEN)])
def test_conformance(compressor, check):
    check(compressor)


@pytest.mark.parametrize("spec", WRITTEN)
def test_what_stands_out_arrives(spec):
    x = np.random.default_rng(0).standard_normal(5000).astype(np.float32)
    x[[3, 4321]] = 100, -200
    for out in simulate(parse(spec), [x, x]):
        assert np.allclose(out[[3, 4321]], [100, -200], rtol=0.5)


def test_what_is_not_taken_out_stays_in_the_sum_of_sketches():
    compressor, rng = SketchFeedback(), np.random.default_rng(0)
    states, given, sent = [{}, {}], np.zeros(3000), np.zeros(3000)
    for step in range(20):
        gradients = [rng.standard_normal(3000).astype(np.float32) for _ in range(2)]
        sent += simulate(compressor, gradients, states, step)[0]
        given += np.mean(gradients, axis=0)
    ctx = Context(shape=(3000,), numel=3000)
    hashes = compressor.hashes(3000, ctx)
    lost = compressor.sketch((given - sent).astype(np.float32), *hashes, ctx)
    for state in states:
        np.testing.assert_allclose(state["kept"], lost, atol=1e-3)
    assert 0.1 < np.abs(lost).max() < 100


def test_a_sketch_is_rescaled_and_kept_where_a_tensor_is():
    compressor, states = SketchFeedback(), [{}]
    x = np.random.default_rng(0).standard_normal(3000).astype(np.float32)
    simulate(compressor, [x], states)
    before = states[0]["kept"].copy()
    rescale(states[0], compressor, 8.0)
    np.testing.assert_array_equal(states[0]["kept"], 8 * before)
    assert fit(states[0], str(compressor), compressor, 3000, 1) == []
    assert "kept" in states[0]
    assert "is forgotten" in fit(states[0], str(compressor), compressor, 2000, 1)[0]
    assert "kept" not in states[0]
