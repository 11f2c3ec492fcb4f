"""Metrics files that come from anywhere, and links where files are to be written."""

import json
import os
from html.parser import HTMLParser
from types import SimpleNamespace

import pytest

from ringlet.cli import draw_report, merge_timeline
from ringlet.fusion.autotune.sample_log import Log
from ringlet.fusion.observe.merge import merge, rank_file, rank_files
from ringlet.fusion.observe.sinks import JsonLines
from ringlet.fusion.observe.tracefile import TraceFile
from ringlet.report.summary import read

EVIL = "<script>alert(1)</script>\"'&<img src=x onerror=alert(2)>"
ALLOWED = set(
    "html head meta title style body header h1 p div b span figure h2 i svg g path text rect"  # noqa: SIM905
    " circle details summary table thead tbody tr th td code label input".split()
)


class Page(HTMLParser):
    """Notes what a page does that a report of ours does not."""

    def __init__(self):
        super().__init__()
        self.wrong = []

    def handle_starttag(self, tag, attrs):
        if tag not in ALLOWED:
            self.wrong.append(tag)
        self.wrong += [name for name, _ in attrs if name.startswith("on") or name == "href"]


def good():
    phases = {f"{phase}_s": 0.001 for phase in ("compress", "communicate", "decompress")}
    sizes = {"raw_bytes": 4000.0, "wire_bytes": 1000.0}
    step = {"kind": "step", "time": 1.7e9, "group": "g", "seconds": 0.01, "uncompressed_s": 0.002}
    layer = {"name": "w", "compressor": "topk", "collective": "allgather", "elements": 1000}
    layer |= sizes | {"norm": 1.0, "relative_error": 0.1, "residual_norm": 0.5}
    network = {"bytes_per_s": 1e9, "latency_s": 1e-4}
    facts = {"kind": "run", "size": 2, "rank": 0, "transport": "gloo", "hosts": ["a", "b"]}
    return [
        facts | {"network": network},
        *[step | {"step": i} | sizes | phases for i in range(3)],
        {"kind": "layers", "group": "g", "step": 2, "layers": [layer]},
        {"kind": "abandoned", "group": "g", "step": 2, "why": "x"},
        {"kind": "skipped", "step": 2, "why": "x"},
    ]


