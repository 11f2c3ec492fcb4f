"""``ringlet doctor`` as a user runs it: alone, with ranks, and over hosts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib import metadata
from typing import Any

import netns
import pytest

from ringlet.__main__ import main
from ringlet.cli import doctor
from ringlet.cli.assumed_link import assumed_link
from ringlet.cli.doctor import (
    UNCOMPRESSED,
    CodecCost,
    _compare,
    _crossing,
    _share_of_levels,
    _verdict,
    _wire,
)
from ringlet.job.capabilities import gpu_path
from ringlet.ring.command.cli import UsageError
from ringlet.ring.cost.link_probe import MeasuredLink
from ringlet.ring.launch import start
from ringlet.ring.transports.local import run_local, this_thread

pytestmark = pytest.mark.preloaded("torch")

DOCTOR = [sys.executable, "-m", "ringlet", "doctor"]
transports = [name for name, why in start.lacking().items() if why is None]


missing = netns.unavailable()


def ran(*command: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command, capture_output=True, text=True, timeout=200, check=False, **options
    )


def test_alone() -> None:
    done = ran(*DOCTOR)
    assert done.returncode == 0, done.stdout
    assert "\n  numpy " in done.stdout
    installed = {d.name: d.version for d in metadata.distributions()}
    brought = {"tensorflow": "tensorflow-cpu", "keras": "keras", "jax": "jax"}
    for name, distribution in brought.items():
        assert f"\n  {name:<16} {installed.get(distribution, '')}" in done.stdout
    assert f"\n  tensors on GPUs  {gpu_path()}" in done.stdout
    assert "ringlet doctor -np 4" in done.stdout


@pytest.mark.skipif(not transports, reason="needs a transport between processes")
@pytest.mark.parametrize("way", ["doctor", "run"])
def test_with_ranks_on_one_host(way: str) -> None:
    run = [*DOCTOR[:-1], "run", "--no-prefix", "-np", "2", *DOCTOR]
    done = ran(*([*DOCTOR, "-np", "2"] if way == "doctor" else run))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("  numpy ") == 1
    assert "2 ranks over " in done.stdout
    assert "Inside one host compression saves no time" in done.stdout


def test_as_json() -> None:
    alone = json.loads(ran(*DOCTOR, "--json").stdout)
    assert {"name", "text", "good"} == alone["machine"][0].keys()


@pytest.mark.skipif(not transports, reason="needs a transport between processes")
def test_with_ranks_as_json() -> None:
    done = ran(*DOCTOR, "-np", "2", "--json")
    found = json.loads(done.stdout)
    assert (done.returncode, found["good"], found["compression"]) == (0, True, "none")
    assert len(found["hosts"]) == 2
    assert (found["links"], found["predicted"]) == ([], [])
    assert found["allreduce_bytes_per_s"] > 0
    # How far it has come is said beside it, a line a piece, where no terminal is.
    assert [line.partition(" (")[0] for line in done.stderr.splitlines()] == [
        "1/2 measuring the links between hosts",
        "2/2 timing an uncompressed allreduce",
    ]


@pytest.mark.skipif(not transports, reason="needs a transport between processes")
def test_a_link_that_is_not_here() -> None:
    """Two ranks on one host are taken for two hosts; compression pays on a slow link alone."""
    found = json.loads(ran(*DOCTOR, "-np", "2", "--json", "--link", "1us,1kbit/s").stdout)
    assert found["links"] == []
    assert (found["assumed_link"]["rate"], found["assumed_link"]["latency"]) == (125.0, 1e-6)
    assert found["compression"] != "none"
    assert len(found["predicted"]) == 5
    done = ran(*DOCTOR, "-np", "2", "--link", "100tbit")
    assert (
        "assumed: 1e+08 Mbit/s between hosts, with every rank on a host of its own" in done.stdout
    )
    assert "Fastest by this model: compression='none'" in done.stdout


@pytest.mark.parametrize(
    ("text", "rate"),
    [("1gbit", 125e6), ("100 Mbit/s", 12.5e6), ("125MB/s", 125e6), ("10Gbps", None),
     ("5ms,1Gbit/s", 125e6), ("1gb", None), ("fast", None), ("0gbit", None), ("1..2gbit", None)],
)  # fmt: skip
def test_links_are_read(text: str, rate: float | None) -> None:
    if rate is not None:
        assert assumed_link(text).rate == rate
        return
    with pytest.raises(UsageError, match="names no link: write 1gbit"):
        assumed_link(text)


def test_a_link_needs_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--link", "1gbit"]) == 2
    assert "--link predicts for ranks: give -np too" in capsys.readouterr().err


@pytest.mark.skipif(missing is not None, reason=str(missing))
@pytest.mark.skipif("gloo" not in transports, reason="needs torch")
def test_over_shaped_hosts() -> None:
    with netns.Hosts(2, mbit=100) as hosts:
        where = ["-H", hosts.slots(1), "--rsh", hosts.rsh, "--network-interface", "v0"]
        done = ran(*hosts.command(0, [*DOCTOR, "--transport", "gloo", *where]))
    assert done.returncode == 0, done.stdout + done.stderr
    line = next(line for line in done.stdout.splitlines() if "node0 -> node1" in line)
    assert 80 < float(line.split("us, ")[1].split()[0]) < 110
    assert "  fp16 " in done.stdout
    assert "Fastest by this model: compression='" in done.stdout


def test_what_is_wrong_is_said() -> None:
    done = ran(*DOCTOR, env=os.environ | {"RINGLET_RANK": "1"})
    assert done.returncode == 1
    assert "! launcher         RINGLET_RANK is set but RINGLET_SIZE is not" in done.stdout
    for wrong, words in (
        (["-np", "x"], "-np takes a number of ranks"),
        (["--transport", "glo", "-np", "2"], "Did you mean 'gloo'?"),
        (["-H", "a:0"], "host a has no slots"),
    ):
        done = ran(*DOCTOR, *wrong)
        assert (done.returncode, words in done.stderr) == (2, True)


def test_a_misspelt_variable_is_said() -> None:
    done = ran(*DOCTOR, env=os.environ | {"RINGLET_METRIC": "x", "RINGLET_API_TOKEN": "y"})
    assert done.returncode == 1
    assert "! environment      there is no variable RINGLET_METRIC; did you mean" in done.stdout
    assert "  environment      RINGLET_API_TOKEN: no variable of Ringlet's" in done.stdout


def test_codecs_that_no_verdict_needs_are_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    timed = []
    monkeypatch.setattr(doctor, "connect", this_thread)
    monkeypatch.setattr(
        doctor, "_codec", lambda c: timed.append(str(c)) or CodecCost("x", "sum", 1, 1, 1)
    )
    assert run_local(lambda _: doctor._as_rank(True), 2) == [0, 0]
    assert "Inside one host compression saves no time" in capsys.readouterr().out
    assert timed == []
    link = MeasuredLink("a", "b", 1e-4, 1e8)
    monkeypatch.setattr(doctor, "measure_links", lambda comm, hosts: [link])
    assert run_local(lambda _: doctor._as_rank(True), 2) == [0, 0]
    assert len(timed) == 2 * len(doctor.SPECS)


def test_ranks_that_differ(capsys: pytest.CaptureFixture[str]) -> None:
    assert _compare([{"numpy": "2"}, {"numpy": "2"}], ["a", "b"])
    assert not _compare([{"numpy": "2"}, {"numpy": ""}], ["a", "b"])
    assert "! numpy differs: 2 on a, none on b" in capsys.readouterr().out


def test_what_crosses_a_link() -> None:
    hosts = ["a", "a", "b", "b"]
    assert _crossing("sum", 0.5, hosts) == 2 * 3 / 4 * 0.5
    assert _crossing("scatter_reduce", 0.25, hosts) == 2 * 2 * 2 / 4 * 0.25
    assert _crossing("allgather", 0.01, hosts) == 2 * 2 * 0.01
    assert _crossing("sum", 1.0, ["a", "b", "c"]) == pytest.approx(4 / 3)


def test_the_verdict_depends_on_the_link(capsys: pytest.CaptureFixture[str]) -> None:
    codec = CodecCost("int8", "scatter_reduce", 0.002, 0.002, 0.25)
    slow, fast = (MeasuredLink("a", "b", 1e-5, rate) for rate in (12.5e6, 12.5e9))
    _verdict([codec], ["a", "b"], [slow])
    assert "compression='int8'" in capsys.readouterr().out
    _verdict([codec], ["a", "b"], [slow, fast])
    assert "compression='int8'" in capsys.readouterr().out  # the slowest link counts
    _verdict([codec], ["a", "b"], [fast])
    told = capsys.readouterr().out
    assert "costs" in told
    assert "compression='none'" in told
    _verdict([codec], ["a", "b"], [MeasuredLink("a", "b", error="refused")])
    assert "No verdict" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("combine", "hosts", "share"),
    [
        ("sum", "aabb", 2 / 3),
        ("scatter_reduce", "aabb", 1 / 2),
        ("scatter_reduce", "aaaabbbb", 1 / 4),
        ("allgather", "aaaabbbb", 1 / 16),
        ("allgather", "abcabc", 1 / 4),
        ("scatter_reduce", "abcd", 1),
        ("scatter_reduce", "aaaa", 1),
        ("scatter_reduce", "aaab", 1),
    ],
)
def test_two_levels_are_named_where_ranks_share_hosts(
    combine: str, hosts: str, share: float, capsys: pytest.CaptureFixture[str]
) -> None:
    codec = CodecCost("int8", combine, 1e-5, 1e-5, 0.01)
    assert _share_of_levels([UNCOMPRESSED, codec], "int8", hosts) == pytest.approx(share)
    links = [MeasuredLink("a", "b", 1e-5, 12.5e6)] if len(set(hosts)) > 1 else []
    _verdict([codec], hosts, links)
    told = f"with --hierarchical-allreduce {share:.2g} times as many bytes of 'int8' leave one"
    assert (told in capsys.readouterr().out) == (share < 1)


def test_delays_count_once_for_ranks_that_are_far_apart_and_in_every_round() -> None:
    four = ["a", "b", "c", "d"]

    def wire(combine: str, sums: int, latency: float, hosts: list[str]) -> float:
        codec = CodecCost("spec", combine, 0.0, 0.0, 0.0, sums)  # of no bytes: delays alone
        return _wire(codec, hosts, [MeasuredLink("a", "b", latency, 1e9)])

    assert wire("sum", 1, 1e-3, four) == pytest.approx(6e-3)
    assert wire("sum", 1, 1e-2, four) == pytest.approx(2e-2)
    assert wire("rounds", 2, 1e-2, four) == pytest.approx(4e-2)
    assert wire("allgather", 1, 1e-2, four) == pytest.approx(2e-2)
    assert wire("scatter_reduce", 1, 1e-2, four) == pytest.approx(3e-2)
    # A ring crosses the line between two sites as often as there are hosts, not ranks.
    assert wire("sum", 1, 1e-2, ["a", "a", "b", "b"]) == pytest.approx(2e-2)
    assert wire("sum", 1, 1e-2, ["a", "a", "b", "b", "c", "c"]) == pytest.approx(4e-2)


def test_codecs_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "SIDE", 64)
    for spec, combine, sums, ratio in (
        ("fp16", "sum", 1, 0.5),
        ("int8", "scatter_reduce", 1, 0.25),
        ("topk(ratio=0.01)", "allgather", 1, 0.02),
        ("powersgd(rank=4)", "rounds", 2, 0.125),
    ):
        codec = doctor._codec(doctor.parse(spec))
        assert (codec.combine, codec.sums) == (combine, sums)
        assert codec.encode > 0
        assert codec.ratio == pytest.approx(ratio, rel=0.2)


def test_what_a_variable_has_wrong_is_told_and_ends_no_diagnosis(monkeypatch):
    monkeypatch.setenv("RINGLET_STAGED", "maybe")
    assert "RINGLET_STAGED" in gpu_path()
