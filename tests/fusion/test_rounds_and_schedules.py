"""Compressors that exchange in rounds, follow schedules, or finish the combined result."""

import threading
from contextlib import suppress

import numpy as np
import pytest
from engines import with_engines

from ringlet.compressors import (
    FP16,
    Compressor,
    CompressorError,
    Context,
    Int8,
    Modifier,
    NoCompression,
    Part,
    PowerSGD,
    Round,
    Traits,
    option,
    parse,
    register,
)
from ringlet.compressors.specs import registry
from ringlet.fusion import CompressionFailed, EngineClosed, Request
from ringlet.fusion.queue.batch import Batch
from ringlet.ring import Mismatch, ReduceOp

fault: dict = {}


@pytest.fixture(autouse=True)
def _plugins(monkeypatch):
    monkeypatch.setattr(registry, "_registered", dict(registry._registered))
    fault.clear()

    @register("halves")
    class Halves(Compressor):
        """Exchange the two halves one after the other, and a maximum in between."""

        def traits(self):
            return Traits("rounds", min_size=0)

        def exchange(self, x, out, ctx, local=None):
            if local is not None:
                local[:] = x
            middle = x.size // 2
            if fault.get("first") == ctx.rank:
                raise ArithmeticError("first")
            first = yield Round(x[:middle])
            out[:middle] = first
            top = yield Round(np.array([ctx.rank], np.int32), "max")
            if fault.get("last") == ctx.rank:
                raise ArithmeticError("last")
            ctx.state["top"] = int(top[0])
            second = yield Round(x[middle:] * ctx.size, "sum")
            out[middle:] = second / ctx.size**2

    @register("later")
    class Later(Modifier):
        """Nothing for some steps, fp16 for some, then the compressor to the left."""

        steps: int = option(2)
        fails: int = option(-1)

        def at(self, step):
            if step == self.fails:
                raise ArithmeticError("no plan")
            inner = self.wrapped_compressor.at(step)
            return [NoCompression(), FP16(), inner][min(step // self.steps, 2)]

    @register("negated")
    class Negated(Modifier):
        """Turn the combined result around."""

        def finish(self, out, ctx):
            super().finish(out, ctx)
            np.negative(out, out=out)


def data(rank, name, n):
    rng = np.random.default_rng([rank, *name.encode()])
    return rng.standard_normal(n).astype(np.float32)


SIZES = {"a": 5, "b": 1000, "c": 33, "d": 2}


def declare(engine, spec, dtype="float32", op=ReduceOp.AVERAGE):
    requests = [Request(n, dtype=dtype, shape=(s,), op=op, spec=spec) for n, s in SIZES.items()]
    states = [{} for _ in requests]
    return engine.declare("g", requests, [parse(spec)] * len(requests), states), states


@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("spec", ["halves", "halves | ef"])
@pytest.mark.parametrize("threshold", [1, 1 << 20])
def test_rounds_are_fused_and_end_with_the_mean(size, spec, threshold):
    def body(engine):
        group, states = declare(engine, spec)
        for _ in range(3):
            arrays = {name: data(engine.rank, name, n) for name, n in SIZES.items()}
            for name in reversed(arrays):
                group.submit(name, arrays[name])
            group.wait(60)
        return arrays, states

    results = with_engines(size, body, fusion_threshold=threshold)
    for name, n in SIZES.items():
        mean = np.mean([data(r, name, n).astype(np.float64) for r in range(size)], axis=0)
        for arrays, _ in results:
            assert arrays[name].tobytes() == results[0][0][name].tobytes()
        if spec == "halves":
            np.testing.assert_allclose(results[0][0][name], mean, atol=1e-6)
    assert all(state["top"] == size - 1 for _, states in results for state in states)


@pytest.mark.parametrize("dtype", ["float16", "float64"])
def test_rounds_with_other_dtypes_and_sums(dtype):
    def body(engine):
        group, _ = declare(engine, "halves", dtype, ReduceOp.SUM)
        arrays = {n: np.full(s, engine.rank + 1, dtype) for n, s in SIZES.items()}
        for name, array in arrays.items():
            group.submit(name, array)
        group.wait(60)
        return arrays

    for arrays in with_engines(3, body):
        assert all(array.dtype == dtype and (array == 6).all() for array in arrays.values())


def test_nothing_is_left_of_batches_in_which_ranks_vote_on_some_buckets_alone():
    def body(engine):
        for _ in range(5):
            rounds = Request("w", shape=(1000,), spec="halves")
            items = [(rounds, np.ones(1000, np.float32), None, parse("halves"))]
            items += [(Request("b", shape=(10,)), np.ones(10, np.float32), None, None)]
            for handle in engine.submit_all(items, at_once=True):
                assert (handle.wait(30) == 1).all()
        return engine.rank or len(engine._coordinator._votes._of)

    assert with_engines(2, body) == [0, 1]


@pytest.mark.parametrize("where", ["first", "last"])
def test_a_failing_round_is_told_to_all(where):
    def body(engine):
        group, _ = declare(engine, "halves")

        def step():
            for name, n in SIZES.items():
                group.submit(name, data(engine.rank, name, n))
            group.wait(60)

        step()
        fault[where] = 1
        with pytest.raises(CompressionFailed) as caught:
            step()
        engine.submit(Request("sync"), np.zeros(1, np.float32)).wait(60)
        fault.clear()
        engine.submit(Request("sync"), np.zeros(1, np.float32)).wait(60)
        step()
        return str(caught.value)

    texts = set(with_engines(3, body))
    assert len(texts) == 1
    assert "rank 1: compressor 'halves' failed in exchange" in texts.pop()


def test_rounds_of_ringlets_own_that_fail_behind_their_vote_end_the_engine_everywhere(monkeypatch):
    """Nobody votes behind the first round: the others are told by another way, and do not wait."""
    usual = PowerSGD.exchange

    def exchange(self, x, out, ctx, local=None):
        rounds = usual(self, x, out, ctx, local)
        combined = yield next(rounds)
        if fault.get("last") == ctx.rank:
            raise ArithmeticError("last")
        while True:
            try:
                combined = yield rounds.send(combined)
            except StopIteration:
                return

    monkeypatch.setattr(PowerSGD, "exchange", exchange)
    spec = "powersgd"
    parse(spec).warm_up(Context())

    def body(engine):
        requests = [
            Request("w", shape=(640, 480), spec=spec),
            Request("v", shape=(400, 300), spec=spec),
        ]
        group = engine.declare("g", requests, [parse(spec)] * 2, [{}, {}])

        def step():
            for request in requests:
                group.submit(request.name, data(engine.rank, request.name, request.numel))
            group.wait(60)

        step()
        engine.submit(Request("all are done"), np.zeros(1, np.float32)).wait(60)
        fault["last"] = 1
        with pytest.raises(EngineClosed) as caught:
            step()
        return str(caught.value)

    (text,) = set(with_engines(3, body))
    assert "rank 1: " in text
    assert "compressor 'powersgd' failed in exchange" in text
    assert "ArithmeticError: last" in text


@pytest.mark.parametrize(
    "spec", ["powersgd | shared_int | ef", "powersgd | ef", "acpsgd | ef", "shared_int | ef"]
)
@pytest.mark.parametrize("threshold", [1, 1 << 20])
def test_rounds_of_buckets_that_overlap_give_what_they_give_one_by_one(spec, threshold):
    shapes = {f"w{i}": (80 + i, 64) for i in range(6)}
    parse(spec).warm_up(Context())

    def body(engine):
        requests = [Request(n, shape=s, spec=spec) for n, s in shapes.items()]
        group = engine.declare("g", requests, [parse(spec)] * 6, [{} for _ in requests])
        for step in range(4):
            arrays = {r.name: data(engine.rank, f"{r.name}{step}", r.numel) for r in requests}
            plain = np.full(200_000, engine.rank, np.float32)  # beside them
            beside = engine.submit(Request("plain", shape=plain.shape), plain)
            for name in reversed(arrays):
                group.submit(name, arrays[name])
            group.wait(60)
            beside.wait(60)
            assert (plain == (engine.size - 1) / 2).all()
        return {name: array.tobytes() for name, array in arrays.items()}

    overlapping = with_engines(3, body, fusion_threshold=threshold, streams=4)
    assert overlapping[0] == overlapping[1] == overlapping[2]
    assert overlapping == with_engines(3, body, fusion_threshold=threshold, streams=1)


def test_a_schedule_changes_on_all_ranks_at_once():
    def body(engine):
        requests = [Request("w", shape=(2000,), spec="int8 | later")]
        group = engine.declare("g", requests, [parse("int8 | later")], [{}])
        used, hashes = [], []
        for _ in range(6):
            used.append(group.members["w"].compressor)
            hashes.append(group.plan.hash)
            group.submit("w", data(engine.rank, "w", 2000))
            group.wait(60)
        return used, hashes

    results = with_engines(3, body)
    expected = [NoCompression()] * 2 + [FP16()] * 2 + [Int8()] * 2
    assert all(used == expected for used, _ in results)
    assert len({tuple(hashes) for _, hashes in results}) == 1
    assert len(set(results[0][1])) == 3


@pytest.mark.parametrize(
    "spec", ["topk(ratio=0.1) | warmup(dense=3)", "int8 | ef | warmup(dense=3)"]
)
def test_what_is_submitted_by_itself_follows_a_schedule_too(spec):
    def body(engine):
        request, plain = Request("w", shape=(2000,), spec=spec), Request("b", shape=(50,))
        errors = []
        for step in range(6):
            x, y = data(engine.rank, str(step), 2000), data(engine.rank, str(step), 50)
            items = [(request, x, None, parse(spec)), (plain, y, None, None)]
            for handle in engine.submit_all(items):
                handle.wait(60)
            exact = (data(0, str(step), 2000) + data(1, str(step), 2000)) / 2
            errors.append(float(np.linalg.norm(x - exact) / np.linalg.norm(exact)))
        return errors, engine.states["w"]["step"], engine.specs

    first, second = with_engines(2, body)
    assert first == second
    errors, steps, specs = first
    assert max(errors[:3]) < 1e-6 < min(errors[3:])
    assert (steps, specs) == (6, [str(parse(spec))])


def test_ranks_at_other_steps_of_a_schedule_are_told_and_nobody_hangs():
    spec, said = "topk(ratio=0.1) | warmup(dense=2)", []

    def body(engine):
        request, plain = Request("w", shape=(2000,), spec=spec), Request("b", shape=(50,))
        for step in range(3):
            if step == 1 and engine.rank:
                engine.states["w"]["step"] = 2  # such as of a file that one rank has loaded
            x, y = data(engine.rank, str(step), 2000), data(engine.rank, str(step), 50)
            handles = engine.submit_all([(request, x, None, parse(spec)), (plain, y, None, None)])
            handles[1].wait(60)
            if step != 1:
                handles[0].wait(60)
                continue
            with pytest.raises(Mismatch) as caught:
                handles[0].wait(60)
            said.append(str(caught.value))
            engine.states["w"]["step"] = 1
        return True

    assert with_engines(2, body) == [True, True]
    assert len(set(said)) == 1


@pytest.mark.timeout(60)
@pytest.mark.parametrize("ranks", [(0,), (1,), (0, 1)])
@pytest.mark.parametrize("numel", [2000, 20])
def test_a_schedule_that_raises_for_what_is_submitted_by_itself_fails_that_alone(ranks, numel):
    def body(engine):
        request = Request("w", shape=(numel,), spec="int8 | later")
        plain = Request("b", shape=(50,))
        spec = "int8 | later(fails=1)" if engine.rank in ranks else "int8 | later"
        failed, sums = [], []
        for step in range(4):
            if step == 2:  # as a plugin that was mended
                spec = "int8 | later"
            x, y = data(engine.rank, str(step), numel), data(engine.rank, str(step), 50)
            items = [(request, x, None, parse(spec)), (plain, y, None, None)]
            handles = engine.submit_all(items)
            try:
                handles[0].wait(30)
            except CompressionFailed as error:
                failed.append((step, str(error)))
            with suppress(CompressionFailed):  # what is left of the batch fails as well
                handles[1].wait(30)
            sums.append(x.tobytes())
        return failed, sums[2:]

    first, second = with_engines(2, body)
    assert first == second
    ((step, text),) = first[0]
    assert step == 1
    assert f"rank {ranks[0]}: compressor" in text or len(ranks) > 1
    assert "no plan" in text


@pytest.mark.timeout(60)
@pytest.mark.parametrize("lookahead", [None, 9000])
def test_a_schedule_that_raises_on_one_rank_leaves_its_neighbours_as_they_are(lookahead):
    """Whatever buckets the others have: plain tensors must be fused alike on all ranks."""
    sizes = {"w0": 2000, "b0": 2000, "w1": 3000, "b1": 2000}

    def body(engine):
        outcomes = []
        for _ in range(3):
            items = []
            for name, numel in sizes.items():
                fails = 1 if engine.rank == 1 and name == "w0" else -1
                spec = f"int8 | later(fails={fails})" if name[0] == "w" else "none"
                said = "int8 | later" if name[0] == "w" else "none"
                x = np.full(numel, engine.rank + float(name[1]), np.float32)
                request = Request(name, shape=x.shape, spec=said, op=ReduceOp.SUM)
                items.append((request, x, None, parse(spec)))
            told = []
            for handle in engine.submit_all(items, at_once=True):
                try:
                    told.append(set(handle.wait(20).tolist()))
                except CompressionFailed as error:
                    told.append(str(error))
            outcomes.append(told)
        return outcomes

    first, second, third = with_engines(3, body, lookahead=lookahead, fusion_threshold=1 << 16)
    assert first == second == third
    for step, told in enumerate(first):
        assert told[1::2] == [{3.0}, {6.0}]
        assert all(("no plan" in str(each)) == (step > 0) for each in told[::2])


@pytest.mark.timeout(60)
def test_a_small_tensor_whose_schedule_raises_on_one_rank_shares_no_sum():
    """Elsewhere it may travel as it is, in a bucket with others."""

    @register("constant")
    class Constant(Modifier):
        fails: int = option(-1)

        def at(self, step):
            if step == self.fails:
                raise ArithmeticError("no plan")
            return self

    def body(engine):
        outcomes = []
        for _ in range(3):
            spec = "int8 | constant(fails=1)" if engine.rank == 1 else "int8 | constant"
            x, y = np.ones(20, np.float32), np.ones(30, np.float32)
            small = Request("w", shape=(20,), spec="int8 | constant", op=ReduceOp.SUM)
            plain = Request("b", shape=(30,), op=ReduceOp.SUM)
            items = [(small, x, None, parse(spec)), (plain, y, None, None)]
            told = []
            for handle in engine.submit_all(items, at_once=True):
                try:
                    told.append(handle.wait(20).tolist())
                except CompressionFailed as error:
                    told.append(str(error))
            outcomes.append(told)
        return outcomes

    first, second = with_engines(2, body)
    assert first == second
    assert [plain for _, plain in first] == [[2.0] * 30] * 3
    assert first[0][0] == [2.0] * 20
    assert "rank 1: compressor" in first[1][0]


@pytest.mark.timeout(60)
@pytest.mark.parametrize("numel", [2000, 1 << 23])
def test_a_layout_that_raises_on_one_rank_fails_its_tensors_alone(numel):
    @register("laid")
    class Laid(Compressor):
        def traits(self):
            return Traits(fixed_size=True, granularity=1)

        def layout(self, n):
            if fault.get("layout") == threading.current_thread().name[-1]:
                raise ArithmeticError("no layout")
            return (Part("values", "float32", n),)

        def compress(self, x, ctx):
            return {"values": x.copy()}

        def decompress(self, payload, out, ctx):
            out[...] = payload["values"]

    def body(engine):
        fault["layout"] = ""
        outcomes = []
        for step in range(3):
            items = []
            for name, spec, n in (("a", "none", 50), ("w", "laid", numel), ("b", "none", 60)):
                request = Request(f"{name}{step}", shape=(n,), spec=spec, op=ReduceOp.SUM)
                items.append((request, np.ones(n, np.float32), None, parse(spec)))
            for request, _, _, compressor in items:
                engine._tensor_queue.check(request, compressor, engine.size)
            engine.submit(Request(f"{step}", "barrier"), np.empty(0, np.float32)).wait(20)
            fault["layout"] = "1" if step == 1 else ""  # in the engine's thread of rank 1
            told = []
            for handle in engine.submit_all(items, at_once=True):
                try:
                    told.append(set(handle.wait(20).tolist()))
                except CompressionFailed as error:
                    told.append(str(error))
            outcomes.append(told)
        return outcomes

    first, second = with_engines(2, body)
    assert first == second
    assert first[0] == first[2] == [{2.0}] * 3
    assert first[1][0] == first[1][2] == {2.0}
    assert "rank 1: compressor 'laid' failed in layout of tensor 'w1'" in first[1][1]


def test_a_batch_is_planned_once_for_each_stage_of_a_schedule(monkeypatch):
    planned = []
    plan = Batch.__init__

    def counted(batch, peers, *given):
        planned.append(peers.comm.rank)
        plan(batch, peers, *given)

    monkeypatch.setattr(Batch, "__init__", counted)

    def body(engine):
        spec = "int8 | ef | later"
        for _ in range(12):
            x, y = np.ones(2000, np.float32), np.ones(50, np.float32)
            items = [(Request("w", shape=(2000,), spec=spec), x, None, parse(spec))]
            items.append((Request("b", shape=(50,)), y, None, None))
            for handle in engine.submit_all(items, at_once=True):
                handle.wait(60)
        return engine.states["w"]["step"]

    assert with_engines(2, body) == [12, 12]
    # By name at first, then by number; then for each of two more stages.
    assert planned.count(0) == planned.count(1) == 4


@pytest.mark.parametrize("spec", ["int8 | negated", "fp16 | negated", "topk(ratio=0.5) | negated"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_finish_sees_the_combined_result(spec, dtype):
    def body(engine):
        x = np.full(2000, 3, dtype)
        out = [
            engine.submit(
                Request(s, dtype=dtype, shape=(2000,), spec=s), x.copy(), compressor=parse(s)
            ).wait(60)
            for s in (spec, spec.partition(" | ")[0])
        ]
        return [array.astype("float64") for array in out]

    for negated, plain in with_engines(3, body):
        assert np.array_equal(negated, -plain)


@pytest.mark.parametrize(
    ("spec", "later"),
    [
        (
            "qsgd | warmup(dense=2, steps=10, ramp='bits', start=2) | ef",
            r"ef behind qsgd\(bits=2\)",
        ),
        ("randomk(ratio=0.5) | warmup(steps=3, start=0.1) | scaled(factor=0.6)", "make randomk"),
        ("fp16 | server_ef", "cannot be reduced in shards"),
    ],
)
def test_what_a_modifier_cannot_wrap_in_a_later_step_is_refused_at_once(spec, later):
    with pytest.raises(CompressorError, match=later):
        parse(spec)


def test_feedback_of_the_server_begins_behind_dense_steps():
    def body(engine):
        request, state = Request("w", shape=(4000,)), {}
        group = engine.declare(
            "g", [request], [parse("int4 | warmup(dense=2) | server_ef")], [state]
        )
        told = []
        for step in range(4):
            x = np.random.default_rng([step, engine.rank]).normal(size=4000).astype(np.float32)
            exact = sum(np.random.default_rng([step, r]).normal(size=4000) for r in range(3)) / 3
            group.submit("w", x)
            group.wait(60)
            told.append(np.linalg.norm(x - exact) / np.linalg.norm(exact))
        return told

    for told in with_engines(3, body):
        assert max(told[:2]) < 1e-6
        assert min(told[2:]) > 0.01


@pytest.mark.parametrize("spec", ["topk(ratio=1.0) | momentum_correction(masking=False)"])
@pytest.mark.parametrize("schedule", ["", " | warmup(dense=5)"])
def test_momentum_is_that_of_tensors_of_all_sizes_in_all_steps(spec, schedule):
    """Lin et al.: the optimizer has none, for no tensor."""
    first, *rest = spec.split(" | ")
    before, behind = (" | ".join([first + schedule, *rest]), spec + schedule)
    sizes = {"bias": 10, "norm": 1000, "weight": 4096}

    def body(engine):
        requests = [Request(name, shape=(n,)) for name, n in sizes.items()]
        told = []
        for title, text in (("a", before), ("b", behind)):
            states = [{} for _ in requests]
            group = engine.declare(title, requests, [parse(text)] * 3, states)
            for step in range(8):
                for name, n in sizes.items():
                    x = np.ones(n, np.float32)
                    group.submit(name, x)
                    told.append((step, x))
                group.wait(60)
        return told

    for told in with_engines(2, body):
        for step, x in told:
            np.testing.assert_allclose(x, (1 - 0.9 ** (step + 1)) / 0.1, rtol=1e-5)


class Halves(Compressor):
    """Makes anew what it is in each step, as a plugin may."""

    share: float = option(1.0, gt=0)

    def traits(self):
        return Traits("gather", fixed_size=True, granularity=1, min_size=0)

    def layout(self, n):
        return (Part("values", "float32", n),)

    def compress(self, x, ctx):
        return {"values": x * np.float32(self.share)}

    def decompress(self, payload, out, ctx):
        out[:] = payload["values"]

    def at(self, step):
        return self.replace(share=0.5) if step < 2 else self.replace(share=1.0)

    def over_steps(self):
        return [self.replace(share=0.5), self.replace(share=1.0)]


class DenseAlone(Modifier):
    """Wraps payloads alone: in dense steps it steps aside."""

    def validate(self):
        if self.is_bound() and self.wrapped_compressor.traits().combine == "sum":
            raise CompressorError("no payload")

    def at(self, step):
        now = self.wrapped_compressor.at(step)
        return now if now.traits().combine == "sum" else self.replace(inner=now)


def test_plugins_say_what_they_are_over_the_steps():
    fed = Halves() | parse("ef")
    assert [str(each.wrapped_compressor.share) for each in fed.over_steps()] == ["0.5", "1.0"]
    both = Halves() | DenseAlone() | parse("ef")
    assert both.at(0).wrapped_compressor.wrapped_compressor.share == 0.5
    aside = parse("int8 | warmup(dense=2)") | DenseAlone()
    assert str(aside.at(0)) == "none"
    assert aside.over_steps() == [aside]


def test_momentum_is_in_units_of_the_cast_that_it_stands_before():
    """Means by fp16 are divided before they are added, and what is remembered is so, too."""

    def body(engine):
        spec = parse("fp16 | momentum_correction(masking=False) | warmup(dense=3)")
        group = engine.declare("g", [Request("w", shape=(64,))], [spec], [{}])
        told = []
        for _ in range(6):
            x = np.ones(64, np.float32)
            group.submit("w", x)
            group.wait(60)
            told.append(float(x[0]))
        return told

    for told in with_engines(3, body):
        np.testing.assert_allclose(told, (1 - 0.9 ** np.arange(1, 7)) / 0.1, rtol=2e-3)


def test_momentum_over_a_cast_that_comes_and_goes_is_refused():
    """Its units would change with the steps."""
    with pytest.raises(CompressorError, match="put the schedule behind it, as in 'fp16"):
        parse("fp16 | warmup(dense=2) | momentum_correction")
    for spec in ("topk | warmup(dense=2)", "topk | fp16 | warmup(dense=2)", "fp16"):
        parse(f"{spec} | momentum_correction")


class Sometimes(Compressor):
    """Exchanges nothing in odd steps."""

    def traits(self):
        return Traits("rounds", min_size=0)

    def exchange(self, x, out, ctx, local=None):
        if ctx.step % 2:
            out[...] = 7
            return
        received = yield Round(x.copy(), "mean")
        out[...] = received


class Turned(Modifier):
    def finish(self, out, ctx):
        out *= -1


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_what_is_known_without_an_exchange_is_seen_as_well(dtype):
    def body(engine):
        spec = Sometimes() | Turned()
        group = engine.declare("g", [Request("w", dtype=dtype, shape=(64,))], [spec], [{}])
        told = []
        for _ in range(4):
            x = np.full(64, 3, dtype)
            group.submit("w", x)
            group.wait(60)
            told.append(set(x.tolist()))
        return told

    assert with_engines(2, body) == [[{-3.0}, {-7.0}, {-3.0}, {-7.0}]] * 2
