"""What works alone, together: cached numbers, groups, mismatches, retries, joins, sets, departures.

Each test shows a fault that was found from outside: wrong sums, a hang, or the end of the engine.
"""

import gc
import logging
import threading
import time
import weakref

import numpy as np
import pytest
from engines import with_engines

from ringlet.compressors import CompressorError, parse
from ringlet.fusion import DuplicateName, Engine, EngineClosed, Limits, Request, StepAbandoned
from ringlet.fusion.negotiation import messages as m
from ringlet.fusion.requests.request import dumps
from ringlet.ring import Mismatch, PeerLost
from ringlet.ring.control.opening import open_control
from ringlet.ring.transports.local import run_local

WAIT = 20  # seconds after which something hangs


def ones(n, value=1.0):
    return np.full(n, value, np.float32)


def submit(engine, name, n=4, kind="allreduce", value=None, **fields):
    request = Request(name, kind, shape=(n,), **fields)
    return engine.submit(request, ones(n, engine.rank + 0.5 if value is None else value))


def grouped(engine, sizes, group="g"):
    """Submit {name: elements} as one group; the mean of ranks' values is (size) / 2."""
    items = [
        (Request(name, shape=(n,), group=group, group_size=len(sizes)), ones(n, engine.rank + 0.5))
        for name, n in sizes.items()
    ]
    return engine.submit_all([(request, x, None, None) for request, x in items])


def mismatch(handles):
    for handle in handles:
        with pytest.raises(Mismatch):
            handle.wait(WAIT)


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("odd", ["a", "b", "c"])
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("where", [0, 1])
def test_a_group_that_was_refused_can_be_asked_for_again(size, odd, cached, where):
    plain = {"a": 4, "b": 4, "c": 4}

    def body(engine):
        for _ in range(2 if cached else 0):
            for handle in grouped(engine, plain):
                handle.wait(WAIT)
        for _ in range(2):
            wrong = plain | {odd: 5} if engine.rank == where else plain
            mismatch(grouped(engine, wrong))
            found = [float(handle.wait(WAIT)[0]) for handle in grouped(engine, plain)]
            assert found == [size / 2] * 3
        return float(submit(engine, "after").wait(WAIT)[0])

    assert with_engines(size, body) == [size / 2] * size


@pytest.mark.parametrize("cached", [False, True])
def test_ranks_whose_groups_have_other_members_are_told(cached):
    def body(engine):
        for _ in range(2 if cached else 0):
            for handle in grouped(engine, {"a": 4, "b": 4, "c": 4}):
                handle.wait(WAIT)
        names = ["a", "b"] if engine.rank == 0 else ["a", "c"]
        for handle in grouped(engine, dict.fromkeys(names, 4)):
            with pytest.raises(Mismatch, match="group"):
                handle.wait(WAIT)
        return [float(handle.wait(WAIT)[0]) for handle in grouped(engine, {"a": 4, "b": 4})]

    assert with_engines(2, body) == [[1.0, 1.0]] * 2


def test_a_rank_joins_while_a_group_is_refused():
    joining = threading.Event()

    def body(engine):
        if engine.rank == 2:
            joining.set()
            return engine.join()
        assert joining.wait(WAIT)
        wrong = {"a": 5 if engine.rank else 4, "b": 4}
        mismatch(grouped(engine, wrong))
        found = [float(handle.wait(WAIT)[0]) for handle in grouped(engine, {"a": 4, "b": 4})]
        assert found == [pytest.approx(2 / 3)] * 2
        return engine.join()

    assert len(set(with_engines(3, body))) == 1


