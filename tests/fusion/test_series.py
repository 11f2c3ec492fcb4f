"""Calls without names: runs of them on the way, what ranks have in common, errors that name one."""

import numpy as np
import pytest
from engines import with_engines
from hypothesis import given
from hypothesis import strategies as st

from ringlet.compressors import parse
from ringlet.fusion import Request
from ringlet.fusion.negotiation import messages as m
from ringlet.fusion.negotiation.coordinator import Coordinator
from ringlet.fusion.negotiation.series_runs import SeriesRuns
from ringlet.fusion.requests.request import loads
from ringlet.fusion.requests.series import Series, called, place_of, prototype_of
from ringlet.ring import Mismatch, ReduceOp

A = prototype_of(Request("s.noname.0", shape=(4,), op=ReduceOp.SUM))
B = prototype_of(Request("s.noname.0", shape=(5,), op=ReduceOp.SUM))


def test_a_numbered_request_is_the_one_of_its_name():
    plain = Request("s.noname.17", shape=(4,), op=ReduceOp.SUM)
    assert A.numbered(17) == plain
    assert hash(A.numbered(17)) == hash(plain)
    assert A.numbered(17).key == plain.key
    assert A.numbered(17).to_list() == plain.to_list()
    assert A.numbered(17).text == plain.text
    of_set = prototype_of(Request("s.noname.0", process_set=3))
    assert of_set.numbered(2).key == (3, "s.noname.2")


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("s.noname.0", ("s.noname.", 0)),
        ("s.noname.join2.12", ("s.noname.join2.", 12)),
        ("s.noname.01", None),
        ("s.noname.1_1of2", None),
        ("s.noname.", None),
        ("s.noname.x", None),
        ("s.noname.\u0661", None),
        ("s.noname." + "9" * 30, None),
        ("layer.1", None),
    ],
)
def test_automatic_names_are_told_from_others(name, place):
    assert place_of(name) == place


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("DistributedOptimizer settings.noname.0.agreed", "DistributedOptimizer settings (agreed)"),
        ("DistributedOptimizer.noname.1.alike16", "DistributedOptimizer 2 (alike16)"),
        ("DistributedOptimizer.noname.join2.0.0", "DistributedOptimizer join2.1 (0)"),
        ("DistributedOptimizer.noname.0.table.values", "DistributedOptimizer (table.values)"),
        ("allreduce.noname.3.grad", "allreduce.noname.3.grad"),
        ("allreduce.noname.join2.12", "allreduce.noname.join2.12"),
        ("grouped_allreduce.noname.3_1of2", "grouped_allreduce.noname.3_1of2"),
        ("layer.1", "layer.1"),
    ],
)
def test_what_is_done_for_somebody_without_a_name_is_told_without_ours(name, told):
    assert called(name) == told


def test_series_count_on_and_names_are_as_they_were():
    series = Series("allreduce")
    assert [series.name(), series.next(), series.name()] == [
        "allreduce.noname.0", 1, "allreduce.noname.2"
    ]  # fmt: skip
    assert Series("allreduce", "join1.").name() == "allreduce.noname.join1.0"


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9), st.sampled_from([A, B]))))
def test_runs_round_trip(calls):
    runs = [m.Run(first, first + count, request) for first, count, request in calls]
    packed = m.pack_series(3, 1 << 40, runs)
    found = m.unpack_series(packed, lambda text: Request.from_list(loads(text)))
    assert found == (3, 1 << 40, runs)


@pytest.mark.parametrize("counts", [[1 << 40], [m.CALLS, 1], [0], [3, -1]])
def test_runs_that_no_rank_asks_for_are_refused(counts):
    """Rank 0 would go through all of their names when it looks for what is stalled."""
    packed = m.pack_series(0, 1, [m.Run(7, 7 + count, A) for count in counts])
    with pytest.raises(ValueError, match="they are of one at least"):
        m.unpack_series(packed, lambda text: Request.from_list(loads(text)))


def test_many_calls_take_few_bytes():
    assert len(m.pack_series(0, 1, [m.Run(1000, 2000, A)])) < 200


