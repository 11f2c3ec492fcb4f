"""Variables that are misspelt or wrong: named before anything starts."""

import logging

import pytest

from ringlet.__main__ import main
from ringlet.fusion.autotune.space import BOUNDS
from ringlet.job.session import init, is_initialized, shutdown
from ringlet.job.settings import limits_from, wishes_from
from ringlet.ring.errors import LaunchError
from ringlet.ring.functions import run
from ringlet.ring.rendezvous.environment import Launched
from ringlet.ring.rendezvous.unread_variables import INSTEAD, passed_over
from ringlet.ring.variables import TUNABLE, UNDERSTOOD, VARIABLES, check, unknown


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("RINGLET_METRIC", "RINGLET_METRICS"),
        ("RINGLET_METRICS_EVRY", "RINGLET_METRICS_EVERY"),
        ("RINGLET_FUSION_TRESHOLD", "RINGLET_FUSION_THRESHOLD"),
        ("RINGLET_LOGLEVEL", "RINGLET_LOG_LEVEL"),
        ("RINGLET_AUTO_TUNE", "RINGLET_AUTOTUNE or RINGLET_AUTOTUNE_LOG"),
        ("RINGLET_PROMETHEUS_PORT", "RINGLET_PROMETHEUS"),
        (
            "RINGLET_NUM_STREAMS",
            "RINGLET_NUM_THREADS or RINGLET_NUM_NCCL_STREAMS or RINGLET_STREAMS",
        ),
    ],
)
def test_a_slip_is_named_with_what_was_meant(name, meant):
    with pytest.raises(ValueError, match=f"no variable {name}; did you mean {meant}\\?"):
        check({name: "1", "PATH": "/bin"})


def test_names_of_others_are_no_slips():
    for name in (*VARIABLES, *UNDERSTOOD):
        assert unknown({name: ""}) == []
    kubernetes = {"RINGLET_SERVICE_HOST": "", "RINGLET_PORT": "", "RINGLET_PORT_80_TCP_ADDR": ""}
    others = {"RINGLET_API_TOKEN": "", "HOROVOD_GPU_OPERATIONS": "NCCL", "ringlet_metric": ""}
    check(kubernetes | others)
    assert unknown(kubernetes | others) == ["RINGLET_API_TOKEN"]


def test_what_names_no_link_is_refused_before_anything_starts():
    for text in ("", "measure", "100us,1Gbit/s"):
        check({"RINGLET_LINK": text})
    with pytest.raises(ValueError, match="RINGLET_LINK='foo' names no link: give the latency"):
        check({"RINGLET_LINK": "foo"})


@pytest.mark.parametrize(
    ("name", "text", "allowed"),
    [
        ("RINGLET_PROMETHEUS", "abc", r"not \[host:\]port, such as 9090"),
        ("RINGLET_PROMETHEUS", "host:70000", r"not \[host:\]port"),
        ("RINGLET_METRICS_EVERY", "2.5", "not a whole number of at least 0"),
        ("RINGLET_FUSION_THRESHOLD", "1.5", "not a whole number of at least 0"),
        ("RINGLET_FUSION_THRESHOLD", "64MB", r"not a whole number of at least 0 \(bytes of"),
        ("HOROVOD_CYCLE_TIME", "5ms", r"not a number of at least 0 \(milliseconds"),
        ("HOROVOD_CYCLE_TIME", "-1", "not a number of at least 0"),
        ("RINGLET_CACHE_CAPACITY", "inf", "not a whole number of at least 0"),
        ("RINGLET_STREAMS", "0", "not a whole number of at least 1"),
        ("RINGLET_STAGED", "maybe", "not one of 1, true, yes, on, 0, false, no, off"),
        ("HOROVOD_TIMELINE_MARK_CYCLES", "2", "not one of 1, true"),
        ("RINGLET_HIERARCHICAL_ALLREDUCE", "y", "not one of 1, true"),
        ("RINGLET_COLLECTIVE", "ring", "not one of auto, allgather, scatter_reduce"),
        ("RINGLET_JOIN_DIVISOR", "mean", "not one of all, contributors"),
        ("RINGLET_NUM_THREADS", "x", "not a whole number of at least 1"),
        ("RINGLET_HEARTBEAT", "soon", "not a number of at least 0"),
        ("HOROVOD_LOG_LEVEL", "loud", "not a log level: trace, debug"),
    ],
)
def test_a_wrong_value_is_named_with_what_is_allowed(name, text, allowed):
    with pytest.raises(ValueError, match=f"{name}='{text}' is {allowed}"):
        check({name: text})
    ours = name.replace("HOROVOD_", "RINGLET_")
    if ours != name:
        good = {"RINGLET_LOG_LEVEL": "info", "RINGLET_CYCLE_TIME": "1"}.get(ours, "1")
        check({name: text, ours: good})  # which counts alone


