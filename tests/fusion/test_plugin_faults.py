"""Plugins that raise anything, anywhere, or give something wrong: named on all ranks, survived."""

import signal
import sys
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from engines import with_engines

from ringlet.compressors import Compressor, Modifier, Part, Round, Traits, parse, register
from ringlet.compressors.specs import registry
from ringlet.fusion import CompressionFailed, Engine, EngineClosed, Limits, Request
from ringlet.fusion.extensions import ENGINE_THREAD
from ringlet.fusion.recording.events import Quiet
from ringlet.ring import Mismatch, RingError
from ringlet.ring.control.opening import open_control
from ringlet.ring.transports.local import LocalWorld

SIZE = 3
WAIT = 60.0
N = 3000


class Panic(BaseException):
    """What pyo3 raises for a panic in Rust: no Exception."""


KINDS = {
    "KeyError": lambda: KeyError("lost my keys"),
    "SystemExit": lambda: SystemExit(3),
    "KeyboardInterrupt": KeyboardInterrupt,
    "Panic": lambda: Panic("index out of bounds"),
}


class Faults:
    """What goes wrong: in ``method``, on ``rank``, as ``kind``, while it is planned."""

    def __init__(self):
        self.planned = None

    def plan(self, method, rank, kind="KeyError"):
        self.planned = method, rank, kind

    def clear(self):
        self.planned = None

    def come(self, method, ctx):
        """Raise what is planned for ``method``; return whether it is to do something wrong."""
        if self.planned is None or self.planned[:2] != (method, ctx.rank):
            return False
        if self.planned[2] in KINDS:
            raise KINDS[self.planned[2]]()
        return True