@pytest.mark.parametrize("rows", [[(4, 4), (6, 6), (4, 6), (6, 4), (4, 4)]])
@pytest.mark.parametrize("kind", ["allgather", "alltoall"])
def test_a_name_whose_rows_change_on_some_ranks_only(kind, rows):
    def body(engine):
        sums = []
        for per_rank in rows:
            n = per_rank[engine.rank]
            splits = (n // 2, n - n // 2) if kind == "alltoall" else ()
            handle = submit(engine, "x", n, kind, value=1.0, splits=splits)
            sums.append(float(handle.wait(WAIT).sum()))
        return sums

    both = [sum(per_rank) for per_rank in rows]
    expected = [both, both] if kind == "allgather" else [[n / 2 for n in both]] * 2
    assert with_engines(2, body) == expected


def test_a_name_whose_shape_changes_on_one_rank_is_a_mismatch():
    def body(engine):
        for n in (4, 6):
            submit(engine, "x", n).wait(WAIT)
        with pytest.raises(Mismatch, match=r"rank 0: \[4\]; rank 1: \[6\]"):
            submit(engine, "x", 6 if engine.rank else 4).wait(WAIT)
        return float(submit(engine, "x", 4).wait(WAIT)[0])

    assert with_engines(2, body) == [1.0, 1.0]


def test_what_was_submitted_before_a_join_counts():
    def body(engine):
        handles = [submit(engine, f"t{i}") for i in range(40)]
        last = engine.join()
        return last, [float(handle.wait(WAIT)[0]) for handle in handles]

    for _, found in with_engines(2, body, cycle_time=0.05):
        assert found == [1.0] * 40


def test_everybody_joined_leaves_nothing_waiting():
    joined = threading.Barrier(2)

    def body(engine):
        handle = submit(engine, "late") if engine.rank == 0 else None
        joined.wait(WAIT)
        engine.join()
        return float(handle.wait(WAIT)[0]) if handle else 0.25

    assert with_engines(2, body) == [0.25, 0.25]


def test_process_sets_after_a_rank_has_left():
    left = threading.Event()
    told = threading.Barrier(2)  # rank 0 must not leave before

    def body(engine):
        if engine.rank == 2:
            engine.shutdown()
            left.set()
            return "left"
        assert left.wait(WAIT)
        with pytest.raises((PeerLost, Mismatch), match="rank 2 has shut down"):
            engine.add_process_set([0, 1])
        with pytest.raises((PeerLost, Mismatch), match="rank 2 has shut down"):
            submit(engine, "x").wait(WAIT)
        told.wait(WAIT)
        return "told"

    assert with_engines(3, body) == ["told", "told", "left"]


def test_a_rank_leaves_while_others_call_for_a_process_set():
    called = threading.Barrier(2)

    def body(engine):
        if engine.rank == 1:
            called.wait(WAIT)
            return ""
        waiting = threading.Timer(0.2, called.wait, [WAIT])
        waiting.start()
        with pytest.raises((PeerLost, Mismatch)) as caught:
            engine.add_process_set([0, 1])
        waiting.join()
        return str(caught.value)

    assert "rank 1 has shut down" in with_engines(2, body)[0]


def test_a_process_set_is_removed_with_something_pending():
    asked = threading.Event()

    def body(engine):
        number = engine.add_process_set([0, 1])
        request = Request("w", shape=(4,), process_set=number)
        group = engine.declare("g", [request], [parse("none")], [{}], process_set=number)
        told = []
        if engine.rank == 0:
            handle = submit(engine, "x", process_set=number)
            group.submit("w", ones(4))
            asked.set()
        assert asked.wait(WAIT)
        engine.remove_process_set(number)
        if engine.rank == 0:
            for wait in (handle.wait, group.wait):
                with pytest.raises(Mismatch, match=f"process set {number} was removed") as caught:
                    wait(WAIT)
                told.append(caught.value)
        with pytest.raises(ValueError, match="does not belong to process set"):
            submit(engine, "x", process_set=number)
        return float(submit(engine, "y").wait(WAIT)[0])

    assert with_engines(2, body) == [1.0, 1.0]


@pytest.mark.parametrize("ranks", [[0, 5], [1, 0], [0, 0], []])
def test_a_process_set_that_cannot_be_is_refused(ranks):
    def body(engine):
        with pytest.raises(Mismatch, match="process set"):
            engine.add_process_set(ranks)
        return float(submit(engine, "y").wait(WAIT)[0])

    assert with_engines(2, body) == [1.0, 1.0]


@pytest.mark.parametrize("call", ["declare", "add_process_set"])
def test_the_stall_inspector_sees_who_does_not_call(call, caplog):
    def body(engine):
        if engine.rank == 1:
            with pytest.raises(EngineClosed, match="a stall of more than"):
                submit(engine, "x").wait(WAIT)
            return
        request = Request("w", shape=(4,))
        arguments = ["model", [request], [parse("none")], [{}]] if call == "declare" else [[0, 1]]
        with pytest.raises(EngineClosed, match="a stall of more than"):
            getattr(engine, call)(*arguments)

    with caplog.at_level(logging.WARNING, "ringlet"):
        with_engines(2, body, stall_warning=0.2, stall_shutdown=0.6)
    text = "\n".join(record.getMessage() for record in caplog.records)
    what = "the declaration of 'model'" if call == "declare" else "the call to add [0, 1]"
    assert f"{what}: " in text
    assert "ready on rank 0, waiting for rank 1" in text


@pytest.mark.parametrize("declared", [False, True])
def test_a_job_that_goes_on_is_no_stall(declared):
    """Names that come back many times within the limit do not add up to one long wait."""

    def body(engine):
        request = Request("w", shape=(4,))
        group = engine.declare("g", [request], [parse("none")], [{}]) if declared else None
        end = time.monotonic() + 2.0
        steps = 0
        going = ones(1, 1.0)
        while going[0] > 0:
            if engine.rank:
                time.sleep(0.02)  # the others always wait for this one
            if group is None:
                submit(engine, "w").wait(WAIT)
            else:
                group.submit("w", ones(4))
                group.wait(WAIT)
            steps += 1
            going = ones(1, 1.0 if time.monotonic() < end or steps <= 10 else 0.0)
            engine.submit(Request("going", "broadcast", shape=(1,)), going).wait(WAIT)
        return steps

    assert min(with_engines(2, body, stall_warning=0.0, stall_shutdown=0.6)) > 10


@pytest.mark.parametrize("fault", ["twice", "compressor"])
def test_a_declaration_that_fails_on_one_rank_is_told_to_all(fault):
    def body(engine):
        requests = [Request("a", shape=(4000,)), Request("b", shape=(4000,))]
        specs = [parse("none")] * 2
        if engine.rank == 1 and fault == "twice":
            requests[1] = requests[0]
        elif engine.rank == 1:
            requests[1] = Request("b", shape=(4000,), spec="int8", collective="sum")
            specs[1] = parse("int8")
        expected = (DuplicateName, CompressorError) if engine.rank == 1 else Mismatch
        with pytest.raises(expected) as caught:
            engine.declare("model", requests, specs, [{}, {}])
        requests = [Request("a", shape=(4,)), Request("b", shape=(4,))]
        group = engine.declare("model", requests, [parse("none")] * 2, [{}, {}])
        x = ones(4, engine.rank + 0.5)
        for name in "ab":
            group.submit(name, x.copy() if name == "a" else x)
        group.wait(WAIT)
        return str(caught.value), float(x[0])

    (told, x), _, (also, _) = with_engines(3, body)
    assert told == also
    assert "'model' was not declared: rank 1: " in told
    assert x == 1.5


@pytest.mark.parametrize("n", [5000, 1 << 16])  # of which the larger one waits on a lane
def test_nothing_is_kept_of_a_step_but_what_was_asked_for(n):
    def body(engine):
        group = engine.declare("g", [Request("w", shape=(n,))], [parse("none")], [{}])
        kept = []
        for name in ("w", "single", "single"):
            x = ones(n)
            kept.append(weakref.ref(x))
            if name == "w":
                group.submit("w", x)
                group.wait(WAIT)
            else:
                engine.submit(Request(name, shape=(n,)), x).wait(WAIT)
            del x
        submit(engine, "last").wait(WAIT)
        gc.collect()
        return [ref() is None for ref in kept]

    assert with_engines(2, body) == [[True] * 3] * 2


def test_the_cache_makes_room_for_tensors_that_come_again():
    def body(engine):
        sent = []
        send = engine._control.send
        engine._control.send = lambda message: (sent.append(message[:1]), send(message))
        for step in range(30):
            handles = [submit(engine, f"steady{i}") for i in range(4)]
            for handle in handles:
                handle.wait(WAIT)
            if step < 20:
                submit(engine, f"one off {step}").wait(WAIT)
        return [kind for kind in sent if kind != m.DIGESTS]

    for sent in with_engines(2, body, cache_capacity=8):
        assert sent[-5:] == [m.HITS] * 5, sent


def test_members_of_names_that_do_not_return_are_not_kept():
    def body(engine):
        for i in range(300):
            submit(engine, f"one off {i}").wait(WAIT)
        return len(engine._worker.requests._members)

    from ringlet.fusion.queue import request_executor as requests

    most = requests._MEMBERS
    try:
        requests._MEMBERS = 100
        assert with_engines(2, body) == [100, 100]
    finally:
        requests._MEMBERS = most


@pytest.mark.parametrize("spec", ["none", "int8", "fp16", "powersgd"])
def test_ranks_that_plan_differently_are_told(spec):
    def body(comm):
        limits = Limits(fusion_threshold=1 << 20 if comm.rank else 20_000)
        engine = Engine(comm, open_control, limits)
        try:
            requests = [Request(n, shape=(64, 64), spec=spec) for n in "abc"]
            group = engine.declare("g", requests, [parse(spec)] * 3, [{}, {}, {}])
            for name in "abc":
                group.submit(name, ones(4096))
            with pytest.raises(Mismatch, match="plans differ between ranks") as caught:
                group.wait(WAIT)
            for name in "abc":
                group.submit(name, ones(4096))
            with pytest.raises(Mismatch):
                group.wait(WAIT)
            return str(caught.value), float(submit(engine, "x").wait(WAIT)[0])
        finally:
            engine.shutdown()

    (told, x), (also, _) = run_local(body, 2)
    assert told == also
    assert x == 1.0


@pytest.mark.parametrize("failures", [1, 2, 3])
@pytest.mark.parametrize("spec", ["none", "int8 | ef", "fp16"])
@pytest.mark.parametrize("how", ["abandon", "begin and abandon"])
def test_steps_given_up_in_a_row_while_another_rank_is_slower(failures, spec, how):
    """Each rank sees each step fail once; afterwards all are in the same step."""
    gave_up = threading.Event()

    def body(engine):
        requests = [Request(n, shape=(3000,), spec=spec) for n in "ab"]
        group = engine.declare("g", requests, [parse(spec)] * 2, [{}, {}])

        def step(value):
            x = [ones(3000, value), ones(3000, value)]
            for name, values in zip("ab", x, strict=True):
                group.submit(name, values)
            group.wait(WAIT)
            return float(x[0][0])

        values = [step(engine.rank)]
        if engine.rank == 0:
            for i in range(failures):
                if how != "abandon":
                    group.submit("a", ones(3000))
                group.abandon(f"number {i}")
            gave_up.set()
        else:
            assert gave_up.wait(WAIT)
            for i in range(failures):
                with pytest.raises(StepAbandoned, match=f"rank 0: abandoned: number {i}"):
                    step(7.0)
        # Steps are told apart by their values: rank 0's first one must meet rank 1's first one.
        values += [step(10.0 * i + engine.rank) for i in range(3)]
        return values, group.step

    for values, step in with_engines(2, body):
        assert values == pytest.approx([0.5, 0.5, 10.5, 20.5], abs=0.1)
        assert step == 4 + failures


def test_a_step_that_was_reduced_cannot_be_given_up():
    done = threading.Barrier(2)

    def body(engine):
        group = engine.declare("g", [Request("w", shape=(4,))], [parse("none")], [{}])
        x = ones(4, engine.rank + 0.5)
        group.submit("w", x)
        if engine.rank == 0:
            group.wait(WAIT)
        done.wait(WAIT)
        if engine.rank == 1:
            with pytest.raises(RuntimeError, match="was reduced on all ranks before this rank"):
                group.abandon("changed my mind")
            group.wait(WAIT)
        y = ones(4, engine.rank + 0.5)
        group.submit("w", y)
        group.wait(WAIT)
        return float(x[0]), float(y[0]), group.step

    assert with_engines(2, body) == [(1.0, 1.0, 2)] * 2


def test_giving_up_after_being_told_gives_nothing_up():
    def alternating(engine):
        group = engine.declare("g", [Request(n, shape=(4,)) for n in "ab"],
                               [parse("none")] * 2, [{}, {}])  # fmt: skip
        group.submit("a", ones(4))
        if engine.rank == 0:
            group.abandon("first")
        else:
            group.submit("b", ones(4))
            with pytest.raises(StepAbandoned):
                group.wait(WAIT)
            group.abandon("in the handler of what was just told")
        x = ones(4, engine.rank + 0.5)
        group.submit("a", x)
        group.submit("b", ones(4))
        group.wait(WAIT)
        return float(x[0]), group.step

    assert with_engines(2, alternating) == [(1.0, 2)] * 2


def test_joining_in_the_middle_of_a_step_is_refused():
    def body(engine):
        group = engine.declare("g", [Request(n, shape=(4,)) for n in "ab"],
                               [parse("none")] * 2, [{}, {}])  # fmt: skip
        group.submit("a", ones(4))
        with pytest.raises(RuntimeError, match="a step of 'g' is under way"):
            engine.join()
        group.submit("b", ones(4))
        group.wait(WAIT)
        return engine.join() in (0, 1)

    assert with_engines(2, body) == [True, True]


def test_a_rank_that_dropped_its_group_and_joined_keeps_nobody_waiting():
    def body(engine):
        group = engine.declare("g", [Request("w", shape=(4,))], [parse("none")], [{}])
        found = []
        for step in range(4 if engine.rank else 2):
            x = ones(4, engine.rank + step)
            group.submit("w", x)
            group.wait(WAIT)
            found.append(float(x[0]))
        engine.release(group)
        engine.join()
        submit(engine, "after").wait(WAIT)
        return found, len(engine._worker._groups)

    (short, _), (long, _) = with_engines(2, body)
    assert short == [0.5, 1.5]
    assert long == [0.5, 1.5, 1.5, 2.0]


def test_groups_that_all_ranks_have_released_are_forgotten():
    def body(engine):
        for i in range(20):
            group = engine.declare(f"g{i}", [Request("w", shape=(4,))], [parse("none")], [{}])
            group.submit("w", ones(4))
            if i % 2:
                group.wait(WAIT)
            else:
                submit(engine, "x").wait(WAIT)  # reduced by then, and never collected
            engine.release(group)
        for _ in range(3):
            submit(engine, "x").wait(WAIT)
        return len(engine._worker._groups), len(engine._worker._released)

    assert with_engines(2, body) == [(0, 0)] * 2


@pytest.mark.parametrize("second", ["wait", "abandon"])
def test_two_threads_may_wait_for_one_step(second):
    waiting = threading.Barrier(2)

    def body(engine):
        group = engine.declare("g", [Request(n, shape=(4,)) for n in "ab"],
                               [parse("none")] * 2, [{}, {}])  # fmt: skip
        group.submit("a", ones(4))
        outcomes = []

        def wait():
            try:
                outcomes.append(group.wait(WAIT))
            except StepAbandoned as error:
                outcomes.append(type(error))

        threads = [threading.Thread(target=wait) for _ in range(2)]
        for thread in threads:
            thread.start()
        waiting.wait(WAIT)
        if second == "wait":
            group.submit("b", ones(4))
        elif engine.rank == 0:
            group.abandon("by a watchdog")
        for thread in threads:
            thread.join(WAIT)
            assert not thread.is_alive()
        x = ones(4, engine.rank + 0.5)
        group.submit("a", x)
        group.submit("b", ones(4))
        group.wait(WAIT)
        return set(outcomes), float(x[0]), group.step

    expected = {None} if second == "wait" else {StepAbandoned}
    assert with_engines(2, body) == [(expected, 1.0, 2)] * 2


@pytest.mark.parametrize("how", ["given up", "restarted"])
def test_new_limits_find_a_step_that_no_rank_has_begun(how):
    """However far steps are apart that were given up, or that schedules go back to."""
    ahead = threading.Event()

    def body(engine):
        requests = [Request(n, shape=(3000,)) for n in "ab"]
        group = engine.declare("g", requests, [parse("none")] * 2, [{}, {}])

        def step(value):
            x = [ones(3000, value), ones(3000, value)]
            for name, values in zip("ab", x, strict=True):
                group.submit(name, values)
            group.wait(WAIT)
            return float(x[0][0])

        step(1.0)
        if how == "restarted":
            group.restart(1000 if engine.rank else 0)
        elif engine.rank == 1:
            for _ in range(7):
                group.abandon("a test")
        if engine.rank == 1:
            ahead.set()
        assert ahead.wait(WAIT)
        if engine.rank == 0:
            engine.tuning.announce({"fusion_threshold": 4096})
            engine.extensions.settle()
            for _ in range(7 if how == "given up" else 0):
                with pytest.raises(StepAbandoned):
                    step(9.0)
        found = [step(engine.rank + 10.0 * i) for i in range(8)]
        return found, len(group.buckets)

    assert with_engines(2, body) == [([0.5 + 10 * i for i in range(8)], 2)] * 2


def test_a_failed_step_is_told_though_the_other_rank_has_left():
    left = threading.Event()

    def body(engine):
        group = engine.declare("g", [Request("w", shape=(4,))], [parse("none")], [{}])
        if engine.rank == 1:
            group.abandon("no more batches")
            engine.shutdown()
            left.set()
            return
        assert left.wait(WAIT)
        group.submit("w", ones(4))
        with pytest.raises(StepAbandoned, match="no more batches"):
            group.wait(WAIT)

    with_engines(2, body)


def test_a_plugin_that_is_defined_anew_is_used():
    from ringlet.compressors import Compressor, Traits, register
    from ringlet.compressors.specs import registry

    def times(factor):
        registry._registered.pop("times", None)

        @register("times")
        class Times(Compressor):
            def traits(self):
                return Traits(fixed_size=True, granularity=1)

            def layout(self, n):
                return parse("none").layout(n)

            def compress(self, x, ctx):
                return {parse("none").layout(x.size)[0].name: x * np.float32(factor)}

            def decompress(self, payload, out, ctx):
                (out[:],) = payload.values()

        return Times()

    turns = threading.Barrier(2)

    def body(engine):
        found = []
        for factor in (1, 1, 1, 3, 3):
            if engine.rank == 0:
                made.append(times(factor))
            turns.wait(WAIT)
            request = Request("w", shape=(4000,), spec="times")
            found.append(float(engine.submit(request, ones(4000), None, made[-1]).wait(WAIT)[0]))
            turns.wait(WAIT)
        return found

    made = []
    try:
        assert with_engines(2, body) == [[1, 1, 1, 3, 3]] * 2
    finally:
        registry._registered.pop("times", None)


def test_joining_a_process_set_that_is_not_ones_own_is_refused_here():
    def body(engine):
        number = engine.add_process_set([0])
        if engine.rank == 1:
            with pytest.raises(ValueError, match="does not belong to process set"):
                engine.join(number)
        return float(submit(engine, "x").wait(WAIT)[0])

    assert with_engines(2, body) == [1.0, 1.0]


def test_a_stall_that_ends_a_job_is_told_of_whatever_the_warning_time(caplog):
    def body(engine):
        name = "x" if engine.rank else "y"
        with pytest.raises(EngineClosed, match=r"a stall of more than 0\.4 s"):
            submit(engine, name).wait(WAIT)

    with caplog.at_level(logging.WARNING, "ringlet"):
        with_engines(2, body, stall_warning=60.0, stall_shutdown=0.4)
    assert "'x'" in "\n".join(record.getMessage() for record in caplog.records)


@pytest.mark.parametrize(
    "message",
    [
        m.BROKEN + b"{",
        m.FAILED + b'[0,1,0,0,"odd","x"]',
        m.RELEASE + b"[7,1]",
        m.pack_vote(m.Vote(1, 0, 0, 4, 0, turn=99)),
        m.DIGESTS + b"[0,[[1]]]",
        m.REQUEST + b"[0,[[]]]",
        b"?",
        b"",
    ],
)
def test_a_message_that_makes_no_sense_ends_all_engines_with_one_sentence(message):
    def body(engine):
        group = engine.declare("g", [Request("w", shape=(4,))], [parse("none")], [{}])
        if engine.rank == 1:
            engine._control.send(message)
        for _ in range(2):
            try:
                group.submit("w", ones(4))
                group.wait(WAIT)
                submit(engine, "x").wait(WAIT)
            except (EngineClosed, Mismatch) as error:
                return str(error)
        return ""

    texts = set(with_engines(2, body))
    assert len(texts) == 1
    assert "rank 1" in texts.pop()


def test_a_step_whose_results_are_not_used_is_not_compared():
    """An adapter refuses such a step where a caller has written to gradients under way."""

    def body(engine):
        group = engine.declare("g", [Request("w", shape=(4,))], [parse("none")], [{}])
        found = []
        for step in range(3):
            x = ones(4, engine.rank + 0.5)
            group.submit("w", x)
            group.wait(WAIT)
            found.append(float(x[0]))
            if step == 0 and engine.rank == 1:
                group.buckets[0].digest ^= 1
                group.disown()
        return found

    assert with_engines(2, body) == [[1.0] * 3] * 2


def sends_differently(engine, send):
    """Let declarations of this engine be sent by ``send(real, message)``."""
    real = engine._control.send

    def instead(message):
        if message[:1] == m.DECLARE:
            send(real, message)
        else:
            real(message)

    engine._control.send = instead


@pytest.mark.parametrize("long", ["requests", "name"])
def test_a_declaration_that_no_message_holds_can_be_repeated(long):
    """The others hear why, as far as that can be said; the name is free again."""

    def limited(real, message):
        if len(message) > 2000:
            raise ValueError("over the limit")
        real(message)

    def body(engine):
        if engine.rank == 1:
            sends_differently(engine, limited)
        name = "g" * (3000 if long == "name" and engine.rank == 1 else 1)
        many = [Request(f"w{i}", shape=(4,)) for i in range(40)]

        def declare(name, requests):
            plain = [parse("none") for _ in requests]
            return engine.declare(name, requests, plain, [{} for _ in requests])

        if long == "requests":
            raised = ValueError if engine.rank == 1 else Mismatch
            with pytest.raises(raised, match="over the limit"):
                declare(name, many)
        elif engine.rank == 1:
            for _ in range(2):
                with pytest.raises(ValueError, match="over the limit"):
                    declare(name, many[:1])
        group = declare("g", many[:1])
        x = ones(4, engine.rank)
        group.submit("w0", x)
        group.wait(WAIT)
        return float(x[0])

    assert with_engines(2, body) == [0.5, 0.5]


def test_a_declaration_that_cannot_be_sent_is_told_the_cause():
    def lost(real, message):
        real(m.SEVERED + dumps([[0], "cut"]))  # who sends does not hear that nobody is there

    def body(engine):
        if engine.rank == 1:
            sends_differently(engine, lost)
        with pytest.raises(PeerLost) as caught:
            engine.declare("g", [Request("w", shape=(4,))], [parse("none")], [{}])
        return str(caught.value)

    (text,) = set(with_engines(2, body))
    assert text == "the connection between rank 0 and rank 1 broke, though they are there: cut"
