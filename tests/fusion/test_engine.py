"""The engine on in-process ranks: results, agreement, and what happens when things go wrong."""

import os
import signal
import threading
import time
from contextlib import suppress

import numpy as np
import pytest
from engines import with_engines
from hypothesis import given, settings
from hypothesis import strategies as st

from ringlet.compressors import Compressor, Context, parse, register
from ringlet.compressors.specs import registry
from ringlet.fusion import (
    CompressionFailed,
    DuplicateName,
    Engine,
    EngineClosed,
    Limits,
    Request,
)
from ringlet.fusion.buckets import group as groups
from ringlet.fusion.negotiation.coordinator import Coordinator
from ringlet.fusion.negotiation.messages import DECLARE
from ringlet.fusion.queue.tensor_queue import TensorQueue
from ringlet.fusion.requests.handle import Handle
from ringlet.fusion.worker import Worker
from ringlet.ring import Mismatch, PeerLost, ReduceOp, RingError
from ringlet.ring.control.opening import open_control
from ringlet.ring.transports.local import LocalCommunicator, LocalWorld, run_local

SPECS = [
    "none", "fp16", "bf16", "int8(bucket=32)", "topk(ratio=0.2)", "int8(bucket=32) | ef",
    "topk(ratio=0.1) | ef", "topk(ratio=0.3) | int8(bucket=32) | ef", "fp16 | ef",
]  # fmt: skip


def gradient(rank, name, n, step=0):
    rng = np.random.default_rng([rank, step, *name.encode()])
    return rng.standard_normal(n).astype(np.float32)


def bits(arrays):
    return [a.tobytes() for a in arrays]


@given(
    size=st.integers(1, 4),
    spec=st.sampled_from(SPECS),
    sizes=st.lists(st.integers(1, 2500), min_size=1, max_size=6),
    op=st.sampled_from([ReduceOp.SUM, ReduceOp.AVERAGE]),
    seed=st.integers(0, 100),
)
@settings(max_examples=40)
def test_replicas_are_bit_equal_and_near_the_mean(size, spec, sizes, op, seed):
    names = [f"t{i}" for i in range(len(sizes))]

    def body(engine):
        handles = []
        order = np.random.default_rng([engine.rank, seed]).permutation(len(names))
        for i in order:
            x = gradient(engine.rank, names[i], sizes[i])
            request = Request(names[i], shape=(sizes[i],), op=op, spec=spec)
            handles.append((i, engine.submit(request, x, compressor=parse(spec))))
        return [handle.wait() for _, handle in sorted(handles, key=lambda pair: pair[0])]

    results = with_engines(size, body)
    for other in results[1:]:
        assert bits(other) == bits(results[0])
    for name, n, got in zip(names, sizes, results[0], strict=True):
        exact = np.sum([gradient(r, name, n).astype(np.float64) for r in range(size)], axis=0)
        exact = exact / size if op is ReduceOp.AVERAGE else exact
        # Two roundings of at most the compressor's own relative error, per rank and for the sum.
        allowed = {"none": 1e-6, "fp16": 2e-3, "bf16": 2e-2, "int8": 0.05, "topk": 1.0}
        kind = spec.split("(")[0].split(" ")[0]
        scale = np.sqrt(
            sum((gradient(r, name, n).astype(np.float64) ** 2).sum() for r in range(size))
        )
        assert np.linalg.norm(got - exact) <= allowed[kind] * scale * np.sqrt(size) + 1e-9


@given(
    size=st.integers(2, 4),
    spec=st.sampled_from(SPECS),
    sizes=st.lists(st.integers(1, 3000), min_size=2, max_size=8),
    threshold=st.integers(1, 40_000),
)
@settings(max_examples=25)
def test_results_do_not_depend_on_the_fusion_plan(size, spec, sizes, threshold):
    """Semantics are per tensor: another threshold, another order of arrival, the same bits."""
    names = [f"layer{i}" for i in range(len(sizes))]

    def body(engine):
        requests = [Request(n, shape=(s,), spec=spec) for n, s in zip(names, sizes, strict=True)]
        states = [{} for _ in names]
        group = engine.declare("g", requests, [parse(spec)] * len(names), states)
        collected = []
        for step in range(3):
            order = np.random.default_rng([engine.rank, step, threshold]).permutation(len(names))
            arrays = [gradient(engine.rank, n, s, step) for n, s in zip(names, sizes, strict=True)]
            for i in order:
                group.submit(names[i], arrays[i])
            group.wait()
            collected += arrays
        return bits(collected), [s.get("residual", np.empty(0)).tobytes() for s in states]

    fused = with_engines(size, body, fusion_threshold=1 << 30)
    other = with_engines(size, body, fusion_threshold=threshold)
    if spec != "none":  # a native sum may add in another order at another place of the buffer
        assert [r for _, r in fused] == [r for _, r in other]
    assert fused[0][0] == other[0][0]
    assert all(r[0] == fused[0][0] for r in fused)