@pytest.fixture
def faults(monkeypatch):
    """Register plugins that fail as is planned: one of every way in which payloads travel."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    faults = Faults()

    class Copying(Compressor):
        def compress(self, x, ctx):
            if faults.come("compress", ctx):
                return {"values": x.astype(np.float64)}
            return {"values": x.copy()}

        def decompress(self, payload, out, ctx):
            if not faults.come("decompress", ctx):
                (out[:],) = payload.values()

    @register("gathered")
    class Gathered(Copying):
        pass

    @register("scattered")
    class Scattered(Copying):
        def traits(self):
            return Traits(fixed_size=True, granularity=1)

        def layout(self, n):
            return (Part("values", "float32", n),)

    @register("summed")
    class Summed(Copying):
        def traits(self):
            return Traits("sum", fixed_size=True)

        def layout(self, n):
            return (Part("values", "float32", n),)

    @register("rounds")
    class Rounds(Compressor):
        def traits(self):
            return Traits("rounds")

        def exchange(self, x, out, ctx, local=None):
            middle = x.size // 2
            faults.come("compress", ctx)
            if faults.come("dtype", ctx):
                yield Round(np.ones(middle, np.int32), "sum")
            first = yield Round(x[:middle], "max" if faults.come("operation", ctx) else "mean")
            out[:middle] = first
            faults.come("between", ctx)
            wrong = faults.come("length", ctx)
            second = yield Round(x[middle + wrong :])
            if not faults.come("decompress", ctx):
                out[middle:] = second

    @register("finishing")
    class Finishing(Modifier):
        def finish(self, out, ctx):
            super().finish(out, ctx)
            faults.come("finish", ctx)

        def warm_up(self, ctx):
            if faults.planned and faults.planned[0] == "warm_up":
                raise KINDS[faults.planned[2]]()

    @register("adding")
    class Adding(Modifier):
        """Remembers the sum of all results: ranks differ if some finish and some do not."""

        def finish(self, out, ctx):
            total = ctx.state.setdefault("total", np.zeros(out.size, np.float32))
            total += out
            out[:] = total

    return faults


def stepper(engine, specs, declared, n=N):
    """Return ``step(x)``, which reduces a tensor for each of ``specs``, and their states.

    ``declared`` is False for tensors one by one, and "grouped" for those that run together.
    """
    grouped = {"group": "g", "group_size": len(specs)} if declared == "grouped" else {}
    requests = [Request(f"w{i}", shape=(n,), spec=spec, **grouped) for i, spec in enumerate(specs)]
    states = [{} for _ in specs]
    if declared is True:
        group = engine.declare("g", requests, [parse(s) for s in specs], states)

        def step(x):
            outs = [x.copy() for _ in specs]
            for request, out in zip(requests, outs, strict=True):
                group.submit(request.name, out)
            group.wait(WAIT)
            return outs

        return step, states

    def single(x):
        outs = [x.copy() for _ in specs]
        items = [
            (request, out, None, parse(spec))
            for request, out, spec in zip(requests, outs, specs, strict=True)
        ]
        handles = engine.submit_all(items)
        errors = []
        for handle in handles:
            try:
                handle.wait(WAIT)
            except RingError as error:
                errors.append(error)
        if errors:
            raise errors[0]
        return outs

    return single, engine.states


def sync(engine):
    engine.submit(Request("sync"), np.zeros(1, np.float32)).wait(WAIT)


def told_by_all(faults, specs, method, rank, kind, declared=True, before=1, **limits):
    """Fail one step among good ones; return the one text that all ranks have raised."""

    def body(engine):
        step, _ = stepper(engine, specs, declared)
        x = np.full(N, engine.rank, np.float32)
        for _ in range(before):
            for out in step(x):
                np.testing.assert_array_equal(out, np.ones(N, np.float32))
        sync(engine)
        faults.plan(method, rank, kind)
        with pytest.raises(CompressionFailed) as caught:
            step(x)
        sync(engine)
        faults.clear()
        sync(engine)
        for _ in range(2):
            for out in step(x):
                np.testing.assert_array_equal(out, np.ones(N, np.float32))
        return str(caught.value)

    (text,) = set(with_engines(SIZE, body, **limits))
    return text


PLUGINS = ["gathered", "scattered", "summed", "rounds"]


@pytest.mark.parametrize("declared", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", ["compress", "decompress"])
@pytest.mark.parametrize("spec", PLUGINS)
def test_whatever_a_plugin_raises_fails_the_step_on_all_ranks(faults, spec, method, kind, declared):
    text = told_by_all(faults, [spec], method, 1, kind, declared)
    assert text.startswith(f"rank 1: compressor '{spec}' failed in ")
    assert "of tensor 'w0'" in text
    assert kind in text


@pytest.mark.parametrize("rank", range(SIZE))
@pytest.mark.parametrize("kind", ["KeyError", "Panic"])
def test_a_round_in_the_middle(faults, rank, kind):
    text = told_by_all(faults, ["rounds", "rounds"], "between", rank, kind)
    assert text.startswith(f"rank {rank}: compressor 'rounds' failed in exchange of tensor 'w")


@pytest.mark.parametrize("declared", [True, False, "grouped"])
@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("specs", [PLUGINS, ["summed"] * 4, ["scattered", "none"] * 2])
def test_several_exchanges_under_way_when_a_decoder_fails(faults, specs, rank, declared):
    text = told_by_all(
        faults, specs, "decompress", rank, "Panic", declared, before=3, fusion_threshold=1 << 12
    )
    assert text.startswith(f"rank {rank}: compressor ")
    assert "Panic: index out of bounds" in text


@pytest.mark.parametrize("spec", ["gathered", "scattered", "summed", "rounds"])
def test_a_decoder_that_writes_nothing_is_noticed(faults, spec):
    text = told_by_all(faults, [spec], "decompress", 1, "nothing")
    assert text.startswith(f"rank 1: compressor '{spec}' failed in ")
    assert "left its output unwritten" in text


@pytest.mark.parametrize("spec", ["scattered", "summed"])
def test_a_payload_of_another_dtype_than_the_layout_says(faults, spec):
    text = told_by_all(faults, [spec], "compress", 1, "wide")
    assert text.startswith(f"rank 1: compressor '{spec}' failed in compress of tensor 'w0'")
    assert "its layout says float32" in text


@pytest.mark.parametrize("declared", [True, False])
def test_who_has_sent_what_cannot_be_decoded_is_named(monkeypatch, declared):
    """Whoever decodes first finds it, and is not to blame."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))

    @register("shortened")
    class Shortened(Compressor):
        def compress(self, x, ctx):
            return {"values": x[: x.size - (ctx.rank == 1)].copy()}

        def decompress(self, payload, out, ctx):
            out[:] = payload["values"]

    def body(engine):
        step, _ = stepper(engine, ["shortened", "shortened | min_size(elements=1)"], declared)
        with pytest.raises(CompressionFailed) as caught:
            step(np.ones(N, np.float32))
        sync(engine)
        return str(caught.value)

    (text,) = set(with_engines(SIZE, body))
    assert "compressor 'shortened' failed in decompress of tensor 'w0' [3000]: ValueError: " in text
    assert text.endswith("Only what rank 1 has sent cannot be decoded")


