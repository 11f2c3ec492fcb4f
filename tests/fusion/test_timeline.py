"""The timeline: what it shows, when it can be started and stopped, and what a crash leaves."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from itertools import pairwise

import numpy as np
import pytest
from engines import with_engines
from hypothesis import given
from hypothesis import strategies as st

from ringlet.compressors import parse
from ringlet.fusion import Request
from ringlet.fusion.observe import clocks
from ringlet.fusion.observe.merge import CLOCK, merge, rank_file, rank_files
from ringlet.fusion.observe.render import Renderer, Single
from ringlet.fusion.observe.tracefile import TraceFile
from ringlet.fusion.recording.events import Span
from ringlet.ring.transports.local import run_local


def train(engine, steps=3, spec="int8 | ef", name="model", tensors=4):
    requests = [Request(f"{name}.{i}", shape=(3000,), spec=spec) for i in range(tensors)]
    group = engine.declare(name, requests, [parse(spec)] * tensors, [{} for _ in requests])
    for _ in range(steps):
        for request in reversed(requests):
            group.submit(request.name, np.ones(3000, np.float32))
        group.wait(60)


@given(
    st.lists(st.tuples(st.integers(0, 50), st.integers(1, 9)), min_size=1, max_size=30),
)
def test_operations_share_as_few_rows_as_are_under_way_at_a_time(stretches):
    renderer = Renderer(0, "host")
    ended = sorted(stretches, key=lambda stretch: sum(stretch))  # as they are told
    rows = {}
    for i, (start, length) in enumerate(ended):
        span = Span("communicate", start, start + length)
        for event in renderer(Single("broadcast", str(i), float(start), [span])):
            if event["name"] == f"broadcast.{i}" and event["ph"] == "b":
                rows.setdefault(event["id"], []).append((start, start + length))
    for taken in rows.values():
        assert all(a[1] <= b[0] for a, b in pairwise(taken))  # none begins before another's end
    assert len(rows) <= len(stretches)
    if all(a[0] + a[1] <= b[0] for a, b in pairwise(ended)):
        assert len(rows) == 1


def events_of(path):
    whole = json.loads(path.read_text())
    return whole["traceEvents"], whole["otherData"]


def test_all_ranks_are_in_one_file_and_spans_nest(tmp_path):
    path, begun = tmp_path / "t.json", time.time()

    def body(engine):
        train(engine, 1, name="before")
        engine.timelines.start(path, mark_cycles=True)
        with engine.timelines.stretch("backward"):
            train(engine)
        engine.submit(Request("x", shape=(10,)), np.ones(10, np.float32)).wait(60)
        for name in ("b", "c", "d"):
            request = Request(name, "broadcast", shape=(10,))
            engine.submit(request, np.ones(10, np.float32)).wait(60)
        engine.timelines.stop()
        train(engine, 1, name="after")

    with_engines(3, body, fusion_threshold=30_000)
    events, said = events_of(path)
    assert os.listdir(tmp_path) == ["t.json"]
    assert said["ranks"] == 3
    assert {e["pid"] for e in events} == {0, 1, 2}
    names = {e["name"] for e in events}
    assert {"compress", "communicate", "alltoall", "allgather", "reduce", "decode"} <= names
    assert {"gather tensors", "wait for ranks", "backward", "allreduce.x", "broadcast.b"} <= names
    assert {
        f"{n}{kind}" for n in ("NEGOTIATE_", "") for kind in ("ALLREDUCE", "BROADCAST")
    } <= names
    assert abs(said["start_time_since_epoch_in_micros"] - begun * 1e6) < 60e6
    assert {"allreduce", "broadcast", "CYCLE_START", "step of model", "bytes", CLOCK} <= names
    assert not any("before" in name or "after" in name for name in names)
    for rank in range(3):
        mine = [e for e in events if e["pid"] == rank]
        # One after the other, so that one row of the track is enough.
        singles = [e for e in mine if e["name"].startswith("broadcast.")]
        assert len({e["id"] for e in singles}) == 1
        assert [e["ph"] for e in sorted(singles, key=lambda e: e["ts"])] == ["b", "e"] * 3
        rows = [e for e in mine if e["name"] == "operations that are not fused"]
        assert {e["id"] for e in rows} == {singles[0]["id"]}
        steps = [e for e in mine if e["name"] == "step of model"]
        assert [e["args"]["step"] for e in steps] == [0, 1, 2]
        assert sum(e["name"] == "allreduce.model.0" and e["ph"] == "i" for e in mine) == 3
        thread = sorted(
            (e for e in mine if e["ph"] == "X" and e["tid"] == 1),
            key=lambda e: (e["ts"], -e["dur"]),
        )
        open_until = []
        for event in thread:  # one behind the other, or one inside the other
            while open_until and open_until[-1] <= event["ts"] + 1e-3:
                open_until.pop()
            end = event["ts"] + event["dur"]
            assert all(end <= until + 1e-2 for until in open_until), event
            open_until.append(end)
        stages = [e for e in mine if e.get("cat") == "bucket"]
        for number in {e["id"] for e in stages}:
            depth = sum({"b": 1, "e": -1}[e["ph"]] for e in stages if e["id"] == number)
            assert depth == 0
        counters = [e["args"] for e in mine if e["ph"] == "C"]
        assert counters[-1]["sent"] < counters[-1]["uncompressed"] / 2
    assert min(e["ts"] for e in events if "ts" in e) >= 0


def test_any_rank_starts_and_stops_and_may_do_so_again(tmp_path):
    def body(engine):
        for i in range(3):
            path = tmp_path / f"{i}.json"
            if i < 2 and engine.rank == i:
                engine.timelines.start(path)
            elif i == 2:
                engine.timelines.start(path)  # all ranks call
            train(engine, 2, name=f"g{i}")
            if engine.rank == 0 or i == 2:
                engine.timelines.stop()
            train(engine, 1, name=f"quiet{i}")

    with_engines(2, body)
    for i in range(3):
        events, said = events_of(tmp_path / f"{i}.json")
        assert said["ranks"] == 2
        assert any(e["name"] == f"step of g{i}" for e in events)
        assert not any("quiet" in e["name"] for e in events)


def test_a_folder_and_a_file_may_have_names_that_are_no_utf_8(tmp_path):
    folder = tmp_path / os.fsdecode(b"f\xfc")
    folder.mkdir()
    path = folder / os.fsdecode(b"t\xff.json")

    def body(engine):
        if engine.rank == 0:
            engine.timelines.start(path)
        train(engine, 2, name="g")
        if engine.rank == 0:
            engine.timelines.stop()
        train(engine, 1, name="later")

    with_engines(2, body)
    assert [*folder.iterdir()] == [path]
    assert events_of(path)[1]["ranks"] == 2


def test_rank_0_decides_where_when_ranks_name_files_of_their_own(tmp_path):
    def body(engine):
        for i in range(8):  # each rank goes on as fast as it can, so that either is first
            engine.timelines.start(tmp_path / f"{i}.{engine.rank}.json")
            train(engine, 1, name=f"g{i}")
            engine.timelines.stop()
            if engine.rank == 0:
                events, said = events_of(tmp_path / f"{i}.0.json")
                assert said["ranks"] == 2
                assert any(e["name"] == f"step of g{i}" for e in events)

    with_engines(2, body)
    assert sorted(os.listdir(tmp_path)) == [f"{i}.0.json" for i in range(8)]


def test_a_timeline_ends_with_the_first_rank_that_shuts_down(tmp_path):
    path = tmp_path / "t.json"

    def body(engine):
        if engine.rank == 1:
            engine.timelines.start(path)
        train(engine)
        time.sleep(0.1 * engine.rank)

    with_engines(3, body)
    events, said = events_of(path)
    assert said["ranks"] == 3
    assert sum(e["name"] == "step of model" for e in events) == 9


def test_what_is_wrong_with_a_path_is_told(tmp_path):
    def body(engine):
        with pytest.raises(FileNotFoundError, match=r"directory .*nowhere does not"):
            engine.timelines.start(tmp_path / "nowhere" / "t.json")
        with pytest.raises(IsADirectoryError, match="name a file in it"):
            engine.timelines.start(tmp_path)
        with pytest.raises(ValueError, match="needs the name"):
            engine.timelines.start("")
        engine.timelines.start(tmp_path / "a.json")
        with pytest.raises(ValueError, match=r"being written to .*a\.json; stop it"):
            engine.timelines.start(tmp_path / "b.json")
        engine.timelines.stop()
        engine.timelines.stop()

    with_engines(1, body)
    assert events_of(tmp_path / "a.json")


def test_files_of_other_machines_travel_to_rank_0(tmp_path, monkeypatch):
    from ringlet.fusion.observe import timeline

    monkeypatch.setattr(timeline, "_PIECE", 1000)
    elsewhere = {r: tmp_path / f"disk{r}" for r in (1, 2)}
    for place in elsewhere.values():
        place.mkdir()
    own = timeline.rank_file
    local = threading.local()

    def of_rank(path, rank):
        there = elsewhere.get(rank) if getattr(local, "rank", 0) == rank else None
        return own(there / path.name if there else path, rank)

    monkeypatch.setattr(timeline, "rank_file", of_rank)

    def body(engine):
        engine.extensions.call_soon(lambda: setattr(local, "rank", engine.rank))
        engine.submit(Request("s", shape=(1,)), np.ones(1, np.float32)).wait(60)
        engine.timelines.start(tmp_path / "t.json")
        train(engine)
        engine.timelines.stop()

    with_engines(3, body)
    events, said = events_of(tmp_path / "t.json")
    assert said["ranks"] == 3
    assert sum(e["name"] == "step of model" for e in events) == 9
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == ["t.json"]
    assert all(place.is_dir() for place in elsewhere.values())  # which somebody may need


SECRET = '{"name": "secret", "ts": 1}\n'


def plant(kind, path, secret):
    """Put what leads to ``secret``, or nowhere, where a rank's part is to be, or is."""
    if path.exists():
        path.rename(path.with_name("away"))
    if kind == "link":
        path.symlink_to(secret)
    elif kind == "names":
        os.link(secret, path)
    elif kind == "pipe":
        os.mkfifo(path)
    else:
        path.write_text(SECRET)
        os.chown(path, 65534, 65534)