def test_scatter_reduce_and_allgather_can_be_forced():
    n = 5000

    def body(engine):
        out = []
        for how in ("allgather", "scatter_reduce"):
            request = Request(how, shape=(n,), spec="int8", collective=how)
            x = gradient(engine.rank, "x", n)
            out.append(engine.submit(request, x, compressor=parse("int8")).wait())
        return out, engine.stats.wire_bytes

    results = with_engines(4, body)
    assert all(bits(r[0]) == bits(results[0][0]) for r in results)
    gathered, scattered = results[0][0]
    assert not np.array_equal(gathered, scattered)
    np.testing.assert_allclose(gathered, scattered, atol=0.03)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64", "int32", "int64", "uint8"])
@pytest.mark.parametrize("op", [ReduceOp.SUM, ReduceOp.MIN, ReduceOp.MAX, ReduceOp.PRODUCT])
def test_plain_dtypes_and_ops(dtype, op):
    def body(engine):
        x = (np.arange(7) % 3 + engine.rank).astype(dtype)
        return engine.submit(Request("x", dtype=dtype, shape=(7,), op=op), x).wait()

    results = with_engines(3, body)
    inputs = np.array([(np.arange(7) % 3 + r).astype(dtype) for r in range(3)])
    reduce = {"SUM": np.sum, "MIN": np.min, "MAX": np.max, "PRODUCT": np.prod}[op.name]
    for got in results:
        assert got.dtype == np.dtype(dtype)
        assert np.array_equal(got, reduce(inputs, axis=0).astype(dtype))


def test_fp16_averages_stay_in_range():
    def body(engine):
        x = np.full(10, 60000, np.float16)
        return engine.submit(Request("x", dtype="float16", shape=(10,)), x).wait()

    assert with_engines(4, body)[0].tolist() == [60000.0] * 10


@pytest.mark.parametrize("dtype", ["float16", "float64"])
@pytest.mark.parametrize(
    "spec",
    ["randomk(ratio=0.5)", "fp16", "int8", "topk(ratio=0.5)", "powersgd", "powersgd | shared_int"],
)
def test_every_kind_of_payload_serves_every_float(dtype, spec):
    def body(engine):
        x = np.ones(3000, dtype) * (engine.rank + 1)
        request = Request("x", dtype=dtype, shape=(60, 50), spec=spec)
        return engine.submit(request, x, compressor=parse(spec)).wait(60)

    results = with_engines(3, body)
    assert all(got.dtype == dtype and got.tobytes() == results[0].tobytes() for got in results)
    assert results[0].size == 3000
    assert 1.2 < results[0].mean(dtype="float64") < 2.8 or spec.startswith("topk")


def test_mixed_precision_travels_in_two_streams():
    def body(engine):
        requests = []
        for i in range(20):
            dtype = "float16" if i % 2 else "float32"
            requests.append(Request(f"t{i}", dtype=dtype, shape=(100,)))
        group = engine.declare("g", requests, [parse("none")] * 20, [{} for _ in range(20)])
        for request in requests:
            group.submit(request.name, np.ones(100, request.dtype))
        group.wait()
        return len(group.buckets), group.plan.hash

    results = with_engines(2, body)
    assert [count for count, _ in results] == [2, 2]
    assert len({hash_ for _, hash_ in results}) == 1