def test_rounds_of_different_lengths_are_told_to_all_before_anything_moves(faults):
    text = told_by_all(faults, ["rounds"], "length", 1, "longer")
    assert "rank 1" in text
    assert "rounds" in text
    assert f"{4 * (N - N // 2)} bytes" in text
    assert f"{4 * (N - N // 2 - 1)} bytes" in text


@pytest.mark.parametrize(
    ("what", "told"), [("operation", "max of 1500 float32"), ("dtype", "sum of 1500 int32")]
)
@pytest.mark.parametrize("declared", [True, False])
def test_rounds_of_different_kinds_are_told_to_all_before_anything_moves(
    faults, what, told, declared
):
    """They would wait for each other in different collectives, or add up what are no numbers."""
    text = told_by_all(faults, ["rounds"], what, 1, "other", declared)
    assert "rank 1" in text
    assert f"compressor 'rounds' yields {told} for tensor 'w0' [{N}]" in text
    assert "other rounds of as many bytes on rank 0" in text


@pytest.mark.parametrize("spec", ["summed", "scattered"])
def test_a_layout_that_differs_between_ranks_is_told_before_anything_moves(monkeypatch, spec):
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    here = threading.local()

    @register(spec)
    class Uneven(Compressor):
        def traits(self):
            return Traits("sum" if spec == "summed" else "gather", True, 1)

        def layout(self, n):
            return (Part("values", "float32", n + (getattr(here, "rank", 0) == 1)),)

        def encode_into(self, x, payload, ctx):
            payload["values"][: x.size] = x

        def decompress(self, payload, out, ctx):
            out[:] = payload["values"][: out.size]

    def body(engine):
        def name(rank=engine.rank):
            here.rank = rank

        name()  # where groups are planned
        engine.extensions.call_soon(name)
        engine.extensions.settle()
        sync(engine)
        step, _ = stepper(engine, [spec], declared=True)
        with pytest.raises(CompressionFailed) as caught:
            step(np.ones(N, np.float32))
        sync(engine)
        return str(caught.value)

    (text,) = set(with_engines(SIZE, body))
    assert "rank 1" in text
    assert f"'{spec}'" in text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", ["gathered", "scattered", "summed", "rounds"])
def test_a_plugin_that_fails_to_finish_ends_the_engine_on_all_ranks(faults, spec, kind):
    """Some ranks have changed what they remember by then: the step cannot be repeated."""

    def body(engine):
        step, states = stepper(engine, [f"{spec} | finishing"], declared=True)
        step(np.ones(N, np.float32))
        sync(engine)
        faults.plan("finish", 1, kind)
        with pytest.raises(EngineClosed) as caught:
            step(np.ones(N, np.float32))
        with pytest.raises(EngineClosed):
            sync(engine)
        assert states[0]["step"] == 1
        return str(caught.value)

    (text,) = set(with_engines(SIZE, body))
    assert text.startswith("the engine broke on rank 1: CompressionFailed: compressor ")
    assert "failed in finish of tensor 'w0'" in text
    assert kind in text


