"""One semantics: payloads and results have the same bits, whoever hands the gradients in.

The same gradients go, under the same names, through each framework's own way of reducing, over
several transports, fusion thresholds, bucket sizes and numbers of streams. As a program this file
prints the matrix of hashes; with --write it also puts them on record. tests/mxnet has MXNet's.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))

import pytest
from semantics_cases import (
    DECODED,
    ONLY,
    RECORD,
    SETTINGS,
    SHAPES,
    SIZE,
    SPECS,
    STEPS,
    SUMMED,
    complaint,
    gradients,
    hash_of_results,
)
from semantics_job import Matrix, cells, table

from ringlet.compressors.core.payload import WIRE_VERSION

pytestmark = pytest.mark.preloaded("tensorflow")

FRAMEWORKS = ("torch", "ddp", "fsdp2", "tensorflow", "keras", "jax")
TWO_STAGES = [name for name in FRAMEWORKS if name != "fsdp2"]


@pytest.fixture(scope="module")
def matrix():
    """The jobs run one after the other, as tests ask for them; what they told is printed."""
    found = Matrix(FRAMEWORKS)
    yield found
    print(table(found))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("spec", SPECS)
def test_payloads_are_those_on_record(matrix, spec, setting):
    sent = {sent for sent, _ in cells(matrix[setting], spec, FRAMEWORKS)}
    told = complaint("payloads", spec, sent, WIRE_VERSION)
    assert told is None, f"{told}\n{table(matrix)}"


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("spec", DECODED)
def test_results_of_what_is_decoded_are_those_on_record(matrix, spec, setting):
    results = {result for _, result in cells(matrix[setting], spec, TWO_STAGES)}
    told = complaint("results", spec, results, WIRE_VERSION)
    assert told is None, f"{told}\n{table(matrix)}"


@pytest.mark.parametrize("setting", [name for name in SETTINGS if name != "local"])
@pytest.mark.parametrize("spec", ONLY["fsdp2"])
def test_fsdp2_has_the_mean_of_what_payloads_stand_for(matrix, spec, setting):
    """Not of a second stage's, which the engine's scatter-reduce has. FSDP divides by itself."""
    import numpy as np

    from ringlet.compressors import parse
    from ringlet.compressors.testing.tools.simulate import context, decode, encode
    from ringlet.fusion.planning.strategy import effective

    states, steps = {}, []
    for step in range(STEPS):
        every, reduced = [gradients(rank, step) for rank in range(SIZE)], {}
        for name in SHAPES:
            flat = [each[name].reshape(-1) for each in every]
            held = states.setdefault(name, [{} for _ in range(SIZE)])
            used = effective(parse(spec), "float32", flat[0].size)
            contexts = [context(x, held[rank], step=step) for rank, x in enumerate(flat)]
            sent = [encode(used, x, ctx) for x, ctx in zip(flat, contexts, strict=True)]
            total = decode(used, sent[0], flat[0].size, contexts[0])
            for payload in sent[1:]:
                used.accumulate(payload, total, contexts[0])
            reduced[name] = total / np.float32(SIZE)
        steps.append(reduced)
    ((_, found),) = cells(matrix[setting], spec, ["fsdp2"])
    assert found == hash_of_results(steps), table(matrix)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("spec", SUMMED)
def test_sums_on_the_wire_are_the_same_in_every_framework(matrix, spec, setting):
    results = {result for _, result in cells(matrix[setting], spec, FRAMEWORKS)}
    assert len(results) == 1, table(matrix)


def test_hashes_that_change_without_the_version_are_found(monkeypatch, tmp_path):
    record = tmp_path / "record.json"
    record.write_text(json.dumps({"version": 7, "payloads": {"int8": "a"}, "results": {}}))
    monkeypatch.setattr("semantics_cases.RECORD", record)
    assert complaint("payloads", "int8", {"a"}, 7) is None
    assert "not those on record" in complaint("payloads", "int8", {"b"}, 7)
    assert "differ: ['a', 'b']" in complaint("payloads", "int8", {"a", "b"}, 7)
    assert "on record are of wire version 7, WIRE_VERSION is 8" in complaint("x", "int8", {"a"}, 8)


def write(matrix):
    """Put a matrix's hashes on record, unless its columns differ."""
    made = {"version": WIRE_VERSION, "payloads": {}, "results": {}}
    for spec in SPECS:
        jobs = matrix.values()
        (made["payloads"][spec],) = {s for job in jobs for s, _ in cells(job, spec, FRAMEWORKS)}
        if spec in DECODED:
            (made["results"][spec],) = {r for job in jobs for _, r in cells(job, spec, TWO_STAGES)}
    RECORD.write_text(json.dumps(made, indent=1) + "\n")


if __name__ == "__main__":
    found = Matrix(FRAMEWORKS).whole()
    print(table(found))
    if "--write" in sys.argv:
        write(found)
