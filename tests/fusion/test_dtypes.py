"""Operations and dtypes: a right result, or an error for whoever asks; never the engine's end."""

import sys
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
from engines import with_engines

import ringlet
from ringlet.compressors import parse
from ringlet.fusion import Request
from ringlet.ring import Mismatch, ReduceOp

sys.path.insert(0, str(Path(__file__).parent))
import table_dtypes

pytestmark = pytest.mark.preloaded("torch")


def test_the_table_on_in_process_ranks():
    for wrong in with_engines(3, table_dtypes.play_all):
        assert wrong == []


@pytest.mark.parametrize("transport", ["gloo", pytest.param("mpi", marks=pytest.mark.mpi)])
def test_the_table_between_processes(transport):
    cloudpickle.register_pickle_by_value(table_dtypes)
    for wrong in ringlet.run(table_dtypes.play_in_job, np=2, transport=transport):
        assert wrong == []


@pytest.mark.parametrize("kind", table_dtypes.REDUCTIONS)
@pytest.mark.parametrize(
    ("dtype", "value"),
    [("float16", 60000), ("int8", -100), ("uint8", 250), ("int16", 30000), ("uint16", 65000)],
)
@pytest.mark.parametrize("rows", [4, 50_000])
def test_means_do_not_overflow_where_sums_do(kind, dtype, value, rows):
    def body(engine):
        request = Request("x", kind, dtype, (rows,), ReduceOp.AVERAGE)
        return engine.submit(request, np.full(rows, value, dtype)).wait(60)

    for got in with_engines(3, body):
        assert (np.abs(got.astype(np.float64) - value) <= abs(value) * 1e-3).all()
        assert got.dtype == dtype


@pytest.mark.parametrize("rows", [4, 50_000])
def test_members_of_a_bucket_are_averaged_without_overflow(rows):
    def body(engine):
        requests = [Request(n, dtype="int8", shape=(rows,)) for n in "abc"]
        group = engine.declare("g", requests, [parse("none")] * 3, [{}, {}, {}])
        arrays = [np.full(rows, value, np.int8) for value in (-100, 100, 127)]
        for request, array in zip(requests, arrays, strict=True):
            group.submit(request.name, array)
        group.wait(60)
        return [set(array.tolist()) for array in arrays]

    assert with_engines(3, body) == [[{-100}, {100}, {127}]] * 3


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64", "int8", "int64"])
@pytest.mark.parametrize("op", [ReduceOp.AVERAGE, ReduceOp.SUM, ReduceOp.MAX])
def test_members_that_end_within_and_between_spans_are_whole(monkeypatch, dtype, op):
    monkeypatch.setattr("ringlet.fusion.buckets.plain.SPAN", 64)
    sizes = [3, 61, 1, 200, 16, 16, 5, 0, 33]

    def body(engine):
        requests = [Request(f"m{i}", dtype=dtype, shape=(n,), op=op) for i, n in enumerate(sizes)]
        group = engine.declare("g", requests, [parse("none")] * len(sizes), [{} for _ in sizes])
        arrays = [(np.arange(n) % 20 * (engine.rank + 1)).astype(dtype) for n in sizes]
        for request, array in zip(requests, arrays, strict=True):
            group.submit(request.name, array)
        group.wait(60)
        alone = (np.arange(500) % 20 * (engine.rank + 1)).astype(dtype)
        engine.submit(Request("alone", dtype=dtype, shape=(500,), op=op), alone).wait(60)
        return [*arrays, alone]

    def expected(n):
        x = np.arange(n) % 20
        return {ReduceOp.AVERAGE: x * 6 / 3, ReduceOp.SUM: x * 6, ReduceOp.MAX: x * 3}[op]

    for got in with_engines(3, body):
        for array, n in zip(got, [*sizes, 500], strict=True):
            assert np.allclose(array, expected(n).astype(dtype), rtol=1e-3)


REFUSED = [
    (Request("x", "sum", shape=(4,)), ValueError, "'sum' of 'x' is none of allreduce"),
    (Request("x", "broadcast", shape=(4,), root=2), ValueError, "the root is below 2, not 2"),
    (Request("x", "broadcast", shape=(4,), root=-1), ValueError, "the root is below 2, not -1"),
    (Request("x", "reducescatter"), ValueError, "without dimensions has no rows"),
    (Request("x", "alltoall", shape=(4,)), ValueError, r"splits \[\] do not divide 4 rows"),
    (Request("x", "alltoall", splits=(0, 0, 0)), ValueError, "over 2 ranks"),
    (Request("x", "alltoall", shape=(1,), splits=(2, -1)), ValueError, "do not divide 1 rows"),
    (Request("x", shape=(4,), op=7), TypeError, "op is a ReduceOp, not 7"),
    (Request("x", "broadcast", shape=(4,), op=7), TypeError, "op is a ReduceOp, not 7"),
    (Request("x", shape=(-1, -4)), ValueError, "negative"),
    (Request("\ud800", shape=(4,)), ValueError, "name"),
]


@pytest.mark.parametrize(
    ("request_", "kind", "said"), REFUSED, ids=lambda v: getattr(v, "kind", "")
)
def test_what_cannot_be_done_is_refused_to_the_rank_that_asks(request_, kind, said):
    def body(engine):
        with pytest.raises(kind, match=said):
            engine.submit(request_, np.ones(4, np.float32))
        with pytest.raises(kind, match=said):
            engine.submit_all([(request_, np.ones(4, np.float32), None, None)])
        return engine.submit(Request("x", shape=(4,)), np.ones(4, np.float32)).wait(60).sum()

    assert with_engines(2, body) == [4.0, 4.0]


