"""What a rank's compressors remember, as bytes: whose it is, and what is lost on another rank."""

from __future__ import annotations

import io
import json
import warnings

import numpy as np
import pytest

from ringlet.compressors import Router, parse
from ringlet.fusion import Engine, Limits, Request
from ringlet.ring import Topology
from ringlet.ring.control.opening import open_control
from ringlet.ring.transports.hierarchical import two_levels
from ringlet.ring.transports.local import run_local
from ringlet.shared.gradients.gradient_settings import Slot
from ringlet.shared.gradients.pending_passes import Pending, read_pending
from ringlet.shared.residual_store import dumps, loads


def stored(spec, **memory):
    return dumps({"w": {"step": 5, **memory}, "b": {}}, 0, 2, 7, Router(spec))


def test_a_rank_gets_back_what_it_stored():
    residual = np.arange(6, dtype=np.float32)
    states, step = loads(stored("int8 | ef", residual=residual), 0, 2, Router("int8 | ef"))
    assert step == 7
    assert states["w"]["step"] == 5
    np.testing.assert_array_equal(states["w"]["residual"], residual)


@pytest.mark.parametrize(("spec", "share"), [("topk | ef", 1.0), ("fp16 | ef", 1 / 2)])
def test_a_rank_gets_back_what_it_owes_whatever_divides_gradients_now(spec, share):
    """A predivide factor, or the 2 ranks of 3 that reduce, where a spec divides by them first."""
    states = {"w": {"step": 5, "residual": np.ones(6, np.float32)}}
    data = dumps(states, 1, 3, 7, Router("topk | ef"), 4.0)
    found, _ = loads(data, 1, 3, Router(spec), predivide=0.5, among=2)
    assert found["w"]["residual"].tolist() == [8 * share] * 6
    again = dumps(found, 1, 3, 7, Router(spec), 0.5)
    found, _ = loads(again, 1, 3, Router("topk | ef"), predivide=4.0, among=2)
    assert found["w"]["residual"].tolist() == [1] * 6


def test_what_is_of_another_op_is_forgotten_with_a_warning():
    """Such as the means that EF21's ranks have in common, where sums are reduced now."""
    states = {"w": {"step": 5, "server": np.ones(6, np.float32)}, "b": {}}
    data, router = (
        dumps(states, 0, 2, 7, Router("int8 | ef21"), op="Average"),
        Router("int8 | ef21"),
    )
    with pytest.warns(UserWarning, match="that were reduced by Average, not by Sum"):
        assert loads(data, 0, 2, router, False, op="Sum") == ({"w": {"step": 5}}, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for op, given in (("Average", data), ("", data), ("Sum", stored("int8 | ef21"))):
            assert "w" in loads(given, 0, 2, router, op=op)[0]


def test_another_rank_loses_residuals_but_no_steps():
    data = stored("int8 | ef", residual=np.ones(6, np.float32))
    with pytest.warns(UserWarning, match="residuals of rank 0 of 2, this is rank 1 of 2"):
        assert loads(data, 1, 2, Router("int8 | ef")) == ({}, 7)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loads(stored("qsgd"), 1, 2, Router("qsgd")) == ({}, 7)


@pytest.mark.parametrize("levels", [1, 2])
def test_compressors_that_remember_nothing_lose_nothing(levels):
    def rank_main(comm):
        topology = Topology.from_hosts(comm.rank, ["a", "a", "b", "b"])
        engine = Engine(two_levels(comm, topology) if levels == 2 else comm, open_control, Limits())
        try:
            state, request = {}, Request("w", shape=(6000,), spec="int8")
            group = engine.declare("model", [request], [parse("int8")], [state])
            group.submit("w", np.ones(6000, np.float32))
            group.wait(60)
            return state
        finally:
            engine.shutdown()

    for state in run_local(rank_main, 4):
        assert state == {"step": 1}
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            data = dumps({"w": state}, 0, 4, 1, Router("int8"))
            assert loads(data, 1, 2, Router("int8")) == ({}, 1)


def test_empty_dicts_of_older_files_are_nothing_to_lose():
    held = {"stage2.0": {}, "stage2.1536": {"step": 2}, "shard.0": {"stage2.0": {}}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert loads(stored("int8", **held), 1, 2, Router("int8")) == ({}, 7)
        states, _ = loads(stored("int8", **held), 0, 2, Router("int4"))
        assert states["w"] == {"step": 5}
    held["stage2.0"]["residual"] = np.ones(9, np.float32)
    with pytest.warns(UserWarning, match="residuals of rank 0 of 2"):
        loads(stored("int8 | ef", **held), 1, 2, Router("int8 | ef"))


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


ROWS = np.ones((2, 3), np.float32), np.array([4, 0])
SUMS = {
    "w": (Slot("w", "bfloat16", (2,)), (np.ones(2, np.float32),)),
    "table": (Slot("table", "float32", (5, 3), sparse=True), ROWS),
}


def stored_passes(records):
    return dumps({}, 1, 2, 7, Router("none"), passes=records)


def test_passes_since_a_step_come_back_on_their_rank_alone():
    data = stored_passes([Pending(3, 2, SUMS).record(), Pending(3).record()])
    assert loads(data, 1, 2, Router("none")) == ({}, 7)
    found, none = read_pending(data, 1, 2)
    assert (found.passes, found.count, none) == (3, 2, Pending(3))
    for name, (slot, parts) in SUMS.items():
        assert found.sums[name][0] == slot
        assert all(map(np.array_equal, found.sums[name][1], parts))
    with pytest.warns(UserWarning, match="on rank 1 of 2, this is rank 0 of 2: they are forg"):
        assert read_pending(data, 0, 2) == [Pending(3), Pending(3)]
    with np.load(io.BytesIO(data)) as archive:
        head = json.loads(archive["head"].tobytes())
    del head["passes"]  # as of an older Ringlet
    stream = io.BytesIO()
    np.savez(stream, head=np.frombuffer(json.dumps(head).encode(), np.uint8))
    assert read_pending(stream.getvalue(), 1, 2) is None


@pytest.mark.parametrize(
    "wrong",
    [
        3,
        {},
        {"passes": 2, "count": 2, "sums": {}},
        {"passes": 2, "count": True, "sums": {}},
        {"passes": 2, "count": 1, "sums": []},
        *(
            {"passes": 2, "count": 1, "sums": {"w": entry}}
            for entry in (
                {},
                {"dtype": "float32", "shape": [2], "sparse": False, "parts": []},
                {"dtype": "float32", "shape": [2], "sparse": False, "parts": [ROWS[0]]},
                {"dtype": "odd", "shape": [2, 3], "sparse": False, "parts": [ROWS[0]]},
                {"dtype": "float64", "shape": [2, 3], "sparse": False, "parts": [ROWS[0]]},
                {"dtype": "float32", "shape": [4, 3], "sparse": True, "parts": [*ROWS]},
                {"dtype": "float32", "shape": [5, 3], "sparse": 1, "parts": [*ROWS]},
            )
        ),
    ],
)
def test_passes_of_a_damaged_record_are_refused(wrong):
    with pytest.raises(ValueError, match=r"what passes have added up is|holds no compressor state"):
        read_pending(stored_passes([wrong]), 1, 2)