@pytest.mark.parametrize("spec", ["gathered", "scattered", "summed", "rounds"])
def test_no_rank_finishes_a_step_that_another_cannot_decode(faults, spec):
    def body(engine):
        step, states = stepper(engine, [f"{spec} | adding"], declared=True)
        x = np.ones(N, np.float32)
        step(x)
        sync(engine)
        faults.plan("decompress", 1, "Panic")
        with pytest.raises(CompressionFailed):
            step(x)
        sync(engine)
        faults.clear()
        sync(engine)
        (out,) = step(x)
        assert states[0]["step"] == 2
        return out.tobytes()

    (out,) = set(with_engines(SIZE, body))
    np.testing.assert_array_equal(np.frombuffer(out, np.float32), np.full(N, 2, np.float32))


@pytest.mark.parametrize("declared", [True, False, "grouped"])
@pytest.mark.parametrize("spec", PLUGINS)
def test_a_decoder_that_fails_while_a_rank_has_joined(faults, spec, declared):
    joined = threading.Event()

    def body(engine):
        step, _ = stepper(engine, [spec], declared)
        x = np.ones(N, np.float32)
        step(x)
        sync(engine)
        faults.plan("decompress", 1, "Panic")
        if engine.rank == 0:
            joined.set()
            return [engine.join()]
        assert joined.wait(WAIT)
        with pytest.raises(CompressionFailed) as caught:
            step(x)
        return [engine.join(), str(caught.value)]

    first, second, third = with_engines(SIZE, body)
    assert second[1] == third[1]
    assert second[1].startswith("rank 1: ")
    assert first[0] == second[0] == third[0]


@pytest.mark.parametrize("spec", PLUGINS)
def test_a_rank_that_joined_fails_to_decode(faults, spec):
    def body(engine):
        step, _ = stepper(engine, [spec], declared=True)
        x = np.ones(N, np.float32)
        step(x)
        sync(engine)
        faults.plan("decompress", 0, "Panic")
        if engine.rank == 0:
            engine.join()
            return None
        with pytest.raises(CompressionFailed) as caught:
            step(x)
        engine.join()
        return str(caught.value)

    first, second, third = with_engines(SIZE, body)
    assert first is None
    assert second == third
    assert second.startswith("rank 0: ")


@pytest.mark.parametrize("kind", KINDS)
def test_a_compressor_that_cannot_warm_up_is_told_by_the_step_that_needs_it(faults, kind):
    def body(engine):
        faults.plan("warm_up", 1, kind)
        step, _ = stepper(engine, ["scattered | finishing"], declared=True)
        sync(engine)
        faults.clear()
        step(np.ones(N, np.float32))
        return True

    assert all(with_engines(SIZE, body))


class Handler:
    def leave(self, number, frame):
        sys.exit(7)


HANDLERS = [
    (signal.default_int_handler, KeyboardInterrupt),
    (lambda number, frame: sys.exit(7), SystemExit),
    (Handler().leave, SystemExit),
]


