"""Metrics: what records hold, where they go, and that they change nothing."""

import json
import os
import signal
import threading
import time

import numpy as np
import pytest
from engines import with_engines

from ringlet.compressors import parse
from ringlet.fusion import Request, StepAbandoned
from ringlet.fusion.observe import probe
from ringlet.fusion.observe.metrics import Metrics
from ringlet.fusion.observe.probe import measure
from ringlet.fusion.observe.sinks import Callback, Dispatcher, JsonLines
from ringlet.fusion.recording.events import Quiet
from ringlet.ring.transports.local import run_local

N = 4000
SPECS = {"a": "topk(ratio=0.05) | ef", "b": "int8", "c": "none", "d": "fp16 | ef"}


def declare(engine, specs=SPECS):
    requests = [Request(name, shape=(N,), spec=spec) for name, spec in specs.items()]
    states = [{} for _ in requests]
    return engine.declare("model", requests, list(map(parse, specs.values())), states), states


def train(engine, group, steps):
    out = []
    for step in range(steps):
        rng = np.random.default_rng([engine.rank, step])
        arrays = {name: rng.standard_normal(N).astype(np.float32) for name in group.members}
        for name, x in arrays.items():
            group.submit(name, x)
        group.wait(60)
        out += [x.tobytes() for x in arrays.values()]
    return out


@pytest.mark.parametrize(("size", "dtype"), [(2, "fp32"), (3, "fp32"), (2, "bf16"), (3, "int8")])
def test_records_add_up_to_the_stats(size, dtype):
    specs = {name: spec.replace("| ef", f"| ef(dtype={dtype!r})") for name, spec in SPECS.items()}

    def body(engine):
        records = []
        recording = engine.metrics.start([Callback(records.append)], sample_every=2)
        group, _ = declare(engine, specs)
        engine.reset_stats()
        train(engine, group, 4)
        stats = engine.stats.as_dict()
        engine.submit(Request("x", shape=(10,)), np.ones(10, np.float32)).wait(60)
        engine.extensions.skipped(7, "overflow")
        recording.stop()
        recording.stop()
        train(engine, group, 1)
        return records, stats, engine.stats.skipped_steps

    for rank, (records, stats, skipped) in enumerate(with_engines(size, body)):
        run, *rest = records
        assert (run["kind"], run["rank"], run["size"]) == ("run", rank, size)
        assert run["network"]["bytes_per_s"] > 0
        steps = [r for r in rest if r["kind"] == "step"]
        assert [r["step"] for r in steps] == [0, 1, 2, 3]
        for name in ("raw_bytes", "wire_bytes", "compress_s", "communicate_s", "decompress_s"):
            assert sum(r[name] for r in steps) == pytest.approx(stats[name], rel=1e-6), name
        assert all(r["tensors"] == 4 and r["seconds"] > 0 for r in steps)
        assert all(r["uncompressed_most_s"] >= r["uncompressed_s"] > 0 for r in steps)
        layers = [r for r in rest if r["kind"] == "layers"]
        assert [r["step"] for r in layers] == [0, 2]
        by_name = {layer["name"]: layer for layer in layers[1]["layers"]}
        assert 0.5 < by_name["a"]["relative_error"] < 1
        assert 0 < by_name["b"]["relative_error"] < 0.05
        assert "relative_error" not in by_name["c"]
        assert 0 < by_name["d"]["relative_error"] < 1e-3
        assert by_name["a"]["residual_norm"] > by_name["d"]["residual_norm"] > 0
        assert "residual_norm" not in by_name["b"]
        assert by_name["a"]["wire_bytes"] < by_name["b"]["wire_bytes"] < by_name["d"]["wire_bytes"]
        total = sum(layer["wire_bytes"] for layer in by_name.values())
        assert total == pytest.approx(steps[2]["wire_bytes"])
        assert sum(r["tensors"] for r in rest if r["kind"] == "loose") == 1
        assert [r["why"] for r in rest if r["kind"] == "skipped"] == ["overflow"]
        assert skipped == 1


