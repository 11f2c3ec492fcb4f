"""The examples that follow docs/own-compressor.md word for word are what they claim to be."""

import dataclasses
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from ringlet.compressors import Context, Traits, parse
from ringlet.compressors.states import fit, rescale
from ringlet.compressors.testing import check_compressor, simulate

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))

from written_compressors import SketchFeedback

PAGE = (Path(__file__).parents[2] / "docs" / "own-compressor.md").read_text()
WRITTEN = [f"written_compressors:{name}" for name in ("LogQuantiser", "CountSketch", "DeltaTopK")]
BEHIND = [
    "written_compressors:LogQuantiser | hadamard",
    "written_compressors:DeltaTopK | int8",
    "written_compressors:CountSketch | shared_int | ef",
    "written_compressors:SketchFeedback",
    "written_compressors:SketchFeedback | shared_int",
]


@pytest.mark.parametrize("spec", [*WRITTEN, *BEHIND, *(f"{spec} | ef" for spec in WRITTEN)])
def test_conformance(spec):
    check_compressor(spec)


def test_the_page_names_every_trait():
    for field in dataclasses.fields(Traits):
        assert f"| `{field.name}=" in PAGE


def test_what_the_page_has_as_a_whole_is_what_it_claims_to_be(tmp_path, monkeypatch):
    found = re.findall(r"```python\n(class .*?)```", PAGE, re.DOTALL)
    names = "Compressor, Modifier, Round, Traits, option"
    (tmp_path / "on_the_page.py").write_text(
        f"import dataclasses\n\nfrom ringlet.compressors import {names}\n\n\n" + "\n\n".join(found)
    )
    monkeypatch.syspath_prepend(tmp_path)
    (name,) = re.findall(r"class (\w+)\(Compressor\)", "".join(found))
    for behind in ("", " | ef", " | shared_int | ef", "(ratio=1)", "(ratio=0.001) | ef"):
        check_compressor(f"on_the_page:{name}{behind}")
    (name,) = re.findall(r"class (\w+)\(Modifier\)", "".join(found))
    for spec in ("none | {}", "int4 | {} | ef", "topk | {} | int8 | ef"):
        check_compressor(spec.format(f"on_the_page:{name}"))


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