@pytest.mark.parametrize("early", [False, True])
def test_sums_begin_while_others_are_computed(early):
    def body(engine):
        requests = [Request(f"t{i}", shape=(1 << 16,)) for i in range(16)]  # 4 MiB together
        for spec in ("none", "fp16", "int8 | ef"):
            states = [{} for _ in requests]
            group = engine.declare(spec, requests, [parse(spec)] * 16, states, early=early)
            for request in reversed(requests):
                group.submit(request.name, np.full(1 << 16, engine.rank + 1, np.float32))
            group.wait(60)
            sizes = [len(bucket.members) for bucket in group.buckets]
            short = early and spec != "int8 | ef"
            assert sizes == ([4, 12] if short else [16]), spec
        return group.plan.hash

    assert len(set(with_engines(3, body))) == 1


def test_gather_and_broadcast():
    def body(engine):
        rank = engine.rank
        rows = np.full((rank + 1) * 2, rank, np.int64)
        gathered = engine.submit(Request("g", "allgather", "int64", (rank + 1, 2)), rows).wait()
        sent = engine.submit(
            Request("b", "broadcast", "float64", (3,), root=1), np.full(3, float(rank))
        ).wait()
        return gathered.tolist(), sent.tolist()

    for gathered, sent in with_engines(3, body):
        assert gathered == [0] * 2 + [1] * 4 + [2] * 6
        assert sent == [1.0] * 3


def test_a_mismatch_is_the_same_error_everywhere_and_the_engine_goes_on():
    def body(engine):
        n = 4 + (engine.rank == 2)
        with pytest.raises(Mismatch) as caught:
            engine.submit(Request("w", shape=(n,)), np.zeros(n, np.float32)).wait()
        after = engine.submit(Request("w", shape=(4,)), np.ones(4, np.float32)).wait()
        return str(caught.value), after.tolist()

    results = with_engines(3, body)
    assert len({text for text, _ in results}) == 1
    assert "'w'" in results[0][0]
    assert "rank 2: [5]" in results[0][0]
    assert results[0][1] == [1.0] * 4


def test_a_group_mismatch_is_the_same_error_everywhere():
    def body(engine):
        names = ["a", "b"] if engine.rank else ["a", "b", "c"]
        requests = [Request(name, shape=(2,)) for name in names]
        compressors = [parse("none")] * len(names)
        with pytest.raises(Mismatch) as caught:
            engine.declare("g", requests, compressors, [{} for _ in names])
        return str(caught.value)

    assert set(with_engines(3, body)) == {"tensor 'c' is declared on rank 0 but not on ranks 1, 2"}


@pytest.mark.timeout(60)
def test_a_name_that_stands_twice_in_one_call_is_refused_also_by_number():
    def body(engine):
        request, found = Request("w", shape=(4,), op=ReduceOp.SUM), []
        for _ in range(3):  # from the second time on it is asked for by its number
            x, y = np.ones(4, np.float32), np.ones(4, np.float32)
            with pytest.raises(DuplicateName, match="'w' was submitted again"):
                engine.submit_all([(request, x, None, None), (request, y, None, None)])
            engine.submit_all([(request, x, None, None)])[0].wait(60)
            found.append(x.tolist())
        return found

    assert with_engines(2, body) == [[[2.0] * 4] * 3] * 2


def test_a_name_in_flight_cannot_be_used_again():
    gate = threading.Barrier(2)

    def body(engine):
        x = np.zeros(4, np.float32)
        if engine.rank == 0:
            handle = engine.submit(Request("x", shape=(4,)), x)
            with pytest.raises(DuplicateName, match="'x' was submitted again"):
                engine.submit(Request("x", shape=(4,)), x)
            gate.wait(60)
            handle.wait()
        else:
            gate.wait(60)
            engine.submit(Request("x", shape=(4,)), x).wait()
        with pytest.raises(DuplicateName, match="'y'"):
            engine.declare("g", [Request("y")] * 2, [parse("none")] * 2, [{}, {}])
        return True

    assert all(with_engines(2, body))


