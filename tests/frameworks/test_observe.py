"""Metrics and timelines as users switch them on, and the report that is drawn from them."""

import contextlib
import json
import os
import re
import resource
import socket
import threading
import time
import types
import urllib.error
import urllib.request
from html.parser import HTMLParser
from itertools import pairwise

import numpy as np
import pytest

import ringlet.job.session as runtime_module
from ringlet.__main__ import main
from ringlet.compressors import parse
from ringlet.fusion import Request
from ringlet.fusion.autotune import sample_log
from ringlet.fusion.autotune.sample_log import Log
from ringlet.fusion.extensions import ENGINE_THREAD
from ringlet.fusion.observe import probe
from ringlet.job.observation import start_timeline, stop_timeline, timeline_span
from ringlet.metrics import prometheus, switches
from ringlet.metrics.prometheus import EVERY, MOST, PAUSE, Prometheus, Server, serve
from ringlet.observe import start_metrics, step_skipped
from ringlet.report.charts import scale
from ringlet.report.summary import (
    NotARun,
    RunSummary,
    amount,
    duration,
    percentile,
    read,
    spread,
    verdict,
)
from ringlet.ring.transports.local import run_local


def train(steps=4, spec="int8 | ef"):
    engine = runtime_module.current().engine
    requests = [Request(f"layer{i}.weight", shape=(5000,), spec=spec) for i in range(3)]
    group = engine.declare("model", requests, [parse(spec)] * 3, [{} for _ in requests])
    for _ in range(steps):
        for request in requests:
            group.submit(request.name, np.ones(5000, np.float32))
        group.wait(60)


def ranks(size, body):
    def rank_main(comm):
        runtime_module.init()
        try:
            return body(comm.rank)
        finally:
            runtime_module.shutdown()

    return run_local(rank_main, size)


def test_what_later_epochs_record_stands_behind_what_is_there(tmp_path, monkeypatch):
    """Of an elastic job: each one switches on anew what the environment asks for."""
    monkeypatch.setenv("RINGLET_METRICS", str(tmp_path / "run.jsonl"))
    monkeypatch.setenv("RINGLET_TIMELINE", str(tmp_path / "t.json"))
    log = str(tmp_path / "tune.csv")

    def body(rank):
        engine = runtime_module.current().engine
        for _ in range(3):
            engine.submit(Request("w", shape=(8,)), np.ones(8, np.float32)).wait(60)
        Log(log).write(1, {"cycle_time": 0.001, "fusion_threshold": 4}, 1.0)

    for epoch in (1, 2, 3):
        for module in (switches, sample_log):
            monkeypatch.setattr(module, "present", lambda epoch=epoch: epoch)
        ranks(1, body)
    lines = (tmp_path / "run.jsonl").read_text().splitlines()
    assert [json.loads(line)["kind"] for line in lines].count("run") == 3
    files = {path.name for path in tmp_path.iterdir()}
    assert {"t.json", "t.epoch2.json", "t.epoch3.json"} < files
    with open(log) as told:
        assert [line.split(",")[0] for line in told] == ["sample", "1", "1", "1"]


def test_the_environment_switches_everything_on(tmp_path, monkeypatch):
    monkeypatch.setenv("HOROVOD_TIMELINE", str(tmp_path / "t.json"))
    monkeypatch.setenv("HOROVOD_TIMELINE_MARK_CYCLES", "1")
    monkeypatch.setenv("RINGLET_METRICS", str(tmp_path / "run{rank}.jsonl"))
    monkeypatch.setenv("RINGLET_METRICS_EVERY", "2")
    monkeypatch.setenv("RINGLET_TENSORBOARD", str(tmp_path / "board"))
    pytest.importorskip("tensorboard")
    ranks(2, lambda rank: train())
    events = json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    for rank in range(2):
        run = read(tmp_path / f"run{rank}.jsonl")
        assert (run.facts["rank"], run.facts["size"], len(run.steps)) == (rank, 2, 4)
        assert len(run.layers) == 2
        assert list((tmp_path / "board" / f"rank{rank}").glob("events*"))


def test_no_rank_goes_on_while_init_measures_the_network(tmp_path, monkeypatch):
    """A program that computes meanwhile made the network look ten times as slow as it is."""
    monkeypatch.setenv("RINGLET_METRICS", str(tmp_path / "run.jsonl"))
    by = []

    def noted(call, timed=probe._timed):
        by.append(threading.current_thread().name)
        return timed(call)

    monkeypatch.setattr(probe, "_timed", noted)
    ranks(2, lambda rank: train())
    assert by
    assert not [name for name in by if name.startswith(ENGINE_THREAD)]
    run = read(tmp_path / "run.jsonl")
    assert run.facts["network"]["latency_s"] >= 0
    least, most = run.without
    assert 0 < least <= most