@given(st.data(), st.integers(1, 4))
def test_what_all_ranks_have_called_is_taken_once(data, size):
    """In any order, whatever is ahead of what."""
    waiting = SeriesRuns(range(size))
    called = [{} for _ in range(size)]
    for _ in range(data.draw(st.integers(1, 25))):
        rank = data.draw(st.integers(0, size - 1))
        first, count = data.draw(st.integers(0, 20)), data.draw(st.integers(1, 6))
        request, run = data.draw(st.sampled_from([A, B])), range(first, first + count)
        if any(n in called[rank] for n in run):
            twice = any(called[rank].get(n) for n in run)
            if twice:
                with pytest.raises(ValueError, match="twice"):
                    waiting.add(rank, m.Run(first, first + count, request))
            continue
        waiting.add(rank, m.Run(first, first + count, request))
        called[rank] |= dict.fromkeys(run, request)
        common = set.intersection(
            *({n for n, r in of_one.items() if r is not None} for of_one in called)
        )
        taken = {}
        for start, stop, asked in waiting.take():
            for n in range(start, stop):
                taken[n] = asked
        assert taken.keys() == common
        for n, asked in taken.items():
            assert all(asked[r] is called[r][n] for r in range(size))
            for of_one in called:
                of_one[n] = None
        left = {(r, n): run.request for r, run in waiting.each() for n in range(*run[:2])}
        assert left == {
            (r, n): q for r in range(size) for n, q in called[r].items() if q is not None
        }


def test_names_and_runs_of_one_series_meet():
    coordinator = Coordinator(2)
    by_name = m.REQUEST + m.dumps([0, [A.numbered(n).to_list() for n in range(3)]])
    assert coordinator.on_message(0, by_name) == []
    (told,) = coordinator.on_message(1, m.pack_series(0, 0, [m.Run(0, 5, A)]))
    assert told[:1] == m.EXECUTE_SERIES
    assert loads(told[1:])[2] == [["s.noname.", 0, 3]]
    waiting = {each.what: each.missing for each in coordinator._waiting()}
    assert waiting == {"'s.noname.3'": [0], "'s.noname.4'": [0]}


def test_nonsense_ends_the_engine_and_not_the_coordinator():
    coordinator = Coordinator(2)
    for message in (
        m.SERIES + b"nonsense",
        m.pack_series(0, 0, [m.Run(3, 3, A)]),
        m.pack_series(7, 0, [m.Run(0, 1, A)]),
        m.SERIES + b"[0,0,[4,0,1]]",
    ):
        (told,) = coordinator.on_message(1, message)
        assert told[:1] == m.BROKEN


@pytest.mark.parametrize("spec", ["none", "fp16"])
def test_calls_of_changing_shapes_give_their_sums(spec):
    def body(engine):
        calls = [prototype_of(Request("u.noname.0", shape=(n,), op=ReduceOp.SUM, spec=spec))
                 for n in (3, 300)]  # fmt: skip
        found = []
        for turn in range(3):
            handles = []
            for i in range(40):
                n = 40 * turn + i
                request = calls[i % 3 == 0].numbered(n)
                x = np.full(request.numel, n + engine.rank, np.float32)
                handles.append(engine.submit(request, x, compressor=parse(spec)))
            found += [handle.wait(60).copy() for handle in handles]
        return found

    for found in with_engines(2, body):
        for n, x in enumerate(found):
            assert np.all(x == 2 * n + 1)


@pytest.mark.parametrize("difference", [{"shape": (5,)}, {"dtype": "float64"}])
def test_a_call_that_differs_is_named_on_every_rank_and_the_next_goes_on(difference):
    def body(engine):
        request = Request("u.noname.0", shape=(4,), op=ReduceOp.SUM)
        own = prototype_of(request)
        other = prototype_of(Request(**{
            "name": "u.noname.0", "shape": (4,), "op": ReduceOp.SUM, **difference
        }))  # fmt: skip
        handles = []
        for n in range(6):
            asked = (other if n == 3 and engine.rank == 1 else own).numbered(n)
            handles.append(engine.submit(asked, np.ones(asked.numel, asked.storage)))
        with pytest.raises(Mismatch, match=r"u\.noname\.3'.* differ between ranks") as told:
            handles[3].wait(60)
        return str(told.value), [h.wait(60)[0] for i, h in enumerate(handles) if i != 3]

    first, second = with_engines(2, body)
    assert first == second
    assert first[1] == [2.0] * 5


def test_a_rank_that_joined_gives_zeros_to_calls():
    def body(engine):
        if engine.rank == 0:
            engine.join()
            return None
        calls = prototype_of(Request("u.noname.0", shape=(4,), op=ReduceOp.SUM))
        handles = [engine.submit(calls.numbered(n), np.ones(4, np.float32)) for n in range(9)]
        found = [handle.wait(60)[0] for handle in handles]
        engine.join()
        return found

    assert with_engines(3, body)[1:] == [[2.0] * 9] * 2
