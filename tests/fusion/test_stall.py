"""The stall inspector: as a pure function of what waits, and in the engine's log."""

import logging
import time

import numpy as np
import pytest
from engines import with_engines
from hypothesis import given
from hypothesis import strategies as st

from ringlet.compressors import parse
from ringlet.fusion import Engine, EngineClosed, Limits, Request
from ringlet.fusion.negotiation.stall_inspector import Stalled, StallInspector, cycle
from ringlet.fusion.negotiation.stragglers import Stragglers
from ringlet.ring.control.opening import open_control
from ringlet.ring.transports.local import run_local


def test_warns_once_per_period_and_forgets_what_went_on():
    now = [0.0]
    inspector = StallInspector(10.0, 35.0, lambda: now[0])
    waiting = [Stalled("'x'", [0, 2], [1])]
    told = []
    for now[0] in (0.0, 5.0, 10.0, 15.0, 20.0):
        told.append(inspector.inspect(waiting)[0])
    assert [bool(text) for text in told] == [False, False, True, False, True]
    assert "'x': 10 s, ready on ranks 0, 2, waiting for rank 1" in told[2]
    assert "rank 1 is missing in 1 of them" in told[2]
    assert inspector.inspect([]) == ("", False)
    now[0] = 30.0
    assert inspector.inspect(waiting) == ("", False)
    now[0] = 65.0
    text, over = inspector.inspect(waiting)
    assert over
    assert "35 s" in text


@pytest.mark.parametrize("give_up_after", [0.0, 35.0])
def test_a_wait_that_nothing_ends_is_told_how_to_end(give_up_after):
    now = [0.0]
    inspector = StallInspector(10.0, give_up_after, lambda: now[0])
    waiting = [Stalled("'x'", [0], [1])]
    inspector.inspect(waiting)
    now[0] = 10.0
    text, _ = inspector.inspect(waiting)
    assert ("RINGLET_STALL_SHUTDOWN_TIME_SECONDS=" in text) == (not give_up_after)


def test_time_in_which_this_process_stood_still_does_not_count():
    """A job that went on was ended by it, as on a machine that was suspended."""
    now = [100.0]
    inspector = StallInspector(20.0, 40.0, lambda: now[0], every=5.0)
    waiting, told = [Stalled("'x'", [0], [1])], []
    for now[0] in (100.0, 105.0, 1000.0, 1005.0, 1010.0, 1015.0, 1020.0, 1025.0):
        told.append(inspector.inspect(waiting))
    assert [bool(text) for text, _ in told] == [False] * 3 + [True] + [False] * 3 + [True]
    assert "'x': 20 s" in told[3][0]
    assert [over for _, over in told] == [False] * 7 + [True]


@pytest.mark.parametrize("limits", [{"stall_warning": 1e12}, {"cycle_time": 1e15}])
def test_whoever_says_never_with_a_huge_number_is_not_looked_for_without_an_end(limits):
    def body(engine):
        values = np.ones(4, np.float32)
        handle = engine.submit(Request("x", shape=(4,)), values)
        time.sleep(0.2)  # the engine's thread waits for company, and for stalls, meanwhile
        handle.wait(20)
        return values.tolist()

    assert with_engines(2, body, **limits) == [[1.0] * 4] * 2


def test_ranks_that_wait_for_each_other_are_told_of_as_a_circle():
    now = [0.0]
    inspector = StallInspector(10.0, 30.0, lambda: now[0])
    a, b = Stalled("'a'", [0], [1, 2]), Stalled("'b'", [1], [0, 2])
    inspector.inspect([a])
    now[0] = 10.0
    text, _ = inspector.inspect([a, b])
    assert "rank 1 is missing in 1 of them" in text  # 'b' has only begun
    now[0] = 20.0
    text, over = inspector.inspect([a, b])
    assert not over
    assert text.startswith(
        "ranks run collectives in another order, or different ones: rank 0 has asked for 'a', not "
        "so rank 1, which has asked for 'b', not so rank 0. Call the same ones in one order"
    )
    now[0] = 30.0
    _, over = inspector.inspect([a, b])
    assert over
    assert inspector.cause().startswith("ranks run collectives in another order")
    assert "'a': 30 s, ready on rank 0, waiting for ranks 1, 2" in inspector.cause()
    # Everybody waits for rank 2, which waits for nobody: no circle.
    assert cycle([Stalled("'a'", [0, 1], [2]), Stalled("'b'", [0], [1, 2])]) == []


@given(
    st.lists(
        st.tuples(st.sets(st.integers(0, 5), min_size=1), st.sets(st.integers(0, 5), min_size=1)),
        max_size=6,
    )
)
def test_a_circle_is_one_and_none_is_missed(pairs):
    waiting = [
        Stalled(str(i), sorted(ready - missing), sorted(missing))
        for i, (ready, missing) in enumerate(pairs)
    ]
    found = cycle(waiting)
    for (rank, each), (other, _) in zip(found, [*found[1:], *found[:1]], strict=True):
        assert rank in each.ready
        assert other in each.missing
    # By matrices: there is a circle if, and only if, some power of the relation meets itself.
    reach = np.zeros((6, 6), bool)
    for each in waiting:
        reach[np.ix_(list(each.ready), list(each.missing))] = True
    power, shortest = reach, 0
    for length in range(1, 7):
        if not shortest and power.diagonal().any():
            shortest = length
        power = (power.astype(int) @ reach.astype(int)) > 0
    assert len(found) == shortest