STRANGERS = pytest.param(
    "stranger's",
    marks=pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make files of others"),
)


@pytest.mark.parametrize("when", ["before", "meanwhile"])
@pytest.mark.parametrize("kind", ["link", "names", "pipe", STRANGERS])
def test_what_others_have_put_in_a_parts_place_is_not_merged(tmp_path, caplog, kind, when):
    folder, secret = tmp_path / "all", tmp_path / "secret"
    folder.mkdir()
    folder.chmod(0o1777)  # as /tmp is
    secret.write_text(SECRET)
    path = folder / "t.json"
    part = rank_file(path, 1)
    if when == "before":
        plant(kind, part, secret)

    def body(engine):
        if engine.rank == 0:
            engine.timelines.start(path)
        train(engine)  # from here on every rank has its part
        if engine.rank == 0:
            if when == "meanwhile":
                plant(kind, part, secret)
            engine.timelines.stop(60)

    with_engines(2, body)
    text = path.read_text()
    assert json.loads(text)["otherData"]["ranks"] == 1
    assert "step of model" in text
    assert "secret" not in text
    assert part.lstat()  # nor moved away
    left_out = [r.getMessage() for r in caplog.records if "left out" in r.getMessage()]
    assert len(left_out) == 1
    assert left_out[0].startswith("rank 1's part of the timeline is left out: [Errno ")
    assert left_out[0].endswith(f"not read: '{part}'") or kind == "link"