@pytest.fixture
def faulty(monkeypatch):
    """A compressor that can be told to fail on one rank, in one method."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    fault: dict = {}

    @register("faulty")
    class Faulty(Compressor):
        def compress(self, x, ctx: Context):
            if fault.get("compress") == ctx.rank:
                raise KeyError("lost my keys")
            if fault.get("type") == ctx.rank:
                return x
            return {"values": x}

        def decompress(self, payload, out, ctx: Context):
            if fault.get("decompress") == ctx.rank:
                raise KeyError("lost my keys")
            out[:] = payload["values"]

    return fault


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("where", ["compress", "type"])
def test_a_plugin_that_fails_on_one_rank_is_named_on_all(faulty, where, declared):
    def body(engine):
        request = Request("w", shape=(2000,), spec="faulty")
        x = np.ones(2000, np.float32)
        compressor = parse("faulty")
        if declared:
            group = engine.declare("g", [request], [compressor], [{}])

            def step():
                group.submit("w", x.copy())
                group.wait(60)
        else:

            def step():
                engine.submit(request, x.copy(), compressor=compressor).wait(60)

        step()
        engine.submit(Request("sync"), np.zeros(1, np.float32)).wait()
        faulty[where] = 1
        with pytest.raises(CompressionFailed) as caught:
            step()
        engine.submit(Request("sync"), np.zeros(1, np.float32)).wait()
        faulty.clear()
        engine.submit(Request("sync"), np.zeros(1, np.float32)).wait()
        step()
        return str(caught.value)

    texts = set(with_engines(3, body))
    assert len(texts) == 1
    (text,) = texts
    assert text.startswith("rank 1: ")
    assert "faulty" in text
    assert "'w'" in text or where == "type"


def test_a_plugin_that_fails_to_decode_fails_every_step_that_it_fails(faulty):
    faulty["decompress"] = 2

    def body(engine):
        request = Request("w", shape=(2000,), spec="faulty")
        x = np.ones(2000, np.float32)
        texts = []
        for _ in range(2):
            with pytest.raises(CompressionFailed) as caught:
                engine.submit(request, x, compressor=parse("faulty")).wait(60)
            texts.append(str(caught.value))
        return tuple(texts)

    (texts,) = set(with_engines(3, body))
    for text in texts:
        assert text.startswith("rank 2: compressor 'faulty' failed in ")
        assert "lost my keys" in text


@pytest.mark.parametrize("declared", [True, False])
def test_a_plugin_that_fails_on_a_sum_is_named_on_all_and_the_engine_goes_on(
    declared, brittle, reducer
):
    def body(engine):
        reduce = reducer(engine, 3000, declared)

        def step():
            x = np.full(3000, engine.rank, np.float32)
            reduce(x)
            np.testing.assert_array_equal(x, np.ones(3000, np.float32))

        def sync():
            engine.submit(Request("sync"), np.zeros(1, np.float32)).wait(60)

        step()
        sync()
        brittle["when"] = lambda ctx: ctx.stage == 2 and ctx.rank == 2
        with pytest.raises(CompressionFailed) as caught:
            step()
        sync()
        brittle.clear()
        sync()
        step()
        return str(caught.value)

    (text,) = set(with_engines(3, body))
    assert text.startswith("rank 2: ")
    assert "'w'" in text
    assert "lost my keys" in text


def test_a_failure_that_comes_before_the_last_step_was_collected_is_the_next_steps(faulty):
    """One rank is slow to wait for a finished step; meanwhile another fails in the next one."""
    failed = threading.Event()

    def body(engine):
        request = Request("w", shape=(2000,), spec="faulty")
        group = engine.declare("g", [request], [parse("faulty")], [{}])
        x = np.ones(2000, np.float32)
        group.submit("w", x.copy())
        if engine.rank == 2:
            with group._ended:  # done, but not collected
                assert group._ended.wait_for(lambda: group.ended, 60)
            assert failed.wait(60)
            # The verdict on the next step has passed this engine when a later request is through.
            engine.submit(Request("passed"), np.zeros(1, np.float32)).wait(60)
        group.wait(60)
        if engine.rank == 1:
            faulty["compress"] = 1
        group.submit("w", x.copy())
        with pytest.raises(CompressionFailed, match="rank 1"):
            group.wait(60)
        failed.set()
        if engine.rank != 2:
            engine.submit(Request("passed"), np.zeros(1, np.float32)).wait(60)
        engine.submit(Request("sync"), np.zeros(1, np.float32)).wait(60)
        faulty.clear()
        engine.submit(Request("sync"), np.zeros(1, np.float32)).wait(60)
        group.submit("w", x)
        group.wait(60)
        return True

    assert all(with_engines(3, body))


@pytest.mark.parametrize("kind", ["allreduce", "broadcast", "allgather", "declared"])
def test_a_transport_that_fails_in_the_middle_leaves_nobody_waiting(kind):
    def body(engine):
        request = Request("x", kind if kind != "declared" else "allreduce", shape=(2000,))
        x = np.ones(2000, np.float32)
        if engine.rank == 1:

            def broken(*args, **kwargs):
                raise OSError("the cable was cut")

            for method in ("allreduce", "broadcast", "allgather"):
                setattr(engine.comm, method, broken)
        if kind == "declared":
            group = engine.declare("g", [request], [parse("none")], [{}])
            group.submit("x", x)
            wait = group.wait
        else:
            wait = engine.submit(request, x).wait
        with pytest.raises(EngineClosed) as caught:
            wait(60)
        return str(caught.value)

    (text,) = set(with_engines(3, body))
    assert text == "the engine broke on rank 1: OSError: the cable was cut"


@pytest.mark.parametrize("first", [0, 1])
def test_submitting_after_shutdown_is_an_error(first):
    """Also on a rank that shuts down while the coordinator, rank 0, is gone already."""
    closing, gone = threading.Event(), threading.Event()

    def body(engine):
        group = engine.declare("g", [Request("y", shape=(1,))], [parse("none")], [{}])
        if engine.rank == first:
            assert closing.wait(60)
        else:
            send = engine._control.send

            def last(message):
                closing.set()
                assert gone.wait(60)
                send(message)

            engine._control.send = last
        engine.shutdown()
        gone.set()
        group.submit("y", np.zeros(1, np.float32))
        with pytest.raises(EngineClosed, match="wrap optimizers again"):
            group.wait()
        with pytest.raises(EngineClosed):
            engine.submit(Request("x", shape=(1,)), np.zeros(1, np.float32))
        return True

    assert all(with_engines(2, body))


@pytest.mark.parametrize("where", ["a group's lock", "the queue's lock", "the lifetime's lock"])
def test_a_handler_can_shut_down_whatever_it_interrupts(where, monkeypatch):
    """As SIGTERM's of a batch system: the engine's thread needs the locks that are held there."""
    holder, name = {
        "a group's lock": (groups, "lies_well"),
        "the queue's lock": (TensorQueue, "_admit"),
        "the lifetime's lock": (Worker, "expect"),
    }[where]
    engines = {}

    def interrupted(*args):
        engines[threading.get_ident()].shutdown()
        raise SystemExit  # as the handler does

    def body(engine):
        engines[threading.get_ident()] = engine
        declared = engine.declare("g", [Request("y", shape=(4,))], [parse("none")], [{}])
        monkeypatch.setattr(holder, name, interrupted)
        values, request = np.ones(4, np.float32), Request("x", shape=(4,))
        call = {
            groups: lambda: declared.submit("y", values),
            TensorQueue: lambda: engine.submit_all([(request, values, None, None)]),
            Worker: lambda: engine.add_process_set([0]),
        }[holder]
        with pytest.raises(SystemExit):
            call()
        return not engine._thread.is_alive()

    found = []
    thread = threading.Thread(target=lambda: found.append(with_engines(1, body)), daemon=True)
    thread.start()
    thread.join(20)
    assert found == [[True]]


@pytest.mark.parametrize("many", [False, True])
def test_what_a_handler_that_shuts_down_has_interrupted_ends_too(many, monkeypatch):
    """The engine has ended all that was in flight before this is."""
    begin = TensorQueue._admit
    engines = []

    def interrupted(queue, works):
        begin(queue, works)
        engines[0].shutdown()  # and the handler returns

    def body(engine):
        engines.append(engine)
        values, request = np.ones(4, np.float32), Request("x", group="g", group_size=1, shape=(4,))
        monkeypatch.setattr(TensorQueue, "_admit", interrupted)
        if many:
            (handle,) = engine.submit_all([(request, values, None, None)])
        else:
            handle = engine.submit(request, values)
        with pytest.raises(EngineClosed):
            handle.wait(20)
        return True

    assert with_engines(1, body) == [True]


@pytest.mark.parametrize("how", ["shuts down", "raises"])
def test_no_handler_runs_in_the_midst_of_a_message(how, monkeypatch):
    """It would cut the message off, or rank 0's coordinator, or wait for a thread that waits."""
    real, interrupted = Coordinator.on_message, []

    def handle(*_):
        if how == "raises":
            raise KeyboardInterrupt
        engine.shutdown()

    def on_message(coordinator, rank, message):
        if not interrupted and message[:1] == DECLARE:
            interrupted.append(True)
            os.kill(os.getpid(), signal.SIGUSR1)
            time.sleep(0.05)
        return real(coordinator, rank, message)

    monkeypatch.setattr(Coordinator, "on_message", on_message)
    before = signal.signal(signal.SIGUSR1, handle)
    engine = Engine(LocalWorld(1).communicators[0], open_control, Limits())
    try:
        ends = suppress(RingError) if how == "shuts down" else pytest.raises(KeyboardInterrupt)
        with ends:
            engine.declare("g", [Request("y", shape=(4,))], [parse("none")], [{}])
        assert interrupted
        assert engine._thread.is_alive() == (how == "raises")
        if how == "raises":  # and goes on
            group = engine.declare("h", [Request("z", shape=(4,))], [parse("none")], [{}])
            group.submit("z", np.ones(4, np.float32))
            group.wait(60)
    finally:
        signal.signal(signal.SIGUSR1, before)
        engine.shutdown()


