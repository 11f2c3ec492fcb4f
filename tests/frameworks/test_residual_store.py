"""What a rank's compressors remember, as bytes: whose it is, and what is lost on another rank."""

from __future__ import annotations

import io
import json
import warnings

import numpy as np
import pytest

from ringlet.compressors import Router
from ringlet.shared.residual_store import dumps, loads


def stored(spec, **memory):
    return dumps({"w": {"step": 5, **memory}, "b": {}}, 0, 2, 7, Router(spec))


def test_a_rank_gets_back_what_it_stored():
    residual = np.arange(6, dtype=np.float32)
    states, step = loads(stored("int8 | ef", residual=residual), 0, 2, Router("int8 | ef"))
    assert step == 7
    assert states["w"]["step"] == 5
    np.testing.assert_array_equal(states["w"]["residual"], residual)


def test_another_rank_loses_residuals_but_no_steps():
    data = stored("int8 | ef", residual=np.ones(6, np.float32))
    with pytest.warns(UserWarning, match="residuals of rank 0 of 2, this is rank 1 of 2"):
        assert loads(data, 1, 2, Router("int8 | ef")) == ({}, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loads(stored("qsgd"), 1, 2, Router("qsgd")) == ({}, 7)


def test_bytes_of_something_else_are_refused():
    with pytest.raises(ValueError, match="these bytes hold no compressor state"):
        loads(b"PK\3\4 of another", 0, 2, Router("int8 | ef"))


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        {"states": 1},
        {"states": {"w": None}},
        {"states": {"w": {"step": "5"}}},
        {"states": {"w": {"residual": {"ringlet.array": "array7"}}}},
        {"states": {"w": {"residual": {"ringlet.array": []}}}},
        {"states": {"w": {"ringlet.array": "array0"}}},
        {"specs": None},
        {"specs": {"w": ["int8 | ef"]}},
        {"step": None},
        {"step": 1e400},
    ],
)
def test_a_record_of_something_else_is_refused(wrong):
    with np.load(io.BytesIO(stored("int8 | ef", residual=np.ones(6, np.float32)))) as archive:
        arrays = dict(archive)
    head = json.loads(arrays.pop("head").tobytes())
    said = json.dumps(wrong if wrong == [] else head | wrong).encode()
    stream = io.BytesIO()
    np.savez(stream, head=np.frombuffer(said, np.uint8), **arrays)
    with pytest.raises(ValueError, match="these bytes hold no compressor state"):
        loads(stream.getvalue(), 0, 2, Router("int8 | ef"))