def on_the_main_thread(first, second, handler):
    """Return what ``first(engine)`` returns on rank 0, where SIGUSR1 has ``handler``.

    And what ``second(engine)`` returns on rank 1, whose thread no signal interrupts.
    """
    world, others = LocalWorld(2), []

    def rank_1():
        engine = Engine(world.communicators[1], open_control, Limits())
        others.append(second(engine))
        engine.shutdown()

    thread = threading.Thread(target=rank_1, daemon=True)
    thread.start()
    engine = Engine(world.communicators[0], open_control, Limits())
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        found = first(engine)
    finally:
        signal.signal(signal.SIGUSR1, before)
        engine.shutdown()
        thread.join(WAIT)
    return found, *others


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize(("handler", "raised"), HANDLERS)
def test_a_declaration_that_a_signal_interrupts_is_told_to_all_and_can_be_repeated(
    monkeypatch, handler, raised, early
):
    """Its name was taken for ever, and the others waited. ``early``: they declare before."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    declared, interrupted, coming = threading.Event(), threading.Event(), [True]

    @register("planning")
    class Planning(Modifier):
        def at(self, step):
            if coming and threading.current_thread() is threading.main_thread():
                coming.clear()
                assert not early or declared.wait(WAIT)
                signal.raise_signal(signal.SIGUSR1)
            return self

    def rank_main(engine, error):
        with pytest.raises(error) as caught:
            stepper(engine, ["fp16 | planning"], declared=True)
        interrupted.set()
        step, _ = stepper(engine, ["fp16 | planning"], declared=True)
        return str(caught.value), float(step(np.ones(N, np.float32))[0][0])

    def other(engine):
        send = engine._control.send

        def noted(message):
            send(message)
            declared.set()

        assert early or interrupted.wait(WAIT)
        engine._control.send = noted
        return rank_main(engine, Mismatch)

    (_, first), (text, second) = on_the_main_thread(
        lambda engine: rank_main(engine, raised), other, handler
    )
    assert first == second == 1.0
    assert text.startswith(f"'g' was not declared: rank 0: {raised.__name__}")


@pytest.mark.parametrize(("handler", "raised"), HANDLERS)
def test_a_signal_while_kernels_are_compiled_is_no_fault_of_the_compressor(
    monkeypatch, handler, raised
):
    """Training went on after Ctrl-C, and after a batch system's last warning."""
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))

    @register("compiling")
    class Compiling(Modifier):
        def warm_up(self, ctx):
            signal.raise_signal(signal.SIGUSR1)

    (comm,) = LocalWorld(1).communicators
    engine = Engine(comm, open_control, Limits())
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(raised):
            stepper(engine, ["int8 | compiling"], declared=True)
    finally:
        signal.signal(signal.SIGUSR1, before)
        engine.shutdown()


def test_a_layout_that_raises_ends_the_declaration_on_all_ranks(monkeypatch):
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    here = threading.local()

    @register("shapeless")
    class Shapeless(Compressor):
        def traits(self):
            return Traits(fixed_size=True, granularity=1)

        def layout(self, n):
            if here.rank == 1:
                raise Panic("no layout")
            return (Part("values", "float32", n),)

    def body(engine):
        here.rank = engine.rank
        request = Request("w", shape=(N,), spec="shapeless")
        with pytest.raises(CompressionFailed if engine.rank == 1 else Mismatch) as caught:
            engine.declare("g", [request], [parse("shapeless")], [{}])
        sync(engine)
        return str(caught.value)

    texts = with_engines(SIZE, body)
    failed = texts.pop(1)
    assert "'shapeless' failed in layout of tensor 'w'" in failed
    assert set(texts) == {f"'g' was not declared: rank 1: CompressionFailed: {failed}"}


def test_a_schedule_that_raises_is_told_with_the_tensor(faults):
    @register("unplanned")
    class Unplanned(Modifier):
        def at(self, step):
            if step == 1 and faults.planned:
                raise Panic("no such step")
            return self

    def body(engine):
        step, _ = stepper(engine, ["gathered | unplanned"], declared=True)
        faults.plan("at", 1)
        with pytest.raises(CompressionFailed) as caught:
            [step(np.ones(N, np.float32)) for _ in range(2)]
        return str(caught.value)

    (text,) = set(with_engines(SIZE, body))
    assert "failed in at of tensor 'w0'" in text


@pytest.fixture
def unplanned(faults):
    """Register "unplanned", which ``at`` a step fails, or has no layout, where ``fails`` says so.

    ``fails`` is asked with the step, by the rank's own thread or its engine's.
    """
    plan = SimpleNamespace(fails=lambda step: False, method="at")

    class Shapeless(Compressor):
        def traits(self):
            return Traits(fixed_size=True, granularity=1)

        def layout(self, n):
            raise Panic("no layout")

    @register("unplanned")
    class Unplanned(Modifier):
        def at(self, step):
            if not plan.fails(step):
                return self
            if plan.method == "at":
                raise Panic("no such step")
            return Shapeless()

    return plan


