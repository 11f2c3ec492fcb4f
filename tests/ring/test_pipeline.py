"""The order of collectives in a pipeline, and how it ends."""

import threading
import time
from functools import partial
from queue import Empty

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlet.ring import ExchangeFailed, PeerLost, RingError
from ringlet.ring.pipeline import Pipeline, PipelinedExchange, Wire
from ringlet.ring.transports.local import run_local


def nothing(*_):
    pass


def steps_of(*calls):
    for call in calls:
        yield Wire(call)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(0, 2)), max_size=8),
    st.integers(1, 4),
    st.integers(0, 99),
)
@settings(max_examples=30)
def test_every_lane_keeps_the_order_whenever_ranks_come(flights, depth, seed):
    """Sums would be wrong, or nobody would meet, if two ranks took collectives in another order."""

    def body(comm):
        rng = np.random.default_rng([seed, comm.rank])
        lanes = [[comm, *(comm.sibling(i) for i in (1, 2))]]
        lanes += [[comm.sibling(i) for i in range(3 * track, 3 * track + 3)] for track in (1, 2)]
        pipeline = Pipeline(nothing, depth)
        arrays = [np.full(3, 10.0**i) for i, _ in enumerate(flights)]
        ended, times = [], []

        def steps(i, collectives, track, inline):
            for lane in range(collectives):
                if rng.random() < 0.3:
                    time.sleep(0.002)
                where = lanes[track][0 if inline else lane]
                yield Wire(partial(where.allreduce, arrays[i]), 24)

        for i, (collectives, overlapping, track) in enumerate(flights):
            pipeline.add(
                PipelinedExchange(
                    steps(i, collectives, track, not overlapping),
                    lambda i=i: ended.append(i),
                    lambda start, end, nbytes, lane: times.append((end >= start, nbytes, lane)),
                    lanes_before=3 * track,
                ),
                overlapping,
            )
            if rng.random() < 0.5:
                pipeline.advance()
        pipeline.drain()
        assert not pipeline.busy
        pipeline.stop(nothing)
        assert sorted(ended) == list(range(len(flights)))
        assert len(times) == sum(n for n, _, _ in flights)
        assert all(later and nbytes == 24 for later, nbytes, _ in times)
        return arrays

    for arrays in run_local(body, 3):
        for i, (array, (collectives, _, _)) in enumerate(zip(arrays, flights, strict=True)):
            np.testing.assert_array_equal(array, 10.0**i * 3**collectives)


def test_at_most_depth_exchanges_are_under_way():
    under_way, most = 0, 0
    gate = threading.Semaphore(0)
    pipeline = Pipeline(gate.release, depth=2)

    def steps():
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        yield Wire(nothing)
        yield Wire(nothing)
        under_way -= 1

    for _ in range(7):
        pipeline.add(PipelinedExchange(steps(), nothing, nothing))
    while pipeline.busy:
        assert gate.acquire(timeout=60)
        pipeline.advance()
    pipeline.stop(nothing)
    assert most == 2


def test_an_error_in_a_collective_is_raised_to_the_owner_and_nothing_follows():
    made = []
    pipeline = Pipeline(nothing)

    def broken():
        raise RingError("the cable was cut")

    pipeline.add(PipelinedExchange(steps_of(broken), nothing, nothing))
    pipeline.add(PipelinedExchange(steps_of(lambda: made.append(1)), nothing, nothing))
    with pytest.raises(RingError, match="cable"):
        pipeline.drain()
    pipeline.stop(nothing)
    assert made == []
    assert not any(thread.is_alive() for thread in pipeline._threads)


def test_an_exchange_that_all_ranks_give_up_may_take_care_of_itself():
    ended = []
    pipeline = Pipeline(nothing)

    def fails():
        raise ExchangeFailed("damaged")

    def careful():
        try:
            yield Wire(fails)
        except ExchangeFailed as error:
            ended.append(str(error))

    pipeline.add(PipelinedExchange(careful(), lambda: ended.append("done"), nothing))
    pipeline.add(PipelinedExchange(steps_of(nothing), lambda: ended.append("next"), nothing))
    pipeline.drain()
    pipeline.stop(nothing)
    assert ended == ["damaged", "done", "next"]


def test_a_lane_that_waits_is_interrupted():
    both, over = threading.Barrier(2), threading.Barrier(3)

    def body(comm):
        comm.sibling(1)
        if comm.rank == 2:  # never comes to the barrier that the others wait in
            over.wait(60)
            return ""
        pipeline = Pipeline(nothing)
        waits = threading.Event()

        def wait():
            waits.set()
            comm.sibling(1).barrier()

        pipeline.add(PipelinedExchange(steps_of(nothing, wait), nothing, nothing))
        while not waits.is_set():
            pipeline.advance()
        both.wait(60)
        if comm.rank == 0:
            pipeline.stop(comm.interrupt)
            said = ""
        else:
            with pytest.raises(PeerLost) as caught:
                pipeline.drain()
            pipeline.stop(comm.interrupt)
            said = str(caught.value)
        assert not any(thread.is_alive() for thread in pipeline._threads)
        over.wait(60)
        return said

    assert run_local(body, 3)[1] == "rank 0 gave up"


def test_a_collective_that_cannot_be_interrupted_is_given_up(monkeypatch):
    monkeypatch.setattr("ringlet.ring.pipeline._PATIENCE_S", 0.2)
    over = threading.Event()
    pipeline = Pipeline(nothing)
    pipeline.add(PipelinedExchange(steps_of(partial(over.wait, 60)), nothing, nothing))
    threading.Thread(target=pipeline.interrupt).start()
    with pytest.raises(PeerLost, match="was interrupted and did not end"):
        pipeline.drain()
    pipeline.stop(nothing)
    over.set()


@pytest.mark.parametrize("stalls", [0, 1, 3])
def test_what_is_under_way_may_end_as_late_where_this_rank_stood_still(monkeypatch, stalls):
    """What the others have sent is not here yet, as they stood still, too."""
    now, ended = [100.0], []
    held_up = iter([60.0] * stalls)
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    class Completed:
        def get(self, timeout):
            now[0] += timeout + next(held_up, 0.0)
            if now[0] < 100.0 + 60.0 * stalls + 1.5:
                raise Empty
            pipeline._under_way = 0
            return 1

    pipeline = Pipeline(nothing)
    monkeypatch.setattr(pipeline, "_completed", Completed())
    monkeypatch.setattr(pipeline, "_go_on", ended.append)
    monkeypatch.setattr(pipeline, "_under_way", 1)
    pipeline.settle(2.0)
    assert ended == [1]


def test_an_interruption_is_no_matter_to_what_ends_by_itself(monkeypatch):
    monkeypatch.setattr("ringlet.ring.pipeline._PATIENCE_S", 0.1)
    pipeline, ended = Pipeline(nothing), []
    pipeline.add(PipelinedExchange(steps_of(nothing), partial(ended.append, 1), nothing))
    pipeline.drain()
    pipeline.interrupt()
    time.sleep(0.3)  # nothing was under way, so nothing is given up later
    assert not pipeline.ready
    pipeline.stop(nothing)
    assert ended == [1]