def test_what_cannot_be_tuned_is_refused_before_anything_starts():
    assert tuple(BOUNDS) == TUNABLE
    for text in ("", "1", "Off", "all,-cycle_time", " streams, cache "):
        check({"RINGLET_AUTOTUNE": text})
    said = "'foo' is not one of fusion_threshold, .*, all, nor yes or no"
    for name in ("RINGLET_AUTOTUNE", "HOROVOD_AUTOTUNE"):
        with pytest.raises(ValueError, match=f"{name}='streams,foo': {said}"):
            check({name: "streams,foo"})


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(ValueError, match=r"RINGLET_METRIC;.*; RINGLET_SEED='x' is not"):
        check({"RINGLET_SEED": "x", "RINGLET_METRIC": "run.jsonl"})


def test_numbers_are_not_cut_off():
    assert limits_from({"RINGLET_FUSION_THRESHOLD": "1e6"}).fusion_threshold == 1_000_000
    assert limits_from({"RINGLET_SEED": "9007199254740993"}).seed == 9007199254740993
    for name in ("FUSION_THRESHOLD", "SEED", "VERIFY_SUMS", "AUTOTUNE_STEPS_PER_SAMPLE"):
        with pytest.raises(ValueError, match=f"RINGLET_{name}='2.7' is not a whole number"):
            limits_from({f"RINGLET_{name}": "2.7"})
    with pytest.raises(ValueError, match="RINGLET_STAGED='si' is not one of"):
        wishes_from({"RINGLET_STAGED": "si"})


def test_init_and_launchers_say_it_before_anything_starts(monkeypatch, capfd):
    monkeypatch.setenv("RINGLET_METRIC", "run.jsonl")
    with pytest.raises(ValueError, match=r"did you mean RINGLET_METRICS\?"):
        init()
    assert not is_initialized()
    with pytest.raises(LaunchError, match=r"did you mean RINGLET_METRICS\?"):
        run(Launched, np=2)
    monkeypatch.delenv("RINGLET_METRIC")
    code = main(["run", "-np", "2", "--env", "RINGLET_PROMETHEUS=abc", "echo", "started"])
    out, err = capfd.readouterr()
    assert (code, out) == (2, "")
    assert err.startswith("ringlet run: RINGLET_PROMETHEUS='abc' is not [host:]port")


def test_a_name_that_is_no_slip_is_a_warning(monkeypatch, caplog):
    monkeypatch.setenv("RINGLET_API_TOKEN", "x")
    with caplog.at_level(logging.WARNING, logger="ringlet"):
        init()
    shutdown()
    assert "RINGLET_API_TOKEN: no variable of Ringlet's, and not read" in caplog.text


def test_a_variable_of_horovods_that_nothing_reads_is_told_with_what_to_do():
    assert not UNDERSTOOD.keys() & INSTEAD.keys()
    assert len(passed_over(dict.fromkeys(INSTEAD, "1"), "gloo")) == len(INSTEAD)
    assert passed_over(dict.fromkeys(INSTEAD, "0"), "gloo") == []
    env = {"HOROVOD_CONTROLLER": "GLOO", "HOROVOD_CPU_OPERATIONS": "MPI", "HOROVOD_CYCLE_TIME": "1"}
    (said,) = passed_over(env, "gloo")
    assert said.startswith("HOROVOD_CPU_OPERATIONS is Horovod's, and does nothing here: RINGLET_TR")
