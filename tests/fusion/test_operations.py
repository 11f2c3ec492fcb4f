"""Process sets, groups, ranks that join, all-to-all and reduce-scatter, on in-process ranks."""

import threading
import time

import numpy as np
import pytest
from engines import with_engines
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlet.compressors import parse
from ringlet.fusion import Request, StepAbandoned
from ringlet.ring import Mismatch, PeerLost, ReduceOp


def ones(n, value=1.0):
    return np.full(n, value, np.float32)


@given(
    size=st.integers(1, 4),
    splits=st.lists(st.lists(st.integers(0, 5), min_size=4, max_size=4), min_size=4, max_size=4),
    width=st.integers(1, 3),
)
@settings(max_examples=20)
def test_all_to_all_delivers_every_row(size, splits, width):
    def body(engine):
        rows = tuple(splits[engine.rank][:size])
        x = np.arange(sum(rows) * width, dtype=np.float32) + 1000 * engine.rank
        request = Request("x", "alltoall", shape=(sum(rows), width), splits=rows)
        handle = engine.submit(request, x)
        return handle.wait().copy(), handle.sizes

    for rank, (got, sizes) in enumerate(with_engines(size, body)):
        assert list(sizes) == [splits[r][rank] for r in range(size)]
        expected = []
        for r in range(size):
            start = sum(splits[r][:rank]) * width
            count = splits[r][rank] * width
            expected += [1000 * r + start + i for i in range(count)]
        assert got.tolist() == expected


@given(
    size=st.integers(1, 4),
    rows=st.integers(0, 9),
    dtype=st.sampled_from(["float32", "float16", "int64"]),
    op=st.sampled_from([ReduceOp.SUM, ReduceOp.AVERAGE, ReduceOp.MAX]),
)
@settings(max_examples=25)
def test_reduce_scatter_gives_each_rank_its_rows(size, rows, dtype, op):
    def values(rank):
        return (np.arange(rows * 2) % 7 + rank).astype(dtype)

    def body(engine):
        request = Request("x", "reducescatter", dtype, (rows, 2), op)
        handle = engine.submit(request, values(engine.rank))
        return handle.wait().copy(), handle.sizes

    stacked = np.stack([values(r).astype(np.float64) for r in range(size)])
    whole = {
        ReduceOp.SUM: stacked.sum(0),
        ReduceOp.AVERAGE: stacked.mean(0),
        ReduceOp.MAX: stacked.max(0),
    }[op]
    whole = np.trunc(whole) if dtype == "int64" else whole
    results = with_engines(size, body)
    sizes = results[0][1]
    assert sum(sizes) == rows
    assert max(sizes, default=0) - min(sizes, default=0) <= 1
    together = np.concatenate([got for got, _ in results])
    assert np.allclose(together.astype(np.float64), whole, rtol=2e-3)


def test_process_sets_run_beside_each_other_and_average_over_their_own():
    def body(engine):
        evens, odds = engine.add_process_set([0, 2]), engine.add_process_set([1, 3])
        own = evens if engine.rank % 2 == 0 else odds
        results = []
        for step in range(3):
            x = ones(5000, engine.rank + step)
            request = Request("x", shape=(5000,), process_set=own)
            y = engine.submit(request, x)
            z = engine.submit(Request("x", shape=(2,)), ones(2, engine.rank))
            results.append((float(y.wait()[0]), float(z.wait()[0])))
        engine.remove_process_set(evens)
        engine.remove_process_set(odds)
        with pytest.raises(ValueError, match="does not belong to process set"):
            engine.submit(Request("x", shape=(1,), process_set=own), ones(1))
        return results

    for rank, results in enumerate(with_engines(4, body)):
        assert results == [(1.0 + rank % 2 + step, 1.5) for step in range(3)]


def test_what_is_remembered_of_a_process_set_goes_with_it():
    def body(engine):
        compressor = parse("int8 | ef")

        def reduce(number):
            request = Request("w", shape=(5000,), spec=str(compressor), process_set=number)
            engine.submit(request, ones(5000, 1.3), compressor=compressor).wait(60)

        first, second = (engine.add_process_set([0, 1]) for _ in range(2))
        for number in (0, first, second):
            reduce(number)
        engine.remove_process_set(first)
        keys, members = ["w", (second, "w")], engine._worker.requests._members
        assert list(engine.states) == list(members) == keys
        reduce(second)
        assert [engine.states[key]["step"] for key in keys] == [1, 2]
        engine.remove_process_set(second)
        assert list(engine.states) == list(members) == ["w"]

    with_engines(2, body)