def places(value, path=()):
    """Yield where a record holds a value that is no container."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in items:
        if isinstance(inner, dict | list):
            yield (*path, key)
            yield from places(inner, (*path, key))
        else:
            yield (*path, key)


def replaced(value, path, new):
    copy = json.loads(json.dumps(value))
    inner = copy
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = new
    return copy


def drawn(records, path, capsys):
    """Return the page of these records, or None where they hold no step."""
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    options = SimpleNamespace(metrics=[path], output=path.with_suffix(".html"), json=False)
    code = draw_report.main(options)
    said = capsys.readouterr()
    assert code in (0, 2)
    if code == 2:
        assert "holds no step of a training run" in said.err
        return None
    return options.output.read_text()


STRANGE = [
    EVIL, "", -1, 1e999, float("nan"), 10**400, None, True, [], {}, [EVIL], {"step": EVIL}, 2**70,
]  # fmt: skip


@pytest.mark.parametrize("strange", STRANGE, ids=range(len(STRANGE)))
def test_every_field_of_a_metrics_file_may_be_anything(tmp_path, strange, capsys):
    records = good()
    path = tmp_path / "run.jsonl"
    for i, record in enumerate(records):
        for place in places(record):
            changed = [*records[:i], replaced(record, place, strange), *records[i + 1 :]]
            text = drawn(changed, path, capsys)
            if text is not None:
                page = Page()
                page.feed(text)
                assert page.wrong == [], (place, strange)
    names = [r | {"group": EVIL} if "group" in r else r for r in records]
    assert "<script" not in drawn(names, path, capsys)


def test_names_of_a_file_are_shown_as_text(tmp_path, capsys):
    records = replaced(good(), (4, "layers", 0, "name"), EVIL)
    text = drawn(records, tmp_path / "run<b>.jsonl", capsys)
    page = Page()
    page.feed(text)
    assert page.wrong == []
    assert "&lt;script&gt;alert(1)" in text


def test_what_is_wrong_is_left_out_and_counted(tmp_path, capsys):
    records = good()
    records[2] = replaced(records[2], ("step",), EVIL)
    path = tmp_path / "run.jsonl"
    assert "1 unreadable lines left out" in drawn(records, path, capsys)
    with path.open("a") as file:
        file.write("[" * 100_000 + "\n" + '{"kind": "from a later version", "x": 1}\n')
    run = read(path)
    assert (run.torn, len(run.steps)) == (2, 2)


def test_parts_of_a_timeline_may_hold_anything(tmp_path):
    path = tmp_path / "t.json"
    lines = ["[", '{"name":"x","ts":1.5,"pid":0},', "[" * 100_000, "3,"]
    for strange in STRANGE:
        lines.append(json.dumps({"name": "x", "ts": strange, "pid": strange}) + ",")
        lines.append(json.dumps({"name": "ringlet clock", "ts": 1, "args": strange}) + ",")
        args = {"offset_us": strange, "epoch_us": strange}
        lines.append(json.dumps({"name": "ringlet clock", "ts": 1, "args": args}) + ",")
        lines.append(json.dumps({"name": "y", "ts": 2, "dur": strange, "args": [strange]}) + ",")
    lines.append('{"name":"y","ts":2,"dur":1e999},')
    rank_file(path, 0).write_text("\n".join(lines))
    clocks = [(0, 1e17), (5e-324, -1e17)]  # a drift that no number tells
    rank_file(path, 1).write_text(
        "\n".join(
            json.dumps({"name": "ringlet clock", "ts": at, "args": {"offset_us": o, "epoch_us": 1}})
            for at, o in clocks
        )
        + '\n{"name":"z","ts":9e17}\n'
    )
    merge(path, [rank_file(path, rank) for rank in range(2)])

    def constant(text):
        raise AssertionError(f"{text} is no JSON")

    whole = json.loads(path.read_text(), parse_constant=constant)
    names = [event["name"] for event in whole["traceEvents"]]
    assert names[0] == "x"
    assert "z" in names
    # Two of the strange are no finite numbers, and one has too many digits for a float.
    assert names.count("y") == len(STRANGE) - 2


WRITERS = {
    "metrics": lambda path: JsonLines(path).close(),
    "timeline": lambda path: TraceFile(path, lambda item: []).close(),
    "autotune": lambda path: Log(str(path)).close(),
}


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_nothing_is_written_through_a_link(tmp_path, writer):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("precious")
    link.symlink_to(target)
    with pytest.raises(OSError, match="is a symbolic link"):
        writer(link)
    assert target.read_text() == "precious"
    writer(tmp_path / "fresh")
    assert (tmp_path / "fresh").exists()


def test_what_autotuning_tries_is_not_written_over_a_program(tmp_path):
    path = tmp_path / "train.py"
    path.write_text("import torch\n")
    with pytest.raises(FileExistsError, match="holds something else"):
        Log(str(path))
    assert path.read_text() == "import torch\n"
    for before in ("", "hierarchical_allreduce,hierarchical_allgather,score\n", "ours"):
        if before != "ours":
            path.write_text(before)
        Log(str(path)).close()
        assert path.read_text().startswith("sample,")


def test_autotuning_goes_on_where_the_disk_of_its_log_is_full(caplog):
    log = Log("/dev/full")
    for sample in range(2):
        log.write(sample, {"cycle_time": 0.001}, 1.0)
    log.close()
    assert [record.getMessage() for record in caplog.records] == [
        "autotuning goes on without its log /dev/full: No space left on device"
    ]


def test_a_report_is_not_written_through_a_link(tmp_path, capsys):
    target = tmp_path / "target"
    target.write_text("precious")
    (tmp_path / "run.html").symlink_to(target)
    path = tmp_path / "run.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in good()))
    assert draw_report.main(SimpleNamespace(metrics=[path], output=None, json=False)) == 2
    assert "is a symbolic link" in capsys.readouterr().err
    assert target.read_text() == "precious"


def test_a_merged_timeline_replaces_a_link_and_follows_none(tmp_path):
    target, path = tmp_path / "target", tmp_path / "t.json"
    target.write_text("precious")
    secret = tmp_path / "secret"
    secret.write_text('{"name": "secret", "ts": 1}\n')
    for name in ("t.json", "t.json.part"):
        (tmp_path / name).symlink_to(target)
    rank_file(path, 0).write_text('[\n{"name":"x","ts":1.5,"pid":0}\n]\n')
    rank_file(path, 1).symlink_to(secret)
    os.mkfifo(rank_file(path, 2))  # which nobody would ever write to
    assert rank_files(path) == [rank_file(path, 0)]
    merge(path, rank_files(path))
    assert target.read_text() == "precious"
    assert [e["name"] for e in json.loads(path.read_text())["traceEvents"]] == ["x"]
    assert not path.is_symlink()


def test_a_part_that_has_become_a_link_is_read_where_it_is_named_only(
    tmp_path, monkeypatch, capsys
):
    path, secret = tmp_path / "t.json", tmp_path / "secret"
    secret.write_text('{"name": "secret", "ts": 1}\n')
    part = rank_file(path, 0)
    part.symlink_to(secret)
    monkeypatch.setattr(merge_timeline, "rank_files", lambda path: [part])  # as if found before
    assert merge_timeline.main(SimpleNamespace(path=path, parts=[])) == 2
    assert "is a symbolic link, and not read through" in capsys.readouterr().err
    assert not path.exists()
    assert merge_timeline.main(SimpleNamespace(path=path, parts=[part])) == 0
    assert "secret" in path.read_text()


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make files of others")
def test_a_strangers_part_of_a_timeline_is_read_where_it_is_named_only(tmp_path, capsys):
    path = tmp_path / "t.json"
    for rank in range(2):
        rank_file(path, rank).write_text(f'[\n{{"name":"of{rank}","ts":1.5,"pid":0}}\n]\n')
    os.chown(rank_file(path, 1), 65534, 65534)
    tmp_path.chmod(0o1777)  # as /tmp is
    assert merge_timeline.main(SimpleNamespace(path=path, parts=[])) == 2
    assert "belongs to another user, and is not read" in capsys.readouterr().err
    assert not path.exists()
    assert merge_timeline.main(SimpleNamespace(path=path, parts=rank_files(path))) == 0
    path.unlink()
    tmp_path.chmod(0o755)  # a folder of one's own
    assert merge_timeline.main(SimpleNamespace(path=path, parts=[])) == 0
    assert "of1" in path.read_text()


def test_compressor_states_are_not_written_through_a_link(tmp_path, monkeypatch):
    monkeypatch.setenv("KERAS_BACKEND", "torch")
    checkpoint = pytest.importorskip("ringlet.keras.checkpoint")
    target = tmp_path / "target"
    target.write_text("precious")
    monkeypatch.setattr(checkpoint, "state_path", str)
    monkeypatch.setattr(checkpoint, "compressor_state", lambda optimizer: b"new")
    for name in ("state", "state.part"):
        (tmp_path / name).symlink_to(target)
    checkpoint.save_compressor_state(None, tmp_path / "state")
    assert target.read_text() == "precious"
    assert (tmp_path / "state").read_bytes() == b"new"