def outcomes(step, count):
    """Take so many steps of ones; return what they raised, or gave."""
    found = []
    for _ in range(count):
        try:
            found.append(float(step(np.ones(N, np.float32))[0][0]))
        except RingError as error:
            found.append(f"{type(error).__name__}: {error}")
    return found


@pytest.mark.parametrize("method", ["at", "layout"])
def test_a_step_that_one_rank_cannot_plan_fails_on_all_and_the_next_is_planned(unplanned, method):
    here = threading.local()
    unplanned.method = method
    unplanned.fails = lambda step: step in (2, 3) and getattr(here, "rank", 0) == 1

    def body(engine):
        here.rank = engine.rank
        step, _ = stepper(engine, ["scattered | unplanned"], declared=True)
        return outcomes(step, 6)

    (found,) = set(map(tuple, with_engines(SIZE, body)))
    assert [found[i] for i in (0, 1, 4, 5)] == [1.0] * 4
    for text in found[2:4]:
        assert text.startswith("CompressionFailed: rank 1: compressor")
        assert f"failed in {method} of tensor 'w0'" in text


def test_a_step_that_a_joined_rank_cannot_plan_fails_on_all(unplanned):
    engines = f"{ENGINE_THREAD}2"
    unplanned.fails = lambda step: step == 2 and threading.current_thread().name == engines

    def body(engine):
        step, _ = stepper(engine, ["scattered | unplanned"], declared=True)
        found = outcomes(step, 1 if engine.rank == 2 else 4)
        engine.join()
        return found

    first, second, third = with_engines(SIZE, body)
    assert first == second
    assert [first[i] for i in (0, 1, 3)] == pytest.approx([1.0, 2 / 3, 2 / 3])
    assert third == [1.0]
    assert first[2].startswith("CompressionFailed: rank 2: compressor")


def test_all_who_wait_for_a_step_go_on_though_the_next_cannot_be_planned(unplanned):
    unplanned.fails = lambda step: step == 1

    def body(engine):
        request = Request("w0", shape=(N,), spec="scattered | unplanned")
        group = engine.declare("g", [request], [parse(request.spec)], [{}])
        ended, waiting, errors = group._ended, threading.Event(), []
        wait_for = ended.wait_for

        def noted(predicate, timeout=None):
            waiting.set()  # with the lock, which is free again once this thread really waits
            return wait_for(predicate, timeout)

        def wait():
            try:
                group.wait(WAIT)
            except Exception as error:
                errors.append(error)

        ended.wait_for = noted
        other = threading.Thread(target=wait)
        other.start()
        assert waiting.wait(WAIT)
        group.submit("w0", np.ones(N, np.float32))
        wait()
        other.join(WAIT)
        return errors, other.is_alive()

    assert with_engines(SIZE, body) == [([], False)] * SIZE


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize(("handler", "raised"), HANDLERS)
def test_a_signal_while_a_step_is_planned_is_raised_and_the_wait_can_be_repeated(
    faults, handler, raised, fails
):
    """It was swallowed, and the next step failed on all ranks for a fault of the compressor."""
    coming = [1]  # the step whose planning is interrupted, on rank 0

    @register("planning")
    class Planning(Modifier):
        def at(self, step):
            if step in coming and threading.current_thread() is threading.main_thread():
                coming.clear()
                signal.raise_signal(signal.SIGUSR1)
            return self

    def begin(group):
        values = np.ones(N, np.float32)
        group.submit("w0", values)
        return values

    def end(group, values):
        try:
            group.wait(WAIT)
        except RingError as error:
            return f"{type(error).__name__}: {error}"
        return float(values[0])

    def rank_main(engine, interrupted=False):
        request = Request("w0", shape=(N,), spec="gathered | planning")
        group = engine.declare("g", [request], [parse(request.spec)], [{}])
        values = begin(group)
        if interrupted:
            with pytest.raises(raised):
                group.wait(WAIT)
        found = [end(group, values)]
        sync(engine)
        faults.clear()
        sync(engine)
        found += [end(group, begin(group)) for _ in range(2)]
        return found

    if fails:
        faults.plan("compress", 1, "Panic")
    found, other = on_the_main_thread(lambda e: rank_main(e, interrupted=True), rank_main, handler)
    assert found == other
    assert found[1:] == [1.0, 1.0]
    assert "Panic: index out of bounds" in found[0] if fails else found[0] == 1.0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("where", ["errand", "wire", "lane", "output", "announced"])