@pytest.mark.parametrize("spec", ["int8(bucket=32) | ef", "topk(ratio=0.1) | ef", "powersgd"])
def test_declared_groups_of_a_process_set_compress(spec):
    def body(engine):
        number, x = engine.add_process_set([1, 2]), ones(4096)
        if engine.rank:
            request = Request("w", shape=(64, 64), spec=spec, process_set=number)
            group = engine.declare("g", [request], [parse(spec)], [{}], process_set=number)
            for _ in range(3):
                x = ones(4096, engine.rank)
                group.submit("w", x)
                group.wait(60)
        engine.submit(Request("end", "barrier"), ones(0)).wait(60)
        return x.tobytes()

    _, one, two = with_engines(3, body)
    assert one == two


def test_ranks_that_ask_for_other_process_sets_are_told():
    def body(engine):
        with pytest.raises(Mismatch, match="process sets differ between ranks"):
            engine.add_process_set([0, 1] if engine.rank else [0, 2])
        return engine.add_process_set([0, 1])

    assert len(set(with_engines(3, body))) == 1


def test_a_group_runs_together_or_not_at_all():
    def body(engine):
        first = Request("g_1of2", shape=(4,), group="g", group_size=2)
        second = Request("g_2of2", shape=(5 if engine.rank else 4,), group="g", group_size=2)
        items = [(first, ones(4), None, None), (second, ones(5 if engine.rank else 4), None, None)]
        for handle in engine.submit_all(items):
            with pytest.raises(Mismatch, match="g_2of2"):
                handle.wait(60)
        good = [Request(f"h_{i}of2", shape=(4,), group="h", group_size=2) for i in (1, 2)]
        for _ in range(3):
            handles = engine.submit_all([(r, ones(4, engine.rank), None, None) for r in good])
            assert [h.wait(60)[0] for h in handles] == [0.5, 0.5]

    with_engines(2, body)


def test_names_wait_for_the_rest_of_their_group():
    def body(engine):
        requests = [Request(f"g_{i}", shape=(1,), group="g", group_size=3) for i in range(3)]
        early = engine.submit_all([(r, ones(1), None, None) for r in requests[:2]])
        for _ in range(5):  # other work goes on meanwhile
            engine.submit(Request("other", shape=(1,)), ones(1)).wait(60)
        assert not any(handle.done() for handle in early)
        late = engine.submit(requests[2], ones(1))
        for handle in [*early, late]:
            handle.wait(60)

    with_engines(3, body)


@pytest.mark.parametrize("cached", [False, True])
def test_ranks_that_joined_count_as_zeros(cached):
    steps = [4, 1, 3]

    def body(engine):
        request = Request("x", shape=(3,))
        if cached:
            engine.submit(request, ones(3)).wait(60)
        threes = [ones(3, 3.0) for _ in range(steps[engine.rank])]
        seen = [float(engine.submit(request, x).wait(60)[0]) for x in threes]
        last = engine.join()
        # Afterwards everybody takes part again.
        again = float(engine.submit(request, ones(3, 3.0)).wait(60)[0])
        return seen, last, again

    results = with_engines(3, body)
    assert results[0][0] == [3.0, 2.0, 2.0, 1.0]
    assert results[2][0] == [3.0, 2.0, 2.0]
    assert {last for _, last, _ in results} == {0}
    assert {again for _, _, again in results} == {3.0}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int16", "uint8", "bool"])
def test_ranks_that_joined_leave_minima_and_products_alone(dtype):
    two = {"bfloat16": 0x4000, "bool": True}.get(dtype, 2)

    def body(engine):
        results = []
        if engine.rank == 0:
            for op in (ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT):
                request = Request(f"x{op}", dtype=dtype, shape=(3,), op=op)
                x = np.full(3, two, request.storage)
                results.append(engine.submit(request, x).wait(60).tolist())
        engine.join()
        return results

    assert with_engines(3, body)[0] == [[two] * 3] * 3


