"""Small matrices of a bucket exchange together: results are those that each has alone."""

import numpy as np
import pytest
from engines import with_engines

from ringlet.compressors import parse
from ringlet.fusion import CompressionFailed, EngineClosed, Request
from ringlet.fusion.codecs.small_exchanges import SmallExchanges
from ringlet.ring.communicator import ReduceOp

SPECS = ["powersgd", "powersgd(rank=3) | ef", "acpsgd | ef", "shared_int(stochastic=True) | ef"]
SHAPES = [(64, 36), (2070,), (33, 9, 5), (600, 200), (17, 1300), (5,), (80, 80)]


def gradient(rank, step, i):
    n = int(np.prod(SHAPES[i]))
    return np.random.default_rng([rank, step, i]).standard_normal(n).astype(np.float32)


def declare(engine, spec, **asked):
    requests = [Request(f"w{i}", shape=s, spec=spec, **asked) for i, s in enumerate(SHAPES)]
    states = [{} for _ in requests]
    return engine.declare("g", requests, [parse(spec)] * len(requests), states), states


def trained(spec, spoiled=2, **asked):
    """Return, of each of three ranks, the results of some steps and what is remembered."""

    def body(engine):
        group, states = declare(engine, spec, **asked)
        found = []
        for step in range(4):
            arrays = [gradient(engine.rank, step, i) for i in range(len(SHAPES))]
            if step == spoiled and engine.rank == 1:
                arrays[2][4] = np.nan
            for i, array in enumerate(arrays):
                group.submit(f"w{i}", array)
            group.wait(60)
            found += [array.tobytes() for array in arrays]
        held = [np.asarray(state[key]).tobytes() for state in states for key in sorted(state)]
        return found, held

    return with_engines(3, body)


@pytest.fixture
def taken(monkeypatch):
    """Note how many members exchanged together, in each step of a rank."""
    counts, begin = [], SmallExchanges.begin

    def noted(self):
        begin(self)
        counts.append(len(self.members))

    monkeypatch.setattr(SmallExchanges, "begin", noted)
    return counts


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("op", [ReduceOp.AVERAGE, ReduceOp.SUM])
def test_results_are_those_of_each_member_alone(monkeypatch, taken, spec, op):
    together = trained(spec, op=op)
    assert len(taken) == 3 * 4
    assert set(taken) == {5 if "shared_int" in spec else 4}
    assert len({tuple(found) for found, _ in together}) == 1
    monkeypatch.setattr(SmallExchanges, "of", lambda members: None)
    assert trained(spec, op=op) == together


@pytest.mark.parametrize("spec", SPECS)
def test_ranks_agree_where_one_exchanges_member_by_member(monkeypatch, spec):
    usual, of = trained(spec), SmallExchanges.of
    monkeypatch.setattr(SmallExchanges, "of", lambda m: None if m[0].rank == 1 else of(m))
    assert trained(spec) == usual


def test_scaled_gradients_exchange_one_by_one_and_are_scaled(taken):
    halved = trained("powersgd", prescale=0.5)
    assert not taken
    for (found, _), (usual, _) in zip(halved, trained("powersgd"), strict=True):
        for one, other in zip(found[:7], usual[:7], strict=True):
            one, other = np.frombuffer(one, np.float32), np.frombuffer(other, np.float32)
            assert np.allclose(one, other / 2, atol=1e-6)


def test_a_step_that_one_rank_cannot_begin_is_given_up_by_all_and_made_again(monkeypatch, taken):
    begin, failing = SmallExchanges.begin, []

    def fails(self):
        begin(self)
        if self._all[0].rank in failing:
            raise ArithmeticError("first")

    monkeypatch.setattr(SmallExchanges, "begin", fails)

    def body(engine):
        group, _ = declare(engine, "powersgd | ef")
        results = []
        for step in range(3):
            arrays = [gradient(engine.rank, step, i) for i in range(len(SHAPES))]
            if step == 1:
                engine.submit(Request("before"), np.zeros(1, np.float32)).wait(60)
                failing.append(1)
                for i, array in enumerate(arrays):
                    group.submit(f"w{i}", array.copy())
                with pytest.raises(CompressionFailed, match="first"):
                    group.wait(60)
                engine.submit(Request("after"), np.zeros(1, np.float32)).wait(60)
                failing.clear()
                engine.submit(Request("again"), np.zeros(1, np.float32)).wait(60)
            for i, array in enumerate(arrays):
                group.submit(f"w{i}", array)
            group.wait(60)
            results.append([array.tobytes() for array in arrays])
        return results

    found = with_engines(3, body)
    monkeypatch.setattr(SmallExchanges, "begin", begin)
    usual = [found for found, _ in trained("powersgd | ef", spoiled=None)]
    for rank in range(3):
        assert [b for step in found[rank] for b in step] == usual[rank][: 3 * len(SHAPES)]


def test_what_fails_behind_the_vote_ends_the_engine_everywhere(monkeypatch):
    """Nobody votes behind the first round: the others are told by another way, and do not wait."""
    resume, failing = SmallExchanges._next, []

    def fails(self):
        if self._all[0].rank in failing:
            raise ArithmeticError("last")
        return resume(self)

    monkeypatch.setattr(SmallExchanges, "_next", fails)

    def body(engine):
        group, _ = declare(engine, "powersgd")

        def step():
            for i in range(len(SHAPES)):
                group.submit(f"w{i}", gradient(engine.rank, 0, i))
            group.wait(60)

        step()
        engine.submit(Request("all are done"), np.zeros(1, np.float32)).wait(60)
        failing.append(1)
        with pytest.raises(EngineClosed) as caught:
            step()
        return str(caught.value)

    (text,) = set(with_engines(3, body))
    assert "broke on rank 1: " in text
    assert "compressor 'powersgd' failed in exchange of tensors 'w6', 'w4', 'w2' and 1 more" in text
    assert "ArithmeticError: last" in text