def test_the_relative_error_is_that_of_what_was_sent_and_measuring_changes_nothing():
    def body(engine, sample):
        records = []
        if sample:
            engine.metrics.start([Callback(records.append)], sample_every=1, network=False)
        specs = {"a": "topk(ratio=0.1) | ef", "r": "int8 | ef"}
        specs |= {"m": "topk(ratio=0.1) | momentum_correction"}
        group, states = declare(engine, specs)
        out = train(engine, group, 3)
        time.sleep(0.2)
        return out, [s["v" if "v" in s else "residual"].tobytes() for s in states], records

    plain = with_engines(2, lambda engine: body(engine, False))
    watched = with_engines(2, lambda engine: body(engine, True))
    assert [r[:2] for r in plain] == [r[:2] for r in watched]
    (layers, *_) = [r for r in watched[0][2] if r["kind"] == "layers"]
    layer = next(each for each in layers["layers"] if each["name"] == "a")
    of_momentum = next(each for each in layers["layers"] if each["name"] == "m")
    x = np.random.default_rng([0, 0]).standard_normal(N).astype(np.float32)
    lost = np.sort(np.abs(x))[: N - N // 10]
    assert layer["relative_error"] == pytest.approx(np.linalg.norm(lost) / np.linalg.norm(x), 1e-4)
    assert layer["residual_norm"] == pytest.approx(np.linalg.norm(lost), 1e-4)
    assert of_momentum["residual_norm"] > 0


def test_reductions_alone_are_counted():
    """As docs/observability.md says: neither gathers nor broadcasts are."""

    def body(engine):
        for kind in ("allgather", "broadcast"):
            engine.submit(Request(kind, kind, shape=(9,)), np.ones(9, np.float32)).wait(60)
        before = engine.stats.wire_bytes
        engine.submit(Request("sum", shape=(9,)), np.ones(9, np.float32)).wait(60)
        return before, engine.stats.wire_bytes

    assert with_engines(2, body) == [(0, 36), (0, 36)]


def test_abandoned_steps_are_counted_and_told():
    def body(engine):
        records = []
        recording = engine.metrics.start([Callback(records.append)], network=False)
        group, _ = declare(engine)
        group.submit("a", np.ones(N, np.float32))
        if engine.rank == 1:
            group.abandon("no batch left")
        else:
            for name in "bcd":
                group.submit(name, np.ones(N, np.float32))
            with pytest.raises(StepAbandoned):
                group.wait(60)
        train(engine, group, 1)
        recording.stop()
        return [r for r in records if r["kind"] != "run"], engine.stats.abandoned_steps

    for records, counted in with_engines(2, body):
        assert counted == 1
        assert "no batch left" in next(r["why"] for r in records if r["kind"] == "abandoned")
        (step,) = [r for r in records if r["kind"] == "step"]
        assert step["tensors"] == 4


def test_what_comes_after_the_start_is_told_where_the_engine_was_busy():
    """The engine of rank 0 hears of the start, and of all that came after it, at once."""
    busy, given_up, together = threading.Event(), threading.Event(), threading.Barrier(2)

    class Busy(Quiet):
        def encoding(self, *_):
            busy.set()
            assert given_up.wait(60)

    def body(engine):
        records = []
        first = engine.declare("first", [Request("x", shape=(N,))], [parse("none")], [{}])
        if engine.rank == 0:
            engine.extensions.observe(Busy())
            engine.extensions.settle()
            first.submit("x", np.ones(N, np.float32))
        assert busy.wait(60)
        recording = engine.metrics.start([Callback(records.append)], network=False)
        group, _ = declare(engine)
        if engine.rank == 1:
            group.submit("a", np.ones(N, np.float32))
            group.abandon("no batch left")
            given_up.set()
        recording.stop()
        together.wait(60)
        return [r["kind"] for r in records]

    assert with_engines(2, body) == [["run", "abandoned"]] * 2


def test_lines_are_whole_and_a_bad_sink_harms_nobody(tmp_path, caplog):
    class Bad:
        def write(self, record):
            raise OSError("no space left")

        def close(self):
            raise OSError("still none")

    path = tmp_path / "run.jsonl"
    dispatcher = Dispatcher([Bad(), JsonLines(path)])
    for i in range(5):
        dispatcher.put({"kind": "step", "step": i})
    dispatcher.close()
    dispatcher.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == list(range(5))
    assert caplog.text.count("metrics are lost in Bad") == 1


def test_a_slow_sink_drops_records_and_never_blocks(caplog):
    release, entered, got = threading.Event(), threading.Event(), []

    def slow(record):
        entered.set()
        release.wait(20)
        got.append(record)

    dispatcher = Dispatcher([Callback(slow)], limit=3)
    dispatcher.put({"n": 0})
    assert entered.wait(20)
    for i in range(10):
        dispatcher.put({"n": i})
    assert dispatcher.dropped == 7
    release.set()
    dispatcher.close()
    assert len(got) == 4
    assert "7 records of metrics were dropped" in caplog.text


def test_whoever_stops_a_recording_that_is_being_stopped_waits_for_its_records():
    def body(engine):
        records, at_return, full = [], [], threading.Event()

        def write(record):
            full.wait(60)
            records.append(record)

        recording = engine.metrics.start([Callback(write)], network=False)
        engine.extensions.skipped(1, "overflow")
        first = threading.Thread(target=recording.stop)  # as the engine does when others leave

        def second():
            recording.stop()
            at_return.append(len(records))

        threads = [first, threading.Thread(target=second)]
        first.start()
        while recording._on:
            time.sleep(0.001)
        threads[1].start()
        threads[1].join(0.1)
        full.set()
        for thread in threads:
            thread.join(60)
        return len(records), at_return

    assert with_engines(1, body) == [(2, [2])]


def test_an_observer_that_fails_is_dropped_and_training_goes_on(caplog):
    class Faulty(Metrics):
        def bucket_done(self, event):
            raise RuntimeError("a bug")

    def body(engine):
        engine.extensions.observe(Faulty(lambda record: None))
        engine.extensions.settle()
        group, _ = declare(engine)
        train(engine, group, 2)
        return engine._worker.recorder.observers

    assert with_engines(2, body) == [(), ()]
    assert "an observer failed and is dropped" in caplog.text


def test_exchanges_in_rounds_are_recorded():
    def body(engine):
        records = []
        recording = engine.metrics.start([Callback(records.append)], 1, network=False)
        group, _ = declare(engine, {"p": "powersgd(rank=2)"})
        request = Request("m", shape=(64, 64), spec="powersgd(rank=2)")
        group = engine.declare("matrix", [request], [parse("powersgd(rank=2)")], [{}])
        group.submit("m", np.ones(64 * 64, np.float32))
        group.wait(60)
        recording.stop()
        return records

    records = with_engines(2, body)[0]
    (step,) = [r for r in records if r["kind"] == "step"]
    assert 0 < step["wire_bytes"] < step["raw_bytes"]
    assert step["compress_s"] > 0
    (layers,) = [r for r in records if r["kind"] == "layers"]
    assert layers["layers"][0]["norm"] == pytest.approx(64)


def test_the_network_is_measured_once_for_all():
    networks = run_local(measure, 3)
    assert len(set(networks)) == 1
    for pace in networks[0]:
        assert pace.seconds(1e9, 1e9) > pace.seconds(1e6, 1e6) > 0


def test_other_programs_move_the_bound_and_not_the_least(monkeypatch):
    """A median of five said thrice as much where something else ran in three of them."""
    calls = 1 + probe._TIMES[1]
    own = threading.local()

    def timed(call):
        call()
        at = own.at = getattr(own, "at", -1) + 1
        busy = 3 if at % 5 in (1, 2, 4) else 1
        return busy * (0.001, 0.011, 0.001)[at // calls]

    monkeypatch.setattr(probe, "_timed", timed)
    monkeypatch.setattr(probe, "_SECONDS", 60.0)
    (least, upper), _ = run_local(measure, 2)
    assert least.latency_s == pytest.approx(0.001, rel=0.05)
    assert least.seconds(4 << 20, 0) == pytest.approx(0.011, rel=0.05)
    assert upper.latency_s == pytest.approx(3 * least.latency_s)
    assert upper.bytes_per_s == pytest.approx(least.bytes_per_s / 3)
    assert upper.copied_bytes_per_s == pytest.approx(least.copied_bytes_per_s / 3)


def test_a_slow_network_is_not_measured_for_long(monkeypatch):
    calls = []

    def timed(call):
        calls.append(call())
        return 4.0

    monkeypatch.setattr(probe, "_timed", timed)
    networks = run_local(measure, 2)
    assert networks[0] == networks[1]
    assert len(calls) == 2 * 3 * 3  # ranks, sizes and copies, times with the first one


def test_a_forked_child_does_not_wait_for_its_parents_engine_to_stop_recording():
    """It waited for a minute."""

    def body(engine):
        recording = engine.metrics.start([Callback(lambda record: None)], network=False)
        child = os.fork()
        if not child:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.alarm(10)
            recording.stop()
            os._exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        recording.stop()
        return code

    assert with_engines(1, body) == [0]
