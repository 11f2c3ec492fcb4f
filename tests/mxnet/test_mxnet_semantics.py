"""MXNet's columns of the matrix of tests/frameworks/test_one_semantics.py, beside PyTorch's.

As a program this file prints them.
"""

from __future__ import annotations

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.append(str(Path(__file__).parents[1]))

import pytest
from semantics_cases import DECODED, SETTINGS, SPECS, SUMMED, complaint
from semantics_job import Matrix, cells, table

from ringlet.compressors.core.payload import WIRE_VERSION

pytestmark = pytest.mark.preloaded("torch")
FRAMEWORKS = ("torch", "mxnet", "mxnet_module")


@pytest.fixture(scope="module")
def matrix():
    """The jobs run one after the other, as tests ask for them; what they told is printed."""
    found = Matrix(FRAMEWORKS)
    yield found
    print(table(found))


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("spec", SPECS)
def test_payloads_are_those_on_record_of_the_other_frameworks(matrix, spec, setting):
    sent = {sent for sent, _ in cells(matrix[setting], spec, FRAMEWORKS)}
    told = complaint("payloads", spec, sent, WIRE_VERSION)
    assert told is None, f"{told}\n{table(matrix)}"


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("spec", DECODED)
def test_results_are_those_on_record_of_the_other_frameworks(matrix, spec, setting):
    results = {result for _, result in cells(matrix[setting], spec, FRAMEWORKS)}
    told = complaint("results", spec, results, WIRE_VERSION)
    assert told is None, f"{told}\n{table(matrix)}"


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("spec", SUMMED)
def test_sums_on_the_wire_are_those_of_pytorch(matrix, spec, setting):
    results = [result for _, result in cells(matrix[setting], spec, FRAMEWORKS)]
    assert len(results) == 2, table(matrix)
    assert len(set(results)) == 1, table(matrix)


if __name__ == "__main__":
    print(table(Matrix(FRAMEWORKS).whole()))