@pytest.mark.parametrize("op", [ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
def test_what_stands_in_for_a_rank_that_joined_is_not_scaled(op):
    def body(engine):
        results = []
        if engine.rank == 0:
            for name, factors in (("pre", {"prescale": 2.0}), ("post", {"postscale": 2.0})):
                handle = engine.submit(Request(name, shape=(3,), op=op, **factors), ones(3, 3.0))
                try:
                    results.append(handle.wait(60).tolist())
                except Mismatch as error:
                    results.append(str(error))
        engine.join()
        return results

    told, result = with_engines(2, body)[0]
    assert f"{op.name.title()} of tensor 'pre': rank 1 joined" in told
    assert result == [6.0] * 3


def test_a_rank_that_joined_counts_as_zeros_in_its_process_sets_too():
    joined = threading.Event()

    def body(engine):
        pair = engine.add_process_set([0, 1])
        other = engine.add_process_set([1, 2])
        group = None
        if engine.rank < 2:
            request = Request("w", shape=(3,), process_set=pair)
            group = engine.declare("g", [request], [parse("none")], [{}], process_set=pair)
            x = ones(3, 4.0)
            group.submit("w", x)
            group.wait(60)
        seen = []
        if engine.rank == 0:
            joined.set()
        else:
            assert joined.wait(60)
            request = Request("y", shape=(3,), process_set=other)
            seen.append(engine.submit(request, ones(3, 2.0)).wait(60)[0])
        if engine.rank == 1:
            request = Request("x", shape=(3,), process_set=pair)
            seen += [engine.submit(request, ones(3, 2.0)).wait(60)[0] for _ in range(2)]
            x = ones(3, 4.0)
            group.submit("w", x)
            group.wait(60)
            seen.append(x[0])
        last = engine.join()
        again = 0.0
        if engine.rank < 2:
            request = Request("x", shape=(3,), process_set=pair)
            again = engine.submit(request, ones(3, 2.0)).wait(60)[0]
        return [float(each) for each in seen], last, float(again)

    first, second, third = with_engines(3, body)
    assert (first[0], second[0], third[0]) == ([], [2.0, 1.0, 1.0, 2.0], [2.0])
    assert first[1] == second[1] == third[1]
    assert (first[2], second[2], third[2]) == (2.0, 2.0, 0.0)


def test_a_broadcast_with_an_output_sends_the_values():
    def body(engine):
        values, output = ones(4, engine.rank + 1.0), ones(4, -7.0)
        request = Request("x", "broadcast", shape=(4,), root=1)
        return engine.submit(request, values, output).wait(60).tolist(), values.tolist()

    assert with_engines(2, body) == [([2.0] * 4, [1.0] * 4), ([2.0] * 4, [2.0] * 4)]


@pytest.mark.parametrize("spec", ["none", "int8(bucket=32) | ef", "topk(ratio=0.05)", "powersgd"])
def test_groups_go_on_when_a_rank_has_joined(spec):
    def body(engine):
        request = Request("w", shape=(64, 64), spec=spec)
        group = engine.declare("g", [request], [parse(spec)], [{}])
        for _ in range(3 if engine.rank == 0 else 1):
            x = ones(4096, 4.0)
            group.submit("w", x)
            group.wait(60)
        engine.join()
        y = ones(4096, 4.0)
        group.submit("w", y)
        group.wait(60)
        return x.tobytes(), y.tobytes()

    results = with_engines(4, body)
    assert len({y for _, y in results}) == 1
    if spec == "none":
        assert np.frombuffer(results[0][0], np.float32)[0] == 1.0  # a quarter of one rank's


def test_only_reductions_run_while_somebody_has_joined():
    def body(engine):
        text = ""
        if engine.rank < 2:
            handle = engine.submit(Request("rows", "allgather", shape=(1,)), ones(1))
            with pytest.raises(Mismatch) as caught:
                handle.wait(60)
            text = str(caught.value)
        engine.join()
        return text

    def late(engine):  # the others ask once rank 2 has joined for sure
        if engine.rank == 2:
            joined.set()
        else:
            assert joined.wait(60)
        return body(engine)

    joined = threading.Event()
    texts = with_engines(3, late)
    assert texts[0] == texts[1]
    assert "rank 2 joined" in texts[0]


@pytest.mark.parametrize("change", ["add", "remove"])
@pytest.mark.parametrize("callers", [1, 2])
def test_process_sets_stay_as_they_are_while_somebody_has_joined(change, callers):
    joined = threading.Event()

    def body(engine):
        pair = engine.add_process_set([0, 1])
        text = ""
        if engine.rank < callers:
            if engine.rank == 0:
                assert joined.wait(60)
            call = engine.add_process_set if change == "add" else engine.remove_process_set
            with pytest.raises(Mismatch) as caught:
                call([1, 2] if change == "add" else pair)
            text = str(caught.value)
        elif engine.rank == 2:
            joined.set()
        engine.join()
        engine.remove_process_set(pair)
        return text, engine.add_process_set([0, 1])

    told = with_engines(3, body)
    absent = "rank 2 joined" if callers == 2 else "ranks 1, 2 joined"
    assert [text for text, _ in told[:callers]] == [told[0][0]] * callers
    assert absent in told[0][0]
    assert len({number for _, number in told}) == 1


@pytest.mark.parametrize("first", ["join", "declaration"])
def test_a_declaration_that_a_joined_rank_cannot_make_is_refused(first):
    joined, called = threading.Event(), threading.Event()

    def body(engine):
        def declare():
            return engine.declare("g", [Request("w", shape=(4,))], [parse("none")], [{}])

        text = ""
        if engine.rank == 2:
            if first == "declaration":
                assert called.wait(60)
                time.sleep(0.2)  # either order is right; mostly this one
            joined.set()
        else:
            if first == "join":
                assert joined.wait(60)
            called.set()
            with pytest.raises(Mismatch) as caught:
                declare()
            text = str(caught.value)
        engine.join()
        group, x = declare(), ones(4, engine.rank)
        group.submit("w", x)
        group.wait(60)
        return text, float(x[0])

    results = with_engines(3, body)
    assert [value for _, value in results] == [1.0] * 3
    assert results[0][0] == results[1][0]
    assert "'g' was not declared: rank 2 joined" in results[0][0]


def test_an_abandoned_step_is_told_to_all_and_the_next_one_runs():
    def body(engine):
        requests = [Request(n, shape=(2000,), spec="int8(bucket=32) | ef") for n in "ab"]
        specs = [parse(r.spec) for r in requests]
        group = engine.declare("g", requests, specs, [{}, {}])
        text = ""
        group.submit("a", ones(2000))
        if engine.rank == 1:
            group.abandon("ValueError: bad batch")
        else:
            group.submit("b", ones(2000))
            with pytest.raises(StepAbandoned) as caught:
                group.wait(60)
            text = str(caught.value)
        a, b = ones(2000, engine.rank), ones(2000)
        group.submit("a", a)
        group.submit("b", b)
        group.wait(60)
        return text, a.tobytes(), group.step

    results = with_engines(3, body)
    assert results[0][0] == results[2][0] == "rank 1: abandoned: ValueError: bad batch"
    assert len({a for _, a, _ in results}) == 1
    assert {step for _, _, step in results} == {2}


def test_a_group_released_in_the_middle_of_a_step_fails_that_step_only():
    def body(engine):
        group = engine.declare("g", [Request("a", shape=(4,)), Request("b", shape=(4,))],
                               [parse("none")] * 2, [{}, {}])  # fmt: skip
        group.submit("a", ones(4))
        if engine.rank == 0:
            engine.release(group)
            del group
        else:
            group.submit("b", ones(4))
            with pytest.raises(StepAbandoned, match="rank 0: abandoned: the optimizer was dropped"):
                group.wait(60)
        return float(engine.submit(Request("x", shape=(1,)), ones(1)).wait(60)[0])

    assert with_engines(2, body) == [1.0, 1.0]


def test_integer_averages_are_exact():
    def body(engine):
        big = (1 << 53) + 2
        x = np.array([49, -7, big, engine.rank], np.int64)
        return engine.submit(Request("x", dtype="int64", shape=(4,)), x).wait().tolist()

    (first, *rest) = with_engines(3, body)
    assert first == [49, -7, (1 << 53) + 2, 1]
    assert all(other == first for other in rest)


def test_a_rank_that_leaves_ends_the_wait_of_those_who_joined():
    both = threading.Barrier(2)  # or the second asks a coordinator that has left by then

    def body(engine):
        if engine.rank == 2:
            return ""
        with pytest.raises(PeerLost, match="rank 2 has shut down"):
            engine.join()
        both.wait(60)
        return "told"

    assert with_engines(3, body)[:2] == ["told", "told"]
