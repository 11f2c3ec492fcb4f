"""Fusion buffers that cannot be allocated."""

import weakref
from dataclasses import replace

import numpy as np
import pytest
from engines import with_engines

from ringlet.compressors import parse
from ringlet.fusion import Engine, EngineClosed, Limits, OutOfMemory, Request
from ringlet.fusion.devices.fusion_buffers import BufferPool
from ringlet.ring.communicator import ReduceOp, Topology
from ringlet.ring.control.opening import open_control
from ringlet.ring.transports.hierarchical import two_levels
from ringlet.ring.transports.local import run_local


def test_the_pool_gives_up_what_lies_unused_first(monkeypatch):
    pool = BufferPool()
    pool.give_back(pool.take(1000))
    real, calls = np.empty, []

    def empty(n, dtype):
        calls.append(n)
        if len(calls) == 1:
            raise MemoryError
        return real(n, dtype)

    monkeypatch.setattr(np, "empty", empty)
    assert pool.take(1 << 20).size >= 1 << 20
    assert pool._free == []
    assert pool._idle == 0


def test_no_reserve_is_had_of_more_than_any_machine_has():
    def body(engine):
        values = np.ones(4, np.float32)
        engine.submit(Request("x", shape=(4,)), values).wait(20)
        return values.tolist()

    assert with_engines(2, body, fusion_threshold=10**30) == [[1.0] * 4] * 2


def test_small_buffers_beside_large_ones_cost_no_memory_in_every_step():
    pool = BufferPool()
    for step in range(4):
        for nbytes, count in ((3 << 20, 2), (5000, 1)):
            for buffer in [pool.take(nbytes) for _ in range(count)]:
                pool.give_back(buffer)
        if step == 0:
            first = {id(buffer) for buffer in pool._free}
    assert {id(buffer) for buffer in pool._free} == first
    assert pool.freed == 0


def test_nothing_keeps_a_buffer_that_the_pool_has_given_up():
    def rank_main(comm):
        engine = Engine(comm, open_control)
        try:
            pool = engine._worker.places["host"].pool
            group = engine.declare(
                "g", [Request("t", shape=(5000,), spec="int8")], [parse("int8")], [{}]
            )

            def step():
                group.submit("t", np.ones(5000, np.float32))
                group.wait(60)

            step()
            lost = [weakref.ref(buffer) for buffer in pool._free]
            other = pool.take(1 << 20)
            pool._most = 0  # so that nothing may lie unused
            pool.give_back(other)
            step()
            return len(lost), [ref() is not None for ref in lost]
        finally:
            engine.shutdown()

    for count, alive in run_local(rank_main, 2):
        assert count > 0
        assert not any(alive)


@pytest.mark.parametrize("spec", ["none", "fp16"])
def test_all_ranks_give_up_the_step_and_go_on_with_smaller_buckets(spec):
    sizes = [3000] * 8
    limit = 8 * 3000 * (4 if spec == "none" else 2)

    def body(engine):
        pool = engine._worker.places["host"].pool
        allocate = pool._allocate

        def bounded(nbytes):
            if engine.rank == 1 and nbytes > 0.6 * limit:
                raise MemoryError
            return allocate(nbytes)

        pool._allocate = bounded
        requests = [Request(f"t{i}", shape=(n,), spec=spec) for i, n in enumerate(sizes)]
        group = engine.declare("g", requests, [parse(spec)] * 8, [{} for _ in sizes])
        hashes = [group.plan.hash]

        def step():
            arrays = [np.full(n, engine.rank + 1, np.float32) for n in sizes]
            for request, array in zip(requests, arrays, strict=True):
                group.submit(request.name, array)
            group.wait(60)
            return arrays

        said = (
            "rank 1: abandoned: no memory in step 0, for a bucket of 96000 bytes; "
            "from the next step on"
        )
        with pytest.raises(OutOfMemory, match=said):
            step()
        for _ in range(3):
            for array in step():
                np.testing.assert_allclose(array, 1.5, rtol=0.02)
            hashes.append(group.plan.hash)
        return hashes, len(group.buckets)

    first, second = with_engines(2, body)
    assert first == second
    assert first[1] == 2
    assert first[0][0] != first[0][1] == first[0][3]