def test_who_shuts_down_second_waits_for_the_end_too():
    """Else the communicator would be closed under what the first has promised."""

    def body(engine):
        ending, go_on = threading.Event(), threading.Event()
        engine.extensions.when_over(lambda: (ending.set(), go_on.wait(60)))
        both = [threading.Thread(target=engine.shutdown) for _ in range(2)]
        both[0].start()
        assert ending.wait(60)
        both[1].start()
        both[1].join(0.2)
        waits = both[1].is_alive()
        go_on.set()
        for thread in both:
            thread.join(60)
        return waits

    assert with_engines(1, body) == [True]


def test_an_engine_that_cannot_be_made_on_one_rank_is_told_to_the_others(tmp_path):
    """That rank's program may go on, such as in a debugger."""
    limits = Limits(autotune="cycle_time", autotune_log=str(tmp_path / "nowhere" / "log"))
    told = threading.Event()

    def rank_main(comm):
        if comm.rank == 0:
            with pytest.raises(FileNotFoundError):
                Engine(comm, open_control, limits)
            assert told.wait(60)
            return ""
        engine = Engine(comm, open_control, limits)
        with pytest.raises(EngineClosed) as caught:
            engine.submit(Request("x", shape=(1,)), np.zeros(1, np.float32)).wait(20)
        told.set()
        engine.shutdown()
        return str(caught.value)

    _, text = run_local(rank_main, 2)
    assert text.startswith("the engine broke on rank 0: FileNotFoundError: ")