@pytest.mark.parametrize(
    ("request_", "said"),
    [
        (Request("x", dtype="int32", shape=(4,), op=ReduceOp.ADASUM), "Adasum takes float16"),
        (Request("x", dtype="bool", shape=(4,)), "booleans have no average"),
        (Request("x", "allgather", shape=(4,)), "only allreduces are declared"),
        (Request("x", dtype="complex64", shape=(4,)), "'complex64' cannot travel"),
    ],
    ids=["adasum", "bool", "kind", "complex"],
)
def test_what_cannot_be_done_is_not_declared(request_, said):
    def body(engine):
        with pytest.raises((TypeError, ValueError), match=said):
            engine.declare("g", [request_], [parse("none")], [{}])
        return engine.submit(Request("x", shape=(4,)), np.ones(4, np.float32)).wait(60).sum()

    assert with_engines(2, body) == [4.0, 4.0]


def test_numbers_of_numpy_are_numbers():
    def body(engine):
        numbers = {"process_set": np.int64(0), "group": "g", "group_size": np.int64(1)}
        request = Request("x", shape=(np.int64(4),), op=ReduceOp.SUM, **numbers)
        return engine.submit(request, np.ones(4, np.float32)).wait(60).tolist()

    assert with_engines(2, body) == [[2.0] * 4] * 2


def test_read_only_values_have_a_result_of_their_own():
    def body(engine):
        values = np.frombuffer(np.ones(4, np.float32).tobytes(), np.float32)
        request = Request("x", shape=(4,), op=ReduceOp.SUM)
        added = engine.submit(request, values, np.empty(4, np.float32)).wait(60).tolist()
        rows = engine.submit(Request("y", "allgather", shape=(4,)), values).wait(60).tolist()
        return added, rows

    assert with_engines(2, body) == [([2.0] * 4, [1.0] * 8)] * 2


def test_ranks_whose_peer_was_refused_learn_of_it_when_that_asks_for_something_else():
    def body(engine):
        def ask(dtype, op):
            request = Request("x", dtype=dtype, shape=(4,), op=op)
            return engine.submit(request, np.ones(4, dtype))

        if engine.rank == 0:
            with pytest.raises(TypeError, match=r"Adasum takes .* not 'int32'"):
                ask("int32", ReduceOp.ADASUM)
        handle = ask("float32", ReduceOp.ADASUM if engine.rank else ReduceOp.SUM)
        with pytest.raises(Mismatch, match="reduce ops differ") as caught:
            handle.wait(60)
        return str(caught.value)

    assert len(set(with_engines(2, body))) == 1


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (np.ones(5, np.float32), ValueError),
        (np.ones((2, 2), np.float32), ValueError),
        (np.ones(4, np.float64), TypeError),
        (np.ones(4, np.complex64), TypeError),
        (np.ones(8, np.float32)[::2], ValueError),
        (np.broadcast_to(np.float32(1), (4,)).view(), ValueError),
        (np.frombuffer(bytes(16), np.float32), ValueError),
    ],
    ids=["longer", "not flat", "wider", "complex", "strided", "one for all", "read only"],
)
def test_values_that_are_not_the_request_s_are_refused(values, kind):
    def body(engine):
        request = Request("x", shape=(4,))
        group = engine.declare("g", [Request("w", shape=(4,))], [parse("none")], [{}])
        with pytest.raises(kind, match="float32"):
            engine.submit(request, values)
        with pytest.raises(kind, match="float32"):
            engine.submit_all([(request, values, None, None)])
        if values.ndim == 1:
            with pytest.raises(kind, match="'w'"):
                group.submit("w", values)
        group.submit("w", np.ones(4, np.float32))
        group.wait(60)

    with_engines(2, body)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
@pytest.mark.parametrize("spec", ["topk(ratio=0.1) | ef21", "int8 | ef21", "natural | ef21"])
def test_a_result_that_is_added_up_is_rounded_behind_that(spec, dtype):
    """The mean of all ranks' g is known on each of them: to rounding once, not in each step."""
    shapes = {"a": 3000, "b": 2000}

    def body(engine):
        requests = [Request(n, dtype=dtype, shape=(size,)) for n, size in shapes.items()]
        states = [{}, {}]
        group = engine.declare("g", requests, [parse(spec)] * 2, states)
        for step in range(30):
            for name, size in shapes.items():
                noise = np.random.default_rng([step, engine.rank, size]).normal(size=size)
                wide = (np.random.default_rng(size).normal(size=size) + noise).astype(np.float32)
                array = wide.astype(np.float16) if dtype == "float16" else wide
                if dtype == "bfloat16":
                    array = (wide.view(np.uint32) >> 16).astype(np.uint16)
                group.submit(name, array)
            group.wait(60)
        return [(state["worker"].copy(), state["server"].copy()) for state in states]

    found = with_engines(2, body)
    for (mine, server), (theirs, same) in zip(*found, strict=True):
        assert np.array_equal(server, same)
        mean = (mine + theirs) / 2
        assert np.linalg.norm(server - mean) < 1e-5 * np.linalg.norm(mean)