@pytest.mark.parametrize("rank", [0, 1])
def test_whatever_ends_the_engines_thread_is_told_to_everybody(kind, where, rank):
    """Here it is the engine's own fault: every caller, and every other rank, has the same cause."""

    def body(engine):
        step, _ = stepper(engine, ["none"], declared=True, n=1 << 16)
        step(np.ones(1 << 16, np.float32))

        def fail(*_):
            raise KINDS[kind]()

        n = 1 << 16 if where == "lane" else 1000  # large ones wait on threads of their own
        request, output = Request("x", "allgather", shape=(n,)), None
        engine.extensions.on_announced("fail", fail if engine.rank == rank else lambda *_: None)
        sync(engine)
        if engine.rank == rank:
            if where == "errand":
                engine.extensions.call_soon(fail)
            elif where in ("wire", "lane"):
                engine.comm.allgather = fail
            elif where == "output":
                output = fail
            else:
                engine.extensions.announce_only("fail", None)

        def gather():
            engine.submit(request, np.ones(n, np.float32), output).wait(WAIT)
            sync(engine)

        texts = []
        with pytest.raises(EngineClosed) as caught:
            gather()
        texts.append(str(caught.value))
        with pytest.raises(EngineClosed) as caught:
            step(np.ones(1 << 16, np.float32))
        texts.append(str(caught.value))
        with pytest.raises(EngineClosed) as caught:
            engine.declare("h", [Request("w")], [parse("none")], [{}])
        texts.append(str(caught.value))
        return texts

    (text,) = {text for texts in with_engines(SIZE, body) for text in texts}
    assert text.startswith(f"the engine broke on rank {rank}: {kind}")


@pytest.mark.parametrize("kind", KINDS)
def test_a_callback_that_raises_stops_nobody(kind, caplog):
    def body(engine):
        called = threading.Event()

        def fail():
            raise KINDS[kind]()

        handles = [
            engine.submit(Request(f"x{i}", shape=(8,)), np.ones(8, np.float32)) for i in range(3)
        ]
        for handle, callback in zip(handles, (fail, fail, called.set), strict=True):
            handle.then(callback)
        sync(engine)
        assert called.wait(WAIT)
        for handle in handles:
            handle.wait(WAIT)
        return True

    assert all(with_engines(SIZE, body))
    assert kind in caplog.text


def test_callbacks_that_raise_when_the_engine_ends_leave_no_caller_waiting():
    def body(engine):
        if engine.rank == 1:
            sync(engine)
            return True

        def fail():
            raise Panic("in a callback")

        handles = [
            engine.submit(Request(f"x{i}", shape=(8,)), np.ones(8, np.float32)) for i in range(4)
        ]
        for handle in handles[:2]:
            handle.then(fail)
        sync(engine)
        engine.extensions.when_over(fail)
        ended = threading.Event()
        engine.extensions.when_over(ended.set)
        engine.extensions.call_soon(lambda: sys.exit(3))
        for handle in handles:
            with pytest.raises(RingError):
                handle.wait(WAIT)
        assert ended.wait(WAIT)
        return True

    assert all(with_engines(2, body))


@pytest.mark.parametrize("kind", KINDS)
def test_an_observer_that_raises_is_dropped(kind):
    class Failing(Quiet):
        def bucket_done(self, event):
            raise KINDS[kind]()

    def body(engine):
        engine.extensions.observe(Failing())
        step, _ = stepper(engine, ["none"], declared=True)
        for _ in range(2):
            step(np.ones(N, np.float32))
        sync(engine)
        return len(engine._worker.recorder.observers)

    assert with_engines(SIZE, body) == [0] * SIZE