@pytest.mark.parametrize("what", ["a group's step", "a handle"])
def test_a_forked_child_does_not_wait_for_its_parents_engine(what):
    """What was handed in before is the parent's."""

    def body(engine):
        group = engine.declare("g", [Request("y", shape=(1,))], [parse("none")], [{}])
        waiting = group if what == "a group's step" else Handle("x", engine._signal)
        child = os.fork()
        if not child:
            code = 1
            try:
                waiting.wait(10)
            except EngineClosed as error:
                code = 0 if "was forked after init" in str(error) else 2
            finally:
                os._exit(code)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])

    assert with_engines(1, body) == [0]


def test_a_rank_that_leaves_fails_those_who_wait_for_it():
    def body(engine):
        if engine.rank == 1:
            return ""
        with pytest.raises(PeerLost) as caught:
            engine.submit(Request("x", shape=(1,)), np.zeros(1, np.float32)).wait(60)
        return str(caught.value)

    assert "rank 1 has shut down" in with_engines(2, body)[0]


def test_what_is_under_way_ends_though_the_coordinator_has_left(monkeypatch):
    """Rank 0 may be through with an exchange, and gone, before rank 1 has seen its end."""
    gone, real = threading.Event(), LocalCommunicator._allreduce

    def slow(self, buffer, op, name):
        real(self, buffer, op, name)
        assert self.rank == 0 or buffer.size < 1 << 16 or gone.wait(60)

    monkeypatch.setattr(LocalCommunicator, "_allreduce", slow)

    def rank_main(comm):
        engine = Engine(comm, open_control)
        try:
            request = Request("x", shape=(1 << 16,), op=ReduceOp.SUM)
            return engine.submit(request, np.ones(1 << 16, np.float32)).wait(60).sum()
        finally:
            engine.shutdown()
            gone.set()

    assert run_local(rank_main, 2) == [2.0 * (1 << 16)] * 2