def test_a_folder_is_no_run(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in (".", str(tmp_path)):
        assert main(["report", name]) == 2
        assert capsys.readouterr().err == f"ringlet report: {name} is a folder, not a file\n"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("RINGLET_METRICS_EVERY", "often", "RINGLET_METRICS_EVERY='often' is not a whole number"),
        ("RINGLET_PROMETHEUS", "here", r"RINGLET_PROMETHEUS='here' is not \[host:\]port"),
        ("RINGLET_TIMELINE", "/nowhere/at/t.json", "RINGLET_TIMELINE.* /nowhere/at does not exist"),
        ("RINGLET_METRICS", "/nowhere/{rank}", "RINGLET_METRICS='/nowhere/0'.* does not exist"),
        ("RINGLET_METRICS", "/proc/{rank}.x", "cannot be written to /proc/0.x: .* RINGLET_METRICS"),
        ("RINGLET_TENSORBOARD", "/proc/x", "to /proc/x/rank0: .*; let RINGLET_TENSORBOARD name a"),
        ("RINGLET_TIMELINE", "/proc/x.json", "^RINGLET_TIMELINE='/proc/x.json': .*No such file"),
    ],
)
def test_what_the_environment_gets_wrong_is_named(name, value, said, monkeypatch):
    monkeypatch.setenv(name, value)
    with pytest.raises((ValueError, OSError), match=said):
        ranks(1, lambda rank: None)
    assert not runtime_module.is_initialized()


@pytest.mark.parametrize("variable", ["RINGLET_METRICS", "RINGLET_TIMELINE", "HOROVOD_TIMELINE"])
def test_a_file_of_another_kind_is_not_overwritten(variable, monkeypatch, tmp_path):
    path = tmp_path / "train.py"
    monkeypatch.setenv(variable, str(path))
    path.write_text("import torch\n")
    with pytest.raises(OSError, match="holds something else") as told:
        ranks(1, lambda rank: None)
    assert variable in str(told.value)
    assert "train.py" in str(told.value)
    assert not runtime_module.is_initialized()
    assert path.read_text() == "import torch\n"
    for before in ("", None, "ours"):  # empty, not there, and of the last run
        if before is None:
            path.unlink()
        elif not before:
            path.write_text("")
        ranks(1, lambda rank: train())
        assert path.read_text().startswith("{")


def test_no_report_nor_merged_timeline_takes_the_place_of_a_program(tmp_path, capsys):
    record, part, program = (tmp_path / name for name in ("run.jsonl", "t.json", "train.py"))
    recorded(record, [0.1] * 3)
    part.write_text('[\n{"name":"x","ts":1.5,"pid":0}\n]\n')
    program.write_text("import torch\n")
    for words in (["report", record, "-o", program], ["timeline", program, part]):
        assert main([str(word) for word in words]) == 2
        said = "is there already, and holds something else: it is not overwritten"
        assert capsys.readouterr().err == f"ringlet {words[0]}: {program} {said}\n"
        assert program.read_text() == "import torch\n"
    program.write_text("")  # nobody's
    for words in (["report", record, "-o", program], ["timeline", tmp_path / "all.json", part]):
        for _ in range(2):  # one may take the place of an earlier one
            assert main([str(word) for word in words]) == 0


def test_a_timeline_takes_the_place_of_no_device_nor_pipe(monkeypatch, tmp_path):
    path = tmp_path / "pipe"
    os.mkfifo(path)
    monkeypatch.setenv("RINGLET_TIMELINE", str(path))
    with pytest.raises(OSError, match="is not replaced; name a file"):
        ranks(1, lambda rank: None)
    assert path.is_fifo()