@pytest.mark.parametrize("declared", [False, True])
def test_the_log_names_tensors_and_ranks_and_the_engine_gives_up(declared, caplog):
    def body(engine):
        if declared:
            request = Request("w", shape=(2000,))
            group = engine.declare("model.noname.0", [request], [parse("none")], [{}])
            engine.entitle(group, f"SGD of rank {engine.rank}")
        if engine.rank != 1 and declared:
            group.submit("w", np.ones(2000, np.float32))
            waiting = group
        else:
            name = "other" if engine.rank == 1 else "x"
            waiting = engine.submit(Request(name, shape=(1,)), np.ones(1, np.float32))
        said = r"a stall of more than 0\.6 s; ranks run collectives in another order, or different"
        with pytest.raises(EngineClosed, match=said) as ended:
            waiting.wait(60)
        assert "which has asked for 'other', not so rank 0" in str(ended.value)

    def rank_main(comm):
        engine = Engine(comm, open_control, Limits(stall_warning=0.2, stall_shutdown=0.6))
        try:
            body(engine)
        finally:
            engine.shutdown()

    with caplog.at_level(logging.INFO, "ringlet"):
        run_local(rank_main, 3)
    text = "\n".join(record.getMessage() for record in caplog.records)
    assert text.count("gradients of SGD of rank 0: 1 by none") == declared
    assert "gradients of SGD of rank 1" not in text
    assert "'other'" in text
    assert "ready on rank 1, waiting for ranks 0, 2" in text
    assert ("a step of 'SGD of rank 0'" if declared else "'x'") in text


@pytest.mark.parametrize("whole", [(), (2,)])
def test_a_group_that_ranks_have_only_begun_is_named(whole, caplog):
    def rank_main(comm):
        engine = Engine(comm, open_control, Limits(stall_warning=0.2, stall_shutdown=0.6))
        names = ["a", "b"] if engine.rank in whole else ["a"]
        requests = [Request(n, shape=(1,), group="pair", group_size=2) for n in names]
        handles = [engine.submit(request, np.ones(1, np.float32)) for request in requests]
        try:
            for handle in handles:
                with pytest.raises(EngineClosed, match="a stall of more than"):
                    handle.wait(60)
        finally:
            engine.shutdown()

    with caplog.at_level(logging.WARNING, "ringlet"):
        run_local(rank_main, 3)
    text = "\n".join(record.getMessage() for record in caplog.records)
    ready, late = ("rank 2", "ranks 0, 1") if whole else ("no rank", "ranks 0, 1, 2")
    assert "the rest of group 'pair'" in text
    assert f"ready on {ready}, waiting for {late}" in text


def votes(stragglers, now, order, lag, buckets):
    for bucket in range(buckets):
        for i, rank in enumerate(order):
            now[0] += lag if i == len(order) - 1 else 0.001
            stragglers.voted(bucket, rank, i == len(order) - 1)


def test_a_straggler_is_named_with_how_much_it_is_late_and_only_then():
    now = [100.0]
    stragglers = Stragglers(10.0, lambda: now[0])
    assert stragglers.report() == ""
    votes(stragglers, now, [2, 0, 1], 0.04, 30)
    assert stragglers.report() == ""  # too early
    votes(stragglers, now, [0, 2, 1], 0.08, 150)
    text = stragglers.report()
    assert text.startswith("the others wait for rank 1: in the last 14 s it was the last")
    assert "180 of 180 buckets, 73 ms after the rank before it" in text
    assert stragglers.report() == ""
    votes(stragglers, now, [0, 2, 1], 0.002, 5000)  # the last, but hardly
    assert stragglers.report() == ""
    for _ in range(20):  # late, but not always the same
        votes(stragglers, now, [0, 2, 1], 0.1, 10)
        votes(stragglers, now, [0, 1, 2], 0.1, 10)
    assert stragglers.report() == ""
    stragglers.voted("failed", 0, False)
    stragglers.forget()
    now[0] += 50
    votes(stragglers, now, [0, 1], 0.5, 5)  # too few to tell
    assert stragglers.report() == ""


def test_the_log_names_a_slow_rank(caplog, monkeypatch):
    # As many as a second has on a machine that has ten times as much to do.
    monkeypatch.setattr("ringlet.fusion.negotiation.stragglers._BUCKETS", 4)

    def body(comm):
        engine = Engine(comm, open_control, Limits(stall_warning=1.0))
        request = Request("w", shape=(2000,), spec="int8")
        try:
            group = engine.declare("model", [request], [parse("int8")], [{}])
            for _ in range(20):
                if comm.rank == 2:
                    time.sleep(0.1)
                group.submit("w", np.ones(2000, np.float32))
                group.wait(60)
        finally:
            engine.shutdown()

    with caplog.at_level(logging.WARNING, "ringlet"):
        run_local(body, 3)
    assert any("wait for rank 2" in record.getMessage() for record in caplog.records)