def test_a_generator_that_will_not_be_closed_stops_nobody(faults):
    @register("clinging")
    class Clinging(Compressor):
        def traits(self):
            return Traits("rounds")

        def exchange(self, x, out, ctx, local=None):
            try:
                if faults.planned and ctx.rank == 1 and ctx.name == "w1":
                    raise Panic("in the first round")
                out[:] = yield Round(x)
            except GeneratorExit:
                raise Panic("when closed") from None

    def body(engine):
        step, _ = stepper(engine, ["clinging"] * 2, declared=True)
        x = np.ones(N, np.float32)
        step(x)
        sync(engine)
        faults.plan("compress", 1)
        with pytest.raises(CompressionFailed, match="in the first round") as caught:
            step(x)
        sync(engine)
        faults.clear()
        sync(engine)
        step(x)
        return str(caught.value)

    assert len(set(with_engines(SIZE, body))) == 1


def test_the_place_in_the_plugin_is_told_and_what_python_does_not_say(faults):
    @register("assigns")
    class Assigns(Compressor):
        def compress(self, x, ctx):
            return self._kept(x)

        def _kept(self, x):
            self.residual = x  # what it remembers
            return {"values": x.copy()}

        def decompress(self, payload, out, ctx):
            out[:] = payload["values"]

    def body(engine):
        step, _ = stepper(engine, ["assigns"] * 2, declared=True)
        with pytest.raises(CompressionFailed) as caught:
            step(np.ones(N, np.float32))
        return str(caught.value)

    (told,) = set(with_engines(SIZE, body))
    assert "immutable: what one remembers belongs into ctx.state" in told
    assert "self.residual = x  # what it remembers)" in told
    assert "test_plugin_faults.py, line " in told


class NoRounds(Compressor):
    """Forgets to yield."""

    def traits(self):
        return Traits("rounds")

    def exchange(self, x, out, ctx, local=None):
        out[:] = x


class BareArrays(NoRounds):
    """Yields what ranks are to combine as it is."""

    def exchange(self, x, out, ctx, local=None):
        out[:] = yield x.copy()


class Matrices(NoRounds):
    """Yields what is not flat."""

    def exchange(self, x, out, ctx, local=None):
        out[:] = (yield Round(x.reshape(2, -1))).reshape(-1)


class WritesNothing(Compressor):
    """Returns what it decodes."""

    def compress(self, x, ctx):
        return {"values": x.copy()}

    def decompress(self, payload, out, ctx):
        return payload["values"]


class SendsArrays(WritesNothing):
    """Returns what travels without a name."""

    def compress(self, x, ctx):
        return x.copy()


class EndsItsSchedule(WritesNothing):
    """Has nothing to return at first."""

    def at(self, step):
        return None


# What is left unwritten may be any number.
@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize(
    ("plugin", "says"),
    [
        (NoRounds, "failed in exchange of tensor 'w0' [3000]: NoRounds.exchange is no generator"),
        (BareArrays, "failed in exchange of tensor 'w0' [3000]: BareArrays.exchange yields an obj"),
        (Matrices, "yields a Round of [2, 1500]; yield a flat array: .reshape(-1)"),
        (WritesNothing, "unwritten, at least at one end: overwrite all of it, out[:] = ..."),
        (SendsArrays, "failed in compress of tensor 'w0' [3000]: SendsArrays.compress must return"),
        (
            EndsItsSchedule,
            "failed in at of tensor 'w0' [3000]: EndsItsSchedule: at(0) returns None",
        ),
    ],
)
def test_what_a_plugin_does_wrong_is_told_with_its_cure(plugin, says):
    def body(engine):
        def first_step():
            step, _ = stepper(engine, [f"{__name__}:{plugin.__name__}"], True)
            step(np.ones(N, np.float32))

        with pytest.raises(CompressionFailed) as told:
            first_step()
        sync(engine)
        return str(told.value)

    texts = with_engines(SIZE, body)
    (text,) = set(texts)
    assert says in text