def test_metrics_and_a_timeline_do_not_share_a_file(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOROVOD_TIMELINE", str(tmp_path / "run.json"))
    monkeypatch.setenv("RINGLET_METRICS", "run.json")
    with pytest.raises(ValueError, match="is the file of HOROVOD_TIMELINE too; name two files"):
        ranks(1, lambda rank: None)
    assert not (tmp_path / "run.json").exists()


def test_timelines_and_metrics_by_call(tmp_path):
    def body(rank):
        got = []
        start_timeline(tmp_path / "t.json")
        recording = start_metrics(callbacks=[got.append], network=False)
        with timeline_span("backward"):
            train()
        step_skipped(3)
        recording.stop()
        stop_timeline()
        with pytest.raises(ValueError, match="say where metrics go"):
            start_metrics()
        with pytest.raises(ValueError, match="number of steps"):
            start_metrics(callbacks=[got.append], sample_every=-1)
        return [record["kind"] for record in got]

    for kinds in ranks(2, body):
        assert kinds == ["run", "step", "layers", "step", "step", "step", "skipped"]
    assert "backward" in (tmp_path / "t.json").read_text()


def test_a_process_that_is_forked_leaves_the_port_to_its_rank():
    """As workers of a DataLoader do: in an elastic job's next epoch it was taken."""
    pytest.importorskip("prometheus_client")
    sink = Prometheus(0)
    port = sink.listen("127.0.0.1", 0)
    (reading, writing), (heard, tells) = os.pipe(), os.pipe()
    child = os.fork()
    if not child:
        os.close(writing)
        os.write(tells, b"x")  # it has begun, and given the port up
        os.read(reading, 1)  # until the other end is closed
        os._exit(0)
    try:
        os.read(heard, 1)
        sink.close()
        again = Prometheus(0)
        assert again.listen("127.0.0.1", port) == port
        again.close()
    finally:
        for descriptor in (reading, writing, heard, tells):
            os.close(descriptor)
        os.waitpid(child, 0)


def test_a_later_epoch_goes_on_without_what_it_cannot_record(monkeypatch, tmp_path, caplog):
    pytest.importorskip("prometheus_client")
    gone = tmp_path / "gone"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        named = {
            "RINGLET_METRICS": f"{gone}/m.jsonl",
            "RINGLET_TIMELINE": f"{gone}/t.json",
            "RINGLET_PROMETHEUS": str(taken.getsockname()[1]),
        }
        for name, value in named.items():
            with monkeypatch.context() as patch:
                patch.setenv(name, value)
                with pytest.raises(OSError, match=r"exist|cannot be served"):
                    ranks(1, lambda rank: None)
        for name, value in named.items():
            monkeypatch.setenv(name, value)
        for module in (switches, sample_log):
            monkeypatch.setattr(module, "present", lambda: 2)
        assert ranks(1, lambda rank: train(2) or 7) == [7]
        Log(f"{gone}/log.csv").write(0, {"cycle_time": 1.0}, 1.0)
    for lost in ("m.jsonl", "a timeline", "on port", "log.csv"):
        assert lost in caplog.text


def test_prometheus_serves_what_was_counted(caplog):
    pytest.importorskip("prometheus_client")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError, match="cannot be served on port"):
            serve(taken.getsockname()[1], 0, 0)
    for host in ("nosuchhost.invalid", "nosuch..host"):
        told = f"on port 9003 of {host}: .*RINGLET_PROMETHEUS.*an address of this host"
        with pytest.raises(OSError, match=told):
            serve(f"{host}:9000", 3, 3)

    def body(rank):
        recording = start_metrics(prometheus="127.0.0.1:0", sample_every=1)
        (sink,) = recording._dispatcher._sinks
        train()
        runtime_module.current().engine.extensions.settle()
        while recording._dispatcher._queue:
            pass
        port = sink._server.server_port
        assert (
            f"rank {rank} serves metrics for Prometheus on port {port} of 127.0.0.1" in caplog.text
        )
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as page:
            text = page.read().decode()
        recording.stop()
        with pytest.raises(urllib.error.URLError):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=2)
        return text

    for rank, text in enumerate(ranks(2, body)):
        values = dict(re.findall(r"^(ringlet_\S+) (\S+)$", text, re.MULTILINE))
        label = f'rank="{rank}"'
        assert float(values[f'ringlet_steps_total{{group="model",{label}}}']) >= 3
        assert 3 < float(values[f"ringlet_compression_ratio{{{label}}}"]) < 4
        error = f'ringlet_relative_error{{layer="layer0.weight",{label}}}'
        assert float(values[error]) < 0.1


def test_visits_follow_each_other_slowly_after_a_first_few(monkeypatch):
    """Each takes the interpreter from training, whoever asks."""
    pytest.importorskip("prometheus_client")
    now = [100.0]
    clock = types.SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda seconds: now.__setitem__(0, now[0] + seconds)
    )
    monkeypatch.setattr(prometheus, "time", clock)
    monkeypatch.setattr(prometheus.WSGIServer, "get_request", lambda self: None)
    sink = serve("127.0.0.1:0", 0, 0)
    try:
        for visits, seconds in ((MOST, 0.0), (MOST + 20, 20 * EVERY)):
            now[0] += 1000.0
            began = now[0]
            for _ in range(visits):
                sink._server.get_request()
            assert now[0] - began == pytest.approx(seconds)
    finally:
        sink.close()


