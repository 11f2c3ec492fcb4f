"""A bit that flips in what a sum gives one rank: every rank is told, a step later at most."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ringlet.compressors import parse
from ringlet.fusion import Engine, EngineClosed, Limits, Request
from ringlet.ring import Mismatch
from ringlet.ring.collectives.checksum import SPAN, WHOLE, digest, is_due, turn_of
from ringlet.ring.communicator import Topology
from ringlet.ring.control.opening import open_control
from ringlet.ring.transports.hierarchical import HierarchicalCommunicator
from ringlet.ring.transports.local import LocalCommunicator, run_local

WAIT = 30
N = 5000
SPECS = ["none", "fp16", "bf16", "powersgd", "shared_int", "randomk"]


@pytest.fixture
def flips(monkeypatch):
    """Return a dict: while "armed" is true, a bit flips in what rank 1's next collective gives."""
    state = {"armed": False}

    def flipping(method):
        def call(self, *args):
            method(self, *args)
            received = args[1] if method.__name__ == "_allgather" else args[0]
            if state["armed"] and self.rank == 1 and received.nbytes >= 100:
                state["armed"] = False
                received.view(np.uint8)[received.nbytes // 2] ^= 0x10

        return call

    for name in ("_allreduce", "_allgather", "_broadcast"):
        monkeypatch.setattr(LocalCommunicator, name, flipping(getattr(LocalCommunicator, name)))
    return state


def with_engines(size, body, two_levels=False, **limits):
    def rank_main(comm):
        if two_levels:
            comm = HierarchicalCommunicator(comm, Topology.from_hosts(comm.rank, list("aabb")))
        engine = Engine(comm, open_control, Limits(**limits))
        try:
            return body(engine)
        finally:
            engine.shutdown()

    return run_local(rank_main, size)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("big", [False, True])
def test_a_declared_step_is_compared_with_the_next_vote(flips, spec, dtype, big):
    def body(engine):
        n = 40 * N if big else N
        request = Request("w", dtype=dtype, shape=(n // 50, 50), spec=spec)
        group = engine.declare("model", [request], [parse(spec)], [{}])
        errors = []
        for step in range(4):
            x = np.linspace(-1, 1, n).astype(dtype) * (engine.rank + 1)
            ready = engine.submit(Request("ready", "barrier"), np.empty(0, np.float32))
            ready.wait(WAIT)
            if engine.rank == 1 and step == 1:
                flips["armed"] = True
            group.submit("w", x)
            try:
                group.wait(WAIT)
            except Exception as error:
                errors.append((step, type(error).__name__, str(error)))
        return errors

    told = with_engines(2, body)
    assert told[0] == told[1]
    assert [error[:2] for error in told[0]] == [(2, "Mismatch"), (3, "Mismatch")]
    assert "sums of the step before differ between ranks (rank 0: " in told[0][0][2]
    assert "replicas may differ; restore the last checkpoint" in told[0][0][2]


@pytest.mark.parametrize("kind", ["allreduce", "broadcast", "allgather", "fp16"])
def test_what_was_submitted_alone_is_compared_with_what_comes_next(flips, kind):
    def body(engine):
        spec = "fp16" if kind == "fp16" else "none"
        request = Request("w", "allreduce" if spec != "none" else kind, shape=(N,), spec=spec)
        for step in range(6):
            if engine.rank == 1 and step == 2:
                flips["armed"] = True
            x = np.ones(N, np.float32)
            engine.submit(request, x, None, parse(spec)).wait(WAIT)

    def fails(engine):
        with pytest.raises(EngineClosed) as caught:
            body(engine)
        return str(caught.value)

    for text in with_engines(2, fails):
        assert "'w', or what was fused with it: results differ between ranks" in text


@pytest.mark.parametrize("spec", ["none", "fp16", "powersgd"])
@pytest.mark.parametrize("declared", [True, False])
def test_of_large_sums_a_share_may_be_compared_in_turn(flips, spec, declared):
    """A bit that flips in every step is found within as many steps; a small sum's at once."""
    n = 1 << 21

    def body(engine):
        request = Request("w", dtype="float32", shape=(n // 64, 64), spec=spec)
        if declared:
            group = engine.declare("model", [request], [parse(spec)], [{}])
        for step in range(12):
            x = np.ones(n, np.float32)
            try:
                ready = engine.submit(Request("ready", "barrier"), np.empty(0, np.float32))
                ready.wait(WAIT)
                if engine.rank == 1:
                    flips["armed"] = True
                if declared:
                    group.submit("w", x)
                    group.wait(WAIT)
                else:
                    engine.submit(request, x, None, parse(spec)).wait(WAIT)
            except (Mismatch, EngineClosed):
                return step
        return None

    first, second = with_engines(2, body, verify_sums=4)
    assert first is not None
    assert second is not None
    assert max(first, second) <= (6 if spec != "powersgd" else 2)


@given(st.integers(1, 20), st.integers(0, 100))
def test_every_span_has_its_turn(share, start):
    nbytes = 3 * WHOLE
    spans = range(nbytes // SPAN)
    for span in spans:
        due = [is_due(span, nbytes, share, start + i) for i in range(share)]
        assert sum(due) == 1
    assert all(is_due(span, WHOLE, share, start) for span in range(4))


@given(st.integers(1, 40), st.integers(1, 7), st.integers(0, 10_000))
def test_batches_at_a_regular_distance_come_to_all_spans(share, distance, first):
    turns = {turn_of(first + distance * i, share) for i in range(16 * share)}
    assert turns == set(range(share))


def test_it_can_be_turned_off(flips):
    def body(engine):
        for step in range(4):
            if engine.rank == 1 and step == 1:
                flips["armed"] = True
            x = np.ones(N, np.float32)
            engine.submit(Request("w", shape=(N,)), x).wait(WAIT)
        return "unaware"

    assert with_engines(2, body, verify_sums=0) == ["unaware"] * 2


@pytest.mark.parametrize("spec", ["none", "int8", "fp16"])
def test_two_levels_are_compared_too(flips, spec):
    def body(engine):
        request = Request("w", shape=(N,), spec=spec)
        group = engine.declare("model", [request], [parse(spec)], [{}])
        for step in range(3):
            engine.submit(Request("ready", "barrier"), np.empty(0, np.float32)).wait(WAIT)
            if engine.rank == 1 and step == 1:
                flips["armed"] = True
            group.submit("w", np.ones(N, np.float32))
            group.wait(WAIT)

    def fails(engine):
        with pytest.raises((Mismatch, EngineClosed)):
            body(engine)
        return True

    assert all(with_engines(4, fails, two_levels=True))


FLOATS = {"float16": "uint16", "float32": "uint32", "float64": "uint64"}


@given(st.data(), st.sampled_from(sorted(FLOATS)), st.integers(1, 300), st.booleans())
def test_a_digest_depends_on_every_bit_but_not_on_kinds_of_nan_and_zero(data, dtype, n, one_zero):
    x = data.draw(hnp.arrays(dtype, n, elements=hnp.from_dtype(np.dtype(dtype))))
    same = np.where(np.isnan(x), np.array(np.nan, dtype), x)
    if one_zero:
        same = np.where(same == 0, np.array(-0.0, dtype), same).astype(dtype)
    told = digest(x, one_zero=one_zero)
    assert told == digest(same, one_zero=one_zero)
    i = data.draw(st.integers(0, n - 1))
    bit = data.draw(st.integers(0, 8 * x.itemsize - 1))
    other = x.copy()
    other.view(FLOATS[dtype])[i] ^= np.array(1, FLOATS[dtype]) << np.array(bit, FLOATS[dtype])
    if not np.array_equal(x, other, equal_nan=True):
        assert told != digest(other, one_zero=one_zero)
    elif one_zero or np.isnan(x[i]):
        assert told == digest(other, one_zero=one_zero)


@pytest.mark.parametrize("n", [1, 4096, 4097, 70_001])
@pytest.mark.parametrize("dtype", sorted(FLOATS))
def test_a_nan_is_one_nan_wherever_it_lies(dtype, n):
    x = np.random.default_rng(n).standard_normal(n).astype(dtype)
    clean = digest(x)
    for i in {0, n // 2, n - 1}:
        nan, other = x.copy(), x.copy()
        nan[i], other[i] = np.nan, -np.nan
        other.view(FLOATS[dtype])[i] |= 1
        assert digest(nan) == digest(other) != clean
        infinite = x.copy()
        infinite[i] = np.inf
        assert len({digest(nan), digest(infinite), clean, digest(-infinite)}) == 4


@given(hnp.arrays("uint16", 50), st.integers(0, 49))
def test_bfloat16_is_told_by_its_name(x, i):
    nan = x.copy()
    nan[i] = 0x7FC1
    other = nan.copy()
    other[i] = 0xFFFF
    assert digest(nan, "bfloat16") == digest(other, "bfloat16")
    assert digest(nan) != digest(other)
