"""Streams, the cache and the levels of dense sums change while tensors are under way."""

import time
from functools import cache

import engines
import numpy as np
import pytest
from engines import with_engines
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlet.compressors import parse
from ringlet.fusion import Request, StepAbandoned
from ringlet.fusion.negotiation import messages as m
from ringlet.ring import ReduceOp
from ringlet.ring.transports.hierarchical import HierarchicalCommunicator

SIZES = (40_000, 700, 90_000, 1200, 25_000)  # some of which are large enough for two levels
HOSTS = "aabb"
SETTINGS = st.fixed_dictionaries(
    {},
    optional={
        "streams": st.integers(1, 8),
        "cache": st.booleans(),
        "hierarchical": st.booleans(),
        "fusion_threshold": st.sampled_from([1, 200_000, 1 << 24]),
    },
)


class Levels(HierarchicalCommunicator):
    """Counts the allreduces that the levels were offered."""

    offered = 0

    def splits(self, buffer):
        self.offered += 1
        return super().splits(buffer)


def on_hosts(hosts, body, **limits):
    if hosts[0] == hosts[-1]:
        return with_engines(len(hosts), body, **limits)
    return engines.on_hosts(hosts, body, Levels, **limits)


def whole(rank, step, i, n):
    """Return float32 whose sum is exact in any order."""
    return drawn(rank, step, i, n).copy()


@cache
def drawn(rank, step, i, n):
    return np.random.default_rng([rank, step, i]).integers(-99, 99, n).astype(np.float32)


@cache
def sums(ranks, step, sizes=SIZES):
    return [sum(drawn(r, step, i, n) for r in range(ranks)) for i, n in enumerate(sizes)]


def declare(engine, spec, name="g"):
    requests = [
        Request(f"{name}{i}", shape=(n,), spec=spec, op=ReduceOp.SUM) for i, n in enumerate(SIZES)
    ]
    return engine.declare(name, requests, [parse(spec)] * len(SIZES), [{} for _ in SIZES])


def begin(engine, group, step):
    arrays = [whole(engine.rank, step, i, n) for i, n in enumerate(SIZES)]
    for i, array in reversed(list(enumerate(arrays))):
        group.submit(f"{group.name}{i}", array)
    return arrays


def singles(engine, step):
    arrays = [whole(engine.rank, step, i, n) for i, n in enumerate(SIZES)]
    requests = [Request(f"s{i}", shape=(n,), op=ReduceOp.SUM) for i, n in enumerate(SIZES)]
    return [engine.submit(r, a) for r, a in zip(requests, arrays, strict=True)]