@pytest.mark.parametrize("address", ["127.0.0.1", "[::1]"])
def test_strangers_who_hold_connections_take_no_more_than_some(address):
    pytest.importorskip("prometheus_client")
    try:
        sink = serve(f"{address}:0", 0, 0)
    except OSError:
        pytest.skip(f"{address} is no address of this host")
    server = sink._server
    with contextlib.ExitStack() as stack:
        stack.callback(sink.close)
        silent = []
        for _ in range(MOST + 3):  # one after the other, or they would wait to be let in
            silent.append(stack.enter_context(socket.create_connection(server.server_address[:2])))
            silent[-1].sendall(b"GET /met")
            while len(server._open) < min(len(silent), MOST):
                pass
        for early in silent[:3]:
            early.settimeout(60)
            assert early.recv(1) == b""
        assert len(server._open) == MOST
        with urllib.request.urlopen(f"http://{address}:{server.server_port}/metrics") as page:
            assert b"ringlet_steps" in page.read()
        sink.close()
        silent[-1].settimeout(60)
        assert silent[-1].recv(1) == b""


def test_without_a_descriptor_the_server_waits_for_one_in_peace(monkeypatch):
    pytest.importorskip("prometheus_client")
    tries, once = [], Server.get_request

    def noted(self):
        tries.append(time.monotonic())
        return once(self)

    monkeypatch.setattr(Server, "get_request", noted)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with socket.socket() as scraper, contextlib.closing(serve("127.0.0.1:0", 0, 0)) as sink:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, before[1]))  # those that are open stay
        try:
            scraper.connect(sink._server.server_address[:2])
            while len(tries) < 4:
                time.sleep(0.01)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert min(later - one for one, later in pairwise(tries[:4])) >= PAUSE
        scraper.settimeout(60)
        scraper.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
        assert scraper.recv(12, socket.MSG_WAITALL) == b"HTTP/1.0 200"


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make folders of others")
def test_tensorboard_writes_through_no_link_of_a_stranger(tmp_path):
    pytest.importorskip("tensorboard")
    shared, precious = tmp_path / "shared", tmp_path / "precious"
    precious.mkdir()
    shared.mkdir()
    shared.chmod(0o1777)  # as /tmp is
    board = shared / "board"
    board.symlink_to(precious)
    os.chown(board, 65534, 65534, follow_symlinks=False)

    def body(rank):
        with pytest.raises(OSError, match=r"belongs to another user.*let RINGLET_TENSORBOARD"):
            start_metrics(tensorboard=board)

    ranks(1, body)
    assert not list(precious.rglob("*tfevents*"))


def test_a_start_that_fails_leaves_nothing_open(tmp_path):
    pytest.importorskip("prometheus_client")
    pytest.importorskip("tensorboard")
    (tmp_path / "file").touch()

    def body(rank):
        for _ in range(2):  # by the second time the port would be in use
            with pytest.raises(NotADirectoryError, match="let RINGLET_TENSORBOARD name"):
                start_metrics(prometheus=where, tensorboard=tmp_path / "file" / "board")

    with socket.socket() as held:  # no other process gets its port, but who shares it may listen
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        where = f"127.0.0.1:{held.getsockname()[1]}"
        ranks(1, body)


def test_a_stranger_who_says_much_is_hung_up_on():
    pytest.importorskip("prometheus_client")
    sink = serve("127.0.0.1:0", 0, 0)
    with contextlib.closing(sink):
        where = sink._server.server_address[:2]
        with socket.create_connection(where, timeout=60) as stranger:
            answer = b""
            with contextlib.suppress(ConnectionError):
                stranger.sendall(b"GET /metrics HTTP/1.0\r\n" + b"A: %s\r\n" % (b"b" * 9999) * 9)
                stranger.sendall(b"\r\n")
                answer = stranger.recv(1)
            assert answer == b""
        with socket.create_connection(where, timeout=60) as scraper:
            scraper.sendall(b"GET /metrics HTTP/1.0\r\nA: %s\r\n\r\n" % (b"b" * 9999))
            assert scraper.recv(12, socket.MSG_WAITALL) == b"HTTP/1.0 200"