@pytest.mark.parametrize("kind", ["link", "names", "pipe", STRANGERS])
def test_nor_does_it_travel_to_rank_0(tmp_path, monkeypatch, caplog, kind):
    from ringlet.fusion.observe import timeline

    disk, secret = tmp_path / "disk", tmp_path / "secret"
    disk.mkdir()
    secret.write_text(SECRET)
    own, local = timeline.rank_file, threading.local()
    part = own(disk / "t.json", 1)

    def of_rank(path, rank):
        return part if getattr(local, "rank", 0) == rank == 1 else own(path, rank)

    monkeypatch.setattr(timeline, "rank_file", of_rank)

    def body(engine):
        engine.extensions.call_soon(lambda: setattr(local, "rank", engine.rank))
        engine.submit(Request("s", shape=(1,)), np.ones(1, np.float32)).wait(60)
        engine.timelines.start(tmp_path / "t.json")
        if engine.rank == 1:
            plant(kind, part, secret)
        train(engine)
        engine.timelines.stop(60)

    with_engines(2, body)
    text = (tmp_path / "t.json").read_text()
    assert json.loads(text)["otherData"]["ranks"] == 1
    assert "secret" not in text
    assert not own(tmp_path / "t.json", 1).exists()
    assert "this rank's part of the timeline is left out" in caplog.text


@pytest.mark.parametrize("stopped", [False, True])
def test_a_timeline_that_is_not_merged_in_time_is_told(tmp_path, monkeypatch, caplog, stopped):
    from ringlet.fusion.observe import timeline, timeline_control

    path, over = tmp_path / "t.json", threading.Event()

    def slow(*given):
        over.wait(60)
        return merge(*given)

    monkeypatch.setattr(timeline, "merge", slow)
    monkeypatch.setattr(timeline_control, "_AT_SHUTDOWN_S", 1.0)

    def body(engine):
        engine.timelines.start(path)
        train(engine)
        for seconds in (1.0, 0.1) if stopped else ():
            with pytest.raises(TimeoutError):
                engine.timelines.stop(seconds)

    with_engines(1, body)
    merging = [each for each in threading.enumerate() if each.name == "ringlet-merge"]
    over.set()
    for each in merging:
        each.join(60)
    named = "" if stopped else f" {path}"
    assert f"the timeline{named} is not merged after 1 s, and is not waited for" in caplog.text
    assert events_of(path)