def train(engine, changes=(), delays=(0.0,)):
    """Check dense sums while rank 0 announces ``changes``; return compressed ones, and limits."""
    ranks, results = engine.size, []
    plain, lossy = declare(engine, "none", "g"), declare(engine, "int8(bucket=64) | ef", "q")
    for step in range(10):
        time.sleep(delays[step * (engine.rank + 1) % len(delays)])
        dense, codes = begin(engine, plain, step), begin(engine, lossy, step)
        handles = singles(engine, step)
        if engine.rank == 0 and step < 2 * len(changes) and step % 2 == 1:
            engine.tuning.announce(changes[step // 2])  # with all of this under way
        for got, exact in zip(handles, sums(ranks, step), strict=True):
            np.testing.assert_array_equal(got.wait(60), exact)
        plain.wait(60)
        for got, exact in zip(dense, sums(ranks, step), strict=True):
            np.testing.assert_array_equal(got, exact)
        lossy.wait(60)
        results += [array.tobytes() for array in codes]
    # The last change was announced, and comes before what is asked for now.
    engine.extensions.settle()
    engine.submit(Request("end", "barrier"), np.empty(0, np.float32)).wait(60)
    return results, engine.limits


@cache
def untuned(hosts):
    return on_hosts(hosts, train)[0][0]


@settings(max_examples=8)
@given(
    st.sampled_from([HOSTS, "aaa"]),
    st.lists(SETTINGS, min_size=1, max_size=5),
    st.lists(st.floats(0, 0.002), min_size=7, max_size=7),
)
def test_no_change_loses_or_alters_anything(hosts, changes, delays):
    tuned = on_hosts(hosts, lambda engine: train(engine, changes, delays))
    assert all(results == untuned(hosts) for results, _ in tuned)
    assert len({limits for _, limits in tuned}) == 1


def test_dense_sums_leave_the_levels_and_come_back_and_others_never_leave():
    def body(engine):
        comm, counts = engine.comm, []
        plain, cast = declare(engine, "none", "g"), declare(engine, "fp16", "h")

        def turn(hierarchical):
            if engine.rank == 0:
                engine.tuning.announce({"hierarchical": hierarchical})
                engine.extensions.settle()
            found = []
            for step in range(7):  # from the fifth on the groups have changed
                before = comm.offered
                for group in (plain, cast):
                    begin(engine, group, step)
                    group.wait(60)
                    before, now = comm.offered, comm.offered - before
                    found.append(now)
                handles = singles(engine, step)
                for handle in handles:
                    handle.wait(60)
                found.append(comm.offered - before)
            counts.append([n > 0 for n in found[-3:]])

        turn(False)
        turn(True)
        return counts

    assert on_hosts(HOSTS, body) == [[[False, True, False], [True, True, True]]] * 4


def test_a_rank_that_has_joined_changes_levels_with_the_others():
    def body(engine):
        group = declare(engine, "none")
        begin(engine, group, 0)
        group.wait(60)
        if engine.rank == 3:
            engine.join()
        else:
            for step in range(1, 10):
                if engine.rank == 0 and step == 1:
                    engine.tuning.announce({"hierarchical": False, "streams": 1, "cache": False})
                if step == 3 and engine.rank == 1:  # given up: the others must come out of it
                    group.submit("g0", whole(1, step, 0, SIZES[0]))
                    group.abandon("a test")
                    continue
                arrays = begin(engine, group, step)
                if step == 3:
                    with pytest.raises(StepAbandoned):
                        group.wait(60)
                    continue
                group.wait(60)
                for got, exact in zip(arrays, sums(3, step), strict=True):
                    np.testing.assert_array_equal(got, exact)
            engine.join()
        arrays = begin(engine, group, 20)
        group.wait(60)
        for got, exact in zip(arrays, sums(4, 20), strict=True):
            np.testing.assert_array_equal(got, exact)
        return [bucket.among(group.peers) is group.peers.flat for bucket in group.buckets]

    for found in on_hosts(HOSTS, body):
        assert all(found)


def test_requests_go_by_name_while_the_cache_is_off_and_by_number_again_later():
    def body(engine):
        sent, send = [], engine._control.send

        def noting(message):
            sent.append(message[:1])
            send(message)

        engine._control.send = noting
        kinds = []
        for step in range(7):
            if engine.rank == 0 and step in (2, 4):
                engine.tuning.announce({"cache": step == 4})
                engine.extensions.settle()
            sent.clear()
            for handle in singles(engine, step):
                handle.wait(60)
            kinds.append({kind for kind in sent if kind in (m.REQUEST, m.HITS)})
        return kinds[0], kinds[1], kinds[3], kinds[6]  # in 2 and 4 ranks hear of the change

    expected = {m.REQUEST}, {m.HITS}, {m.REQUEST}, {m.HITS}
    assert on_hosts("aaa", body, streams=2) == [expected] * 3


@given(
    st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=2, max_size=8),
    st.sampled_from([4096, len(SIZES) + 1]),
)
@settings(max_examples=15)
def test_ranks_that_ask_by_number_meet_ranks_that_ask_by_name(turns, capacity):
    """Also where only one of two tensors that go together has a number."""

    def body(engine):
        for step, cached in enumerate(turns):
            engine._worker.requests._cache = cached[engine.rank]
            handles = singles(engine, step)
            pair = [whole(engine.rank, step, i, 900) for i in range(2)]
            requests = [
                Request(f"p{i}", shape=(900,), op=ReduceOp.SUM, group="p", group_size=2)
                for i in range(2)
            ]
            items = [(r, a, None, None) for r, a in zip(requests, pair, strict=True)]
            together = engine.submit_all(items)
            for single, exact in zip(handles, sums(3, step), strict=True):
                np.testing.assert_array_equal(single.wait(60), exact)
            for single, exact in zip(together, sums(3, step, (900, 900)), strict=True):
                np.testing.assert_array_equal(single.wait(60), exact)

    on_hosts("aaa", body, cache_capacity=capacity)