def test_missing_packages_are_named(monkeypatch):
    import builtins

    real = builtins.__import__

    def lacking(name, *args, **kwargs):
        if name.startswith(("prometheus_client", "torch.utils.tensorboard")):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", lacking)
    with pytest.raises(ImportError, match=r"pip install 'ringlet\[viz\]'"):
        Prometheus(0)
    from ringlet.metrics.tensorboard import TensorBoard

    with pytest.raises(ImportError, match=r"pip install 'ringlet\[torch,viz\]'"):
        TensorBoard("/tmp/none")


class Parser(HTMLParser):
    """Checks that elements are closed, and collects what a page would load."""

    void = ("meta", "br")

    def __init__(self):
        super().__init__()
        self.open, self.loads = [], []

    def handle_starttag(self, tag, attrs):
        if tag not in self.void:
            self.open.append(tag)
        self.loads += [v for k, v in attrs if k in ("src", "href", "xlink:href")]
        assert tag not in ("script", "link", "iframe", "img")

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def report(*paths, capsys):
    code = main(["report", *map(str, paths)])
    out, err = capsys.readouterr()
    return code, out, err


def test_a_report_is_one_sound_page(tmp_path, capsys):
    path = tmp_path / "run.jsonl"

    def body(rank):
        if rank == 0:
            start_metrics(path, sample_every=2)
        train(spec="topk(ratio=0.01) | ef")

    ranks(2, body)
    with path.open("a") as out:
        out.write('{"kind": "step", "torn')
    code, out, _ = report(path, capsys=capsys)
    assert code == 0
    text = (tmp_path / "run.html").read_text()
    parser = Parser()
    parser.feed(text)
    assert parser.open == []
    assert parser.loads == []
    assert "url(" not in text
    assert "http" not in text
    assert "layer0.weight" in text
    assert "1 unreadable lines left out" in text
    assert out.startswith("Unclear whether compression paid")
    assert "where all ranks share one host. Record a run without compression" in out
    spec = str(parse("topk(ratio=0.01) | ef"))
    assert f"run.jsonl · compression {spec} · ringlet 0.1.0 · python 3" in text
    assert "95 % within" in text
    assert main(["report", "--json", str(path)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["verdict"] == "unclear"
    assert (told["sentence"] + "\n" + told["page"] + "\n") == out


def test_titles_are_numbered_and_leave_nothing_but_a_count():
    def body(rank):
        runtime = runtime_module.current()
        titles = [runtime.title("SGD") for _ in range(1000)]
        return titles[:3], len(set(titles)), runtime.extras["titles"]

    assert ranks(1, body) == [(["SGD", "SGD 2", "SGD 3"], 1000, {"SGD": 1000})]


def test_a_report_shows_every_optimizer_and_what_is_sent_one_by_one(tmp_path, capsys):
    """Two groups and grouped operations in one file; and a file of the latter alone."""
    both, loose = tmp_path / "both.jsonl", tmp_path / "loose.jsonl"

    def body(rank):
        engine = runtime_module.current().engine
        recording = start_metrics(both, network=False) if rank == 0 else None
        for label, size in (("generator", 4000), ("critic", 2000)):
            request = Request(f"{label}.w", shape=(size,), spec="int8")
            group = engine.declare(label, [request], [parse("int8")], [{}])
            for _ in range(3):
                group.submit(f"{label}.w", np.ones(size, np.float32))
                group.wait()
        if recording:
            engine.extensions.call_soon(
                lambda: engine._worker.recorder.waited("the others wait for 1")
            )
            recording.stop()
        recording = start_metrics(loose, network=False) if rank == 0 else None
        request = Request("x", shape=(5000,))
        engine.submit(request, np.ones(5000, np.float32)).wait()
        if recording:
            recording.stop()

    ranks(2, body)
    code, _, _ = report(both, capsys=capsys)
    text = both.with_suffix(".html").read_text()
    assert code == 0
    assert text.index("generator: 3 steps") < text.index("critic: 3 steps")
    assert "critic.w" in text
    assert "the others wait for 1" in text
    run = read(both)
    assert run.per_step(lambda g: g.median("raw_bytes")) == 4 * (4000 + 2000)
    assert run.fewer > 3
    code, out, _ = report(loose, capsys=capsys)
    assert code == 0, out
    assert out.startswith("Nothing was compressed")


def test_an_error_that_was_not_measured_is_no_zero(tmp_path, capsys):
    """A layer that one sample lacks has no point there, and hovering says so."""
    path = recorded(tmp_path / "run.jsonl", [0.1] * 3, spec="int8 | ef")
    sizes = {"raw_bytes": 4000.0, "wire_bytes": 1000.0}
    layer = {"compressor": "int8", "collective": "allgather", "elements": 1000} | sizes
    with path.open("a") as out:
        for step, measured in enumerate(("w", "wb", "b")):
            layers = [
                layer | {"name": name} | ({"relative_error": 0.25} if name in measured else {})
                for name in "wb"
            ]
            out.write(json.dumps({"kind": "layers", "group": "g", "step": step, "layers": layers}))
            out.write("\n")
    code, _, err = report(path, capsys=capsys)
    assert (code, err) == (0, "")
    text = path.with_suffix(".html").read_text()
    assert "What compression loses" in text
    assert "step 2\nb: 25 %" in text
    assert "step 0\nb: not measured" in text
    assert "b: 0 %" not in text
    assert "nan" not in text


def test_what_runs_once_belongs_to_no_step(tmp_path, capsys):
    """The numbers of steps are the same without it; it has a place of its own."""
    path = recorded(tmp_path / "run.jsonl", [0.1] * 60, spec="int8 | ef")
    code, said, _ = report(path, capsys=capsys)
    without = path.with_suffix(".html").read_text()
    phases = {f"{p}_s": 3.0 for p in ("compress", "communicate", "decompress")}
    once = {"kind": "loose", "time": 1.7e9, "raw_bytes": 5e6, "wire_bytes": 2e6} | phases
    with path.open("a") as out:
        out.write((json.dumps(once) + "\n") * 2)
    assert report(path, capsys=capsys) == (code, said, "") == (0, said, "")
    text = path.with_suffix(".html").read_text()
    assert "Beside the steps" not in without
    assert "they sent 4.00 MB of 10.0 MB, and took 18.0 s of the engine" in text
    assert "none counts gathers and broadcasts" in text
    assert "beside them 4.00 MB by operations submitted one by one" in text
    tiles = re.compile('<div class="tiles">.*?<figure', re.DOTALL)
    assert tiles.search(text).group() == tiles.search(without).group()
    code, _, err = report(path, path, capsys=capsys)
    assert (code, err) == (0, "")
    assert (tmp_path / "run-run.html").read_text().count("<td>4.00 MB</td>") == 2


def test_no_median_exceeds_what_95_percent_are_within(tmp_path):
    """Of two groups both are sums: a small group's 95 % beside both groups' median are not."""
    path = recorded(tmp_path / "run.jsonl", [0.1] * 60)
    other = recorded(tmp_path / "other.jsonl", [0.1] * 60, exchange=0.4).read_text()
    with path.open("a") as out:
        out.write(other.replace('"group": "g"', '"group": "other"'))
    run = read(path)
    assert run.slowest >= run.took[0] == pytest.approx(0.404)


def recorded(path, intervals, exchange=0.004, spec="none"):
    """Write a run whose steps are so many seconds apart."""
    phases = {f"{p}_s": exchange / 3 for p in ("compress", "communicate", "decompress")}
    sizes = {"raw_bytes": 4000.0, "wire_bytes": 4000.0 if spec == "none" else 1000.0}
    layer = {"name": "w", "compressor": spec, "collective": "ring", "elements": 1000} | sizes
    ends = np.cumsum([1.7e9, *intervals]).tolist()
    lines = [{"kind": "layers", "group": "g", "step": 0, "layers": [layer]}]
    lines += [
        {"kind": "step", "group": "g", "step": i, "time": end, "seconds": 0.01} | sizes | phases
        for i, end in enumerate(ends)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize(
    ("ours", "said"),
    [
        ([0.05] * 60, "int8.jsonl is 2.00 times as fast: steps took 50.0 ms"),
        ([0.2] * 60, "int8.jsonl is 2.00 times as slow: steps took 200 ms"),
        ([0.104] * 60, "int8.jsonl makes no difference: steps took 104 ms"),
        ([0.08] * 30 + [0.12] * 30, "int8.jsonl cannot be told apart from none.jsonl: steps took"),
    ],
)
def test_two_recorded_runs_are_compared(tmp_path, capsys, ours, said):
    none = recorded(tmp_path / "none.jsonl", [0.1] * 60)
    int8 = recorded(tmp_path / "int8.jsonl", ours, spec="int8 | ef")
    code, out, err = report(none, int8, capsys=capsys)
    assert (code, err) == (0, "")
    assert out.startswith(said)
    text = (tmp_path / "none-int8.html").read_text()
    parser = Parser()
    parser.feed(text)
    assert parser.open == []
    # On a narrow screen charts scroll, and their letters stay legible.
    assert re.search(r'<div class="scroll"><svg viewBox="0 0 620 [^>]*min-width: 434px', text)
    for fact in ("none.jsonl · compression none", "int8.jsonl · compression int8 | ef"):
        assert fact in text


@pytest.mark.parametrize("least", [0.0, 5e-324])
def test_times_that_are_no_times_are_drawn_and_compared(tmp_path, capsys, least):
    none = recorded(tmp_path / "none.jsonl", [0.0] * 20, exchange=3 * least)
    none.write_text(none.read_text().replace('"seconds": 0.01', f'"seconds": {least}'))
    int8 = recorded(tmp_path / "int8.jsonl", [0.1] * 20, spec="int8 | ef")
    assert report(none, capsys=capsys)[0] == 0
    code, out, err = report(none, int8, capsys=capsys)
    assert (code, err) == (0, "")
    assert out.startswith("int8.jsonl is slower: steps took 100.0 ms")
    code, out, err = report(int8, none, capsys=capsys)
    assert (code, err) == (0, "")
    assert out.startswith("none.jsonl is faster: steps took 0.00")


def test_of_many_groups_the_largest_are_drawn(tmp_path, capsys):
    path = recorded(tmp_path / "run.jsonl", [0.1] * 3)
    other = recorded(tmp_path / "other.jsonl", []).read_text()
    with path.open("a") as out:
        for i in range(500):
            out.write(other.replace('"group": "g"', f'"group": "other {i}"'))
    assert report(path, capsys=capsys)[0] == 0
    text = path.with_suffix(".html").read_text()
    assert "<h2>g: 4 steps</h2>" in text
    assert text.count(": 1 step</h2>") == 19
    assert "<p>and 481 more groups, " in text
    assert len(text) < 300_000


def test_equal_runs_get_verdicts_that_agree():
    """Runs of the same noise: never one that compression paid, and one that it cost."""
    for plain in (0.0088, 0.0100, 0.0112):
        kinds = set()
        for seed in range(40):
            rng = np.random.default_rng(seed)
            drift = np.repeat(rng.normal(1, 0.08, 6), 20)
            run = made(4, 0.01, plain, 120)
            run.steps = [
                step | {f"{p}_s": 0.01 / 3 * d for p in ("compress", "communicate", "decompress")}
                for step, d in zip(run.steps, drift, strict=True)
            ]
            kinds.add(verdict(run)[0])
        assert not {"paid", "cost"} <= kinds
        assert "unclear" in kinds


def test_what_the_spread_holds():
    assert spread([3.0, 1.0, 2.0]) == (1.0, 3.0)
    steady = [1.0] * 50 + [9.0] + [1.0] * 49
    assert spread(steady) == (1.0, 1.0)
    assert spread(list(range(100))) == (14.5, 84.5)
    assert percentile([4.0, 1.0, 3.0, 2.0], 0.95) == 4.0
    assert percentile(list(range(1, 101)), 0.95) == 95


@pytest.mark.parametrize("content", ["", "not json\n", '{"kind":"run"}\n', "[1]\n"])
def test_a_file_without_steps_is_refused(tmp_path, content, capsys):
    path = tmp_path / "run.jsonl"
    path.write_text(content)
    code, _, err = report(path, capsys=capsys)
    assert code == 2
    assert f"{path} holds no step of a training run" in err
    assert "RINGLET_METRICS=run.jsonl" in err
    assert ("none of its lines is a record" in err) == (not content.startswith("{"))
    with pytest.raises(NotARun):
        read(path)
    recorded(path, [0.1] * 3)
    assert main(["report", str(path), "-o", str(tmp_path / "nosuch" / "x.html")]) == 2
    assert f"there is no folder {tmp_path / 'nosuch'} to write" in capsys.readouterr().err
    code, _, err = report(tmp_path / "none.jsonl", capsys=capsys)
    assert (code, "there is no file" in err, "RINGLET_METRICS=" in err) == (2, True, True)


def test_a_report_that_cannot_be_written_is_told_apart_from_a_run_that_is_not_there(
    tmp_path, capsys
):
    path, link = tmp_path / "run.jsonl", tmp_path / "link.html"
    recorded(path, [0.1] * 3)
    link.symlink_to(tmp_path / "elsewhere")
    for output, said in (
        (
            link,
            f"{link} is a symbolic link, and nothing is written through it; name the file itself",
        ),
        ("/proc/x.html", "/proc/x.html cannot be written: No such file or directory"),
    ):
        assert main(["report", str(path), "-o", str(output)]) == 2
        assert capsys.readouterr().err == f"ringlet report: {said}\n"


def test_a_record_may_have_a_name_that_is_no_utf_8(tmp_path):
    path = tmp_path / os.fsdecode(b"r\xfcn\xff.jsonl")
    recorded(path, [0.1] * 3)
    for paths in ([path], [path, path]):
        output = tmp_path / "page.html"
        assert main(["report", *map(str, paths), "-o", str(output)]) == 0
        assert "r\N{REPLACEMENT CHARACTER}n" in output.read_text(encoding="utf-8")
        output.unlink()


def test_no_report_takes_the_place_of_a_record(tmp_path, capsys):
    path, other = tmp_path / "run.jsonl", tmp_path / "run.html"  # which is the report's usual place
    for each in (path, other):
        recorded(each, [0.1] * 3)
    before = path.read_bytes()
    for words in ([path, "-o", path], [path], [other, "-o", path]):
        assert main(["report", *map(str, words)]) == 2
        assert "is a run's record, and would be lost; name another file" in capsys.readouterr().err
    assert path.read_bytes() == other.read_bytes() == before
    other.unlink()
    for _ in range(2):  # a report may take the place of an earlier one
        assert main(["report", str(path)]) == 0


def made(ratio, took, plain, steps=20, most=None, hosts=("a", "b")):
    third = {f"{p}_s": took / 3 for p in ("compress", "communicate", "decompress")}
    extra = {} if plain is None else {"uncompressed_s": plain}
    extra |= {} if most is None else {"uncompressed_most_s": most}
    return RunSummary(
        facts={"hosts": list(hosts)},
        steps=[{"raw_bytes": ratio * 1e6, "wire_bytes": 1e6, **third, **extra}] * steps,
    )


@pytest.mark.parametrize(
    ("run", "kind", "said"),
    [
        (made(4, 0.010, 0.030), "paid", "took 10.0 ms instead of about 30.0 ms"),
        (made(4, 0.030, 0.010), "cost", "train with compression='none'"),
        (made(4, 0.0100, 0.0105), "even", "made no difference to the time"),
        (made(1, 0.010, 0.010), "even", "Nothing was compressed"),
        (made(4, 0.010, None), "unknown", "the network was not measured"),
        (made(4, 0.010, 0.030, most=0.040), "paid", "instead of about 30.0 ms to 40.0 ms"),
        (made(4, 0.010, 0.005, most=0.030), "unclear", "where about 5.00 ms to 30.0 ms would do"),
        (made(4, 0.030, 0.010, hosts="a"), "unclear", "where all ranks share one host"),
        (made(4, 0.010, 0.030, hosts="a"), "unclear", "compare: ringlet report none.jsonl"),
        (made(1, 0.010, 0.010, hosts="a"), "even", "Nothing was compressed"),
    ],
)
def test_the_verdict_is_honest(run, kind, said):
    found, sentence = verdict(run)
    assert found == kind
    assert said in sentence


def test_leftovers_of_a_crash_are_merged_by_command(tmp_path, capsys):
    for rank in range(2):
        event = {"name": "x", "ph": "i", "pid": rank, "ts": 5.0 + rank}
        (tmp_path / f"t.rank{rank}.json").write_text("[\n" + json.dumps(event) + ",\n{tor")
    assert main(["timeline", str(tmp_path / "t.json")]) == 0
    assert "2 events of 2 ranks" in capsys.readouterr().out
    assert len(json.loads((tmp_path / "t.json").read_text())["traceEvents"]) == 2
    assert main(["timeline", str(tmp_path / "u.json")]) == 2
    assert "there is no" in capsys.readouterr().err
    parts = [tmp_path / f"t.rank{rank}.json" for rank in range(2)]
    before = parts[0].read_bytes()
    assert main(["timeline", *map(str, parts)]) == 2  # t.rank*.json
    assert f"ringlet timeline {tmp_path / 't.json'} {parts[0]}" in capsys.readouterr().err
    assert parts[0].read_bytes() == before
    (tmp_path / "u.rank0.json").write_text("{tor")
    assert main(["timeline", str(tmp_path / "u.json")]) == 2
    assert "no event of a timeline is in" in capsys.readouterr().err
    assert not (tmp_path / "u.json").exists()


def test_ticks_are_round_and_cover():
    for most in (1e-7, 0.3, 1, 7, 99, 1234567):
        ticks = scale(most)
        assert ticks[0] == 0
        assert ticks[-1] >= most * 0.999
        assert 3 <= len(ticks) <= 6
    assert scale(0) == scale(5e-324) == scale(1e-305) == [0, 1]
    for most in (1e-299, 1e300):
        assert scale(most)[-1] >= most * 0.999
    assert (duration(0.0123), duration(2e-6), amount(1234567)) == ("12.3 ms", "2.00 µs", "1.23 MB")