def test_ranks_plan_alike_though_one_fails_twice_before_another_has_begun():
    sizes = [9237, 7719, 4939, 3037, 9493, 1964, 7886]

    def body(engine):
        pool = engine._worker.places["host"].pool
        allocate, hungry = pool._allocate, [engine.rank == 0]

        def bounded(nbytes):
            if hungry[0]:
                raise MemoryError
            return allocate(nbytes)

        pool._allocate = bounded
        requests = [Request(f"t{i}", shape=(n,), spec="fp16") for i, n in enumerate(sizes)]
        group = engine.declare("g", requests, [parse("fp16")] * len(sizes), [{} for _ in sizes])

        def step():
            arrays = [np.full(n, engine.rank + 1, np.float32) for n in sizes]
            for request, array in zip(requests, arrays, strict=True):
                group.submit(request.name, array)
            group.wait(60)
            return {float(value) for array in arrays for value in array}

        def fail():
            with pytest.raises(OutOfMemory, match="repeat the step") as caught:
                step()
            return str(caught.value)

        texts = [fail(), fail()] if engine.rank == 0 else []
        # Behind both failures in the order of what ranks hear; rank 1 is still in the first step.
        engine.submit(Request("b", "barrier"), np.empty(0, np.float32), at_once=True).wait(60)
        hungry[0] = False
        texts += [fail(), fail()] if engine.rank == 1 else []
        assert [step() for _ in range(2)] == [{1.5}] * 2
        return texts, group.plan.hash

    first, second = with_engines(2, body)
    assert first == second


def starve(engine):
    """Let nothing be allocated for exchanges any more, but for what buckets send."""
    participant = engine._worker
    pool, pipeline = participant.places["host"].pool, participant.pipeline
    allocate, work, inside = pool._allocate, pipeline._work, []

    def bounded(nbytes):
        if inside:
            raise MemoryError
        return allocate(nbytes)

    def watched(exchange):
        inside.append(exchange)
        try:
            work(exchange)
        finally:
            inside.pop()

    pool._free.clear()
    pool._allocate, pipeline._work = bounded, watched


SPECS = ["int8", "topk(ratio=0.05)", "fp16", "none"]


@pytest.mark.parametrize(
    ("hosts", "hungry"), [("abc", {1}), ("abc", {0, 1, 2}), ("aabb", {1}), ("aabb", {0, 1, 2, 3})]
)
def test_without_memory_to_receive_exchanges_are_made_one_at_a_time(hosts, hungry):
    n = 30_000
    requests = [
        Request(f"{i}", shape=(n,), spec=SPECS[i % 4], op=ReduceOp.SUM, collective=way)
        for i, way in enumerate(["scatter_reduce", "auto", "auto", "auto"] * 3)
    ]
    requests.append(replace(requests[1], name="of no fixed size", spec="lossless"))
    requests.append(replace(requests[1], name="more than a bucket may hold", shape=(5 * n,)))
    singles = [Request(f"s{i}", shape=(n,), op=ReduceOp.SUM) for i in range(8)]
    halves = [Request(f"h{i}", dtype="float16", shape=(n,), op=ReduceOp.SUM) for i in range(4)]

    def rank_main(comm, hungry):
        rng = np.random.default_rng(comm.rank)
        levels = two_levels(comm, Topology.from_hosts(comm.rank, hosts))
        engine = Engine(levels, open_control, Limits(fusion_threshold=4 * n, lookahead=0))
        try:
            compressors = [parse(request.spec) for request in requests]
            group = engine.declare("g", requests, compressors, [{} for _ in requests])
            results = []
            for step in range(3):
                if step == 1 and comm.rank in hungry:
                    starve(engine)
                arrays = [
                    rng.integers(-8, 8, r.numel).astype(r.storage) for r in [*requests, *singles]
                ]
                more = [rng.integers(-8, 8, n).astype(np.float16) for _ in halves]
                for request, array in zip(requests, arrays, strict=False):
                    group.submit(request.name, array)
                work = list(
                    zip([*singles, *halves], [*arrays[len(requests) :], *more], strict=True)
                )
                handles = [engine.submit(request, array) for request, array in work]
                group.wait(60)
                for handle in handles:
                    handle.wait(60)
                results += [*arrays, *more]
            return results
        finally:
            engine.shutdown()

    expected = run_local(lambda comm: rank_main(comm, set()), len(hosts))[0]
    for results in run_local(lambda comm: rank_main(comm, hungry), len(hosts)):
        for ours, right in zip(results, expected, strict=True):
            np.testing.assert_array_equal(ours, right)


def test_no_memory_for_what_is_received_is_named_on_all_ranks():
    def rank_main(comm):
        engine = Engine(comm, open_control)
        request, n = Request("w", shape=(100_000,), spec="int8"), 100_000
        try:
            group = engine.declare("g", [request], [parse("int8")], [{}])
            group.submit("w", np.ones(n, np.float32))
            group.wait(60)
            if comm.rank == 1:
                pool = engine._worker.places["host"].pool
                pool._reserve, pool.reserve = np.empty(0, np.uint8), lambda nbytes: None
                starve(engine)
            group.submit("w", np.ones(n, np.float32))
            with pytest.raises(EngineClosed) as caught:
                group.wait(60)
            return str(caught.value)
        finally:
            engine.shutdown()

    (text,) = set(run_local(rank_main, 3))
    why = "no memory to receive a bucket of 400000 bytes"
    assert text == f"the engine broke on rank 1: MemoryError: {why}"