def test_a_timeline_of_the_same_name_begins_while_the_last_is_merged(tmp_path, monkeypatch):
    from ringlet.fusion.observe import timeline

    path, begun = tmp_path / "t.json", threading.Event()

    def slow(*given):
        begun.wait(20)
        return merge(*given)

    monkeypatch.setattr(timeline, "merge", slow)

    def body(engine):
        for number in (1, 2):
            engine.timelines.start(path)
            train(engine, number, name=f"g{number}")
            if engine.rank == 0 or number == 2:
                begun.set()
            engine.timelines.stop()

    with_engines(2, body)
    events, said = events_of(path)
    assert said["ranks"] == 2
    assert sum(e["name"] == "step of g2" for e in events) == 4
    assert [*tmp_path.iterdir()] == [path]


def test_clock_offsets_are_enclosed():
    def body(comm):
        skew = [0.0, 12.5, -3.25][comm.rank]
        return clocks.estimate(comm, lambda: time.perf_counter() + skew)

    offsets = run_local(body, 3)
    for offset, skew in zip(offsets, [0.0, 12.5, -3.25], strict=True):
        assert abs(offset.seconds - skew) <= offset.uncertainty + 1e-9
        assert offset.uncertainty < 0.05
    assert run_local(clocks.estimate, 2) == [clocks.Offset(0.0, 0.0)] * 2


def test_merging_uses_rank_0s_clock_and_lets_clocks_drift(tmp_path):
    for rank, (first, last) in enumerate([(0.0, 0.0), (1000.0, 1010.0)]):
        with rank_file(tmp_path / "t.json", rank).open("w") as out:
            out.write("[\n")
            for at, offset in ((0.0, first), (100.0, last)):
                found = {"offset_us": offset, "epoch_us": 1e15 + at}
                clock = {"name": CLOCK, "ph": "i", "pid": rank, "args": found}
                out.write(json.dumps(clock | {"ts": 500 + at + offset}) + ",\n")
            middle = 500 + 50 + (first + last) / 2
            out.write(json.dumps({"name": "x", "ph": "i", "pid": rank, "ts": middle}) + ",\n")
            out.write('{"name": "cut of')
    merge(tmp_path / "t.json", rank_files(tmp_path / "t.json"))
    events, _ = events_of(tmp_path / "t.json")
    assert [e["ts"] for e in events if e["name"] == "x"] == pytest.approx([50, 50], abs=0.5)


def test_the_queue_is_bounded_and_a_full_disk_costs_events_only(tmp_path, caplog):
    def render(item):
        if item == "wait":
            entered.set()
            release.wait(20)
        return [{"name": str(item), "ph": "i", "ts": 0, "pid": 0}]

    entered, release = threading.Event(), threading.Event()
    file = TraceFile(tmp_path / "t.json", render, limit=5)
    file.put("wait")
    assert entered.wait(20)
    for i in range(9):
        file.put(i)
    release.set()
    file.close()
    assert file.dropped == 4
    events = json.loads((tmp_path / "t.json").read_text())
    assert [e["name"] for e in events] == ["wait", "0", "1", "2", "3", "4", "dropped"]

    full = TraceFile(tmp_path / "full.json", render)
    full.put("a")
    while full._at < 5:
        time.sleep(0.01)
    real, os_pwrite = os.pwrite, lambda fd, data, at: real(fd, data[:9], at)
    try:
        os.pwrite = os_pwrite
        full.put("b")
        while not full.dropped:
            time.sleep(0.01)
    finally:
        os.pwrite = real
    assert [e["name"] for e in json.loads((tmp_path / "full.json").read_text())] == ["a"]
    full.put("c")
    full.close()
    names = [e["name"] for e in json.loads((tmp_path / "full.json").read_text())]
    assert names == ["a", "c", "dropped"]
    assert "drops events: the disk is full" in caplog.text


def test_a_killed_process_leaves_valid_json(tmp_path):
    script = textwrap.dedent(
        f"""
        import itertools, time, numpy as np
        from pathlib import Path
        from ringlet.fusion import Engine, Request
        from ringlet.ring.control.opening import open_control
        from ringlet.ring.transports.local import LocalWorld
        engine = Engine(LocalWorld(1).communicators[0], open_control)
        engine.timelines.start({str(tmp_path / "t.json")!r})
        print("ready", flush=True)
        for i in itertools.count():
            engine.submit(Request("x", shape=(9,)), np.ones(9, np.float32)).wait()
            time.sleep(0.005)
        """
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"ready\n"
        (part,) = rank_files(tmp_path / "t.json")
        limit = time.monotonic() + 60
        while part.read_text().count('"ph"') <= 100 and time.monotonic() < limit:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
    assert len(json.loads(part.read_text())) > 10
    merge(tmp_path / "t.json", [part])
    assert len(events_of(tmp_path / "t.json")[0]) > 10
