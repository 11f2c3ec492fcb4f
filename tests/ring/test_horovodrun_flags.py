"""Every flag of horovodrun is accepted or named, and its configuration file is read."""

import argparse
import runpy
from pathlib import Path

import pytest

from ringlet.__main__ import main
from ringlet.ring.command import cli
from ringlet.ring.command.configuration_file import KEYS, flags_of
from ringlet.ring.command.flags import ABSENT, PASSED_OVER, meaning_of
from ringlet.ring.command.horovodrun import FLAGS, OTHERWISE
from ringlet.ring.errors import LaunchError

ROOT = Path(__file__).parents[2]
EVERY = [flag for flags in FLAGS.values() for flag in flags.split()]


def parser():
    made = argparse.ArgumentParser(allow_abbrev=False)
    cli.add_arguments(made)
    return made


@pytest.mark.parametrize("flag", EVERY)
def test_every_flag_is_accepted_or_named(flag):
    assert flag in OTHERWISE or meaning_of(parser(), flag)


@pytest.mark.parametrize("flag", ABSENT)
def test_what_stands_for_a_flag_that_is_refused_is_said(capsys, flag):
    with pytest.raises(SystemExit):
        main(["run", "-np", "1", flag, "1", "true"])
    assert f"{flag} is horovodrun's: {ABSENT[flag]}" in capsys.readouterr().err


@pytest.mark.parametrize("flag", PASSED_OVER)
def test_a_flag_that_changes_no_result_does_not_stop_a_job(capfd, flag):
    value = ["1"] if parser()._option_string_actions[flag].nargs else []
    assert main(["run", "-np", "1", flag, *value, "echo", "ran"]) == 0
    out, err = capfd.readouterr()
    assert "ran" in out
    said = f"ringlet run: {flag} is horovodrun's, and does nothing here: {PASSED_OVER[flag]}\n"
    assert err.count(said) == 1


ONE_NODE = ["node", "--nodes=1", "--node=0", "--first=localhost"]
RULES = [["--reset-limit=3"], ["--elastic-timeout=60"], ["--blacklist-cooldown-range", "1", "2"]]


@pytest.mark.parametrize(
    ("command", "flags"),
    [
        *((["run", "-np", "1"], flags) for flags in [*RULES, ["--slots-per-host=2"]]),
        *((ONE_NODE, flags) for flags in RULES),
    ],
)
def test_a_flag_of_elastic_jobs_says_where_it_does_nothing(capfd, command, flags):
    assert main([*command, *flags, "echo", "ran"]) == 0
    out, err = capfd.readouterr()
    assert "ran" in out
    found = "--host-discovery-script, " if command[0] == "run" else ""
    says = f"{flags[0].partition('=')[0]} does nothing here: only {found}--min-np and --max-np make"
    assert err.count(f"ringlet {command[0]}: {says} a job elastic\n") == 1


def test_slots_that_are_of_no_host_are_told(capfd):
    assert main(["run", "--min-np=1", "--slots-per-host=2", "echo", "ran"]) == 0
    out, err = capfd.readouterr()
    assert out.count("ran") == 1
    assert "ringlet run: --slots-per-host does nothing here: it is of hosts that a" in err


@pytest.mark.parametrize("start", [["run", "-np", "2", "--min-np=1"], [*ONE_NODE, "--min-np=1"]])
@pytest.mark.parametrize("words", [["10"], ["10,100"]])
def test_a_cooldown_that_took_the_command_for_a_number_is_named(capsys, start, words):
    """It was: command not found: train.py."""
    assert main([*start, "--blacklist-cooldown-range", *words, "python", "train.py"]) == 2
    said = f"takes two numbers of seconds, the least first, not {words[0]} python"
    assert capsys.readouterr().err.strip().endswith(f"--blacklist-cooldown-range {said}")


@pytest.mark.parametrize("flag", ["--fusion-threshold-mb", "--cache-capacity", "--cycle-time-ms"])
def test_a_flag_below_zero_is_named(capsys, flag):
    with pytest.raises(SystemExit):
        main(["run", "-np", "1", flag, "-1", "true"])
    said = capsys.readouterr().err
    assert flag in said
    assert "takes a number of at least 0, not '-1'" in said


def test_a_size_beyond_all_numbers_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["run", "-np", "1", "--fusion-threshold-mb", "1e305", "true"])
    assert "--fusion-threshold-mb (size of a fusion buffer, MiB) takes" in capsys.readouterr().err


def test_a_flag_takes_whole_numbers_as_its_variable_does():
    options = parser().parse_args(["-np", "1", "--cache-capacity", "1e6", "x"])
    assert options.tunables == {"RINGLET_CACHE_CAPACITY": "1000000"}


def test_the_table_is_what_the_parsers_say():
    script = runpy.run_path(str(ROOT / "docs" / "list_flags.py"))
    text = (ROOT / "docs" / "migrating-from-horovod.md").read_text()
    assert script["written"](text) == text, "run python docs/list_flags.py"


FILE = """\
# as in Horovod's documentation
verbose: True
num_proc: 4
params:
    fusion_threshold_mb: 32   # MiB
    cycle_time_ms: 10
    hierarchical_allreduce: True
autotune:
    enabled: False
    log_file: "auto # tune.csv"
timeline:
    filename: 'it''s.json'
    mark_cycles: yes
stall_check:
    enabled: no
    warning_time_seconds: 120
logging:
    level: INFO
    hide_timestamp:
controller: gloo
"""


def test_a_configuration_file_is_a_command_line(tmp_path):
    (tmp_path / "c.yaml").write_text(FILE)
    words = ["-np", "2", "--cycle-time-ms", "1", "--config-file", str(tmp_path / "c.yaml")]
    options = parser().parse_args([*words, "--fusion-threshold-mb", "8", "x", "-v"])
    assert options.tunables == {
        "RINGLET_CYCLE_TIME": "1",  # flags win, before the file
        "RINGLET_FUSION_THRESHOLD": str(8 << 20),  # and behind it
        "RINGLET_HIERARCHICAL_ALLREDUCE": "1",
        "RINGLET_AUTOTUNE": "0",
        "RINGLET_AUTOTUNE_LOG": "auto # tune.csv",
        "RINGLET_TIMELINE": "it's.json",
        "RINGLET_TIMELINE_MARK_CYCLES": "1",
        "RINGLET_STALL_CHECK_DISABLE": "1",
        "RINGLET_STALL_CHECK_TIME_SECONDS": "120",
        "RINGLET_LOG_LEVEL": "INFO",
    }
    assert (options.np, options.transport, options.verbose) == ("2", "gloo", True)
    assert options.command == ["x", "-v"]


def test_a_configuration_file_starts_a_job(tmp_path, capfd):
    (tmp_path / "c.yaml").write_text("num_proc: 2\nparams:\n  cycle_time_ms: 3\n")
    words = ["sh", "-c", "echo cycle $RINGLET_CYCLE_TIME"]
    assert main(["run", "--config-file", str(tmp_path / "c.yaml"), *words]) == 0
    assert capfd.readouterr().out.count("cycle 3") == 2


def test_a_configuration_file_may_say_what_does_nothing_here(tmp_path, capfd):
    text = "params:\n  hierarchical_allgather: true\nlibrary_options:\n  ccl_bgt_affinity: 1\n"
    (tmp_path / "c.yaml").write_text(text)
    assert main(["run", "-np", "1", "--config-file", str(tmp_path / "c.yaml"), "true"]) == 0
    told = [line for line in capfd.readouterr().err.splitlines() if "does nothing here" in line]
    assert [line.split()[2] for line in told] == ["--hierarchical-allgather", "--thread-affinity"]


def test_a_section_may_stand_in_braces(tmp_path):
    text = """
params: {fusion_threshold_mb: 32, cycle-time-ms: 3.5}  # of the engine
autotune: { enabled: yes, log_file: "a, b: c.csv", }
timeline: {}
num_proc: 2
"""
    (tmp_path / "c.yaml").write_text(text)
    assert flags_of(str(tmp_path / "c.yaml")) == (
        [
            "--fusion-threshold-mb=32",
            "--cycle-time-ms=3.5",
            "--autotune",
            "--autotune-log-file=a, b: c.csv",
            "--num-proc=2",
        ],
        [],
    )


def test_every_key_is_a_flag():
    known = parser()
    for flags in KEYS.values():
        for flag in [flags] if isinstance(flags, str) else filter(None, flags):
            assert any(flag in action.option_strings for action in known._actions), flag


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("- a", "line 1: expected `key: value`"),
        ("params: 3", "line 1: params is a section of keys, not '3'"),
        ("params: [1, 2]", "line 1: params is a section of keys"),
        ("params: {cycle_time_ms: 1", "line 1: params is a section of keys"),
        ("params: {a}", "line 1: expected `key: value`, not 'a'"),
        ("autotune:\n  enabled: perhaps", "line 2: enabled is true or false, not 'perhaps'"),
        ("controller: jsrun", "controller is gloo or mpi"),
    ],
)
def test_what_a_file_says_wrongly_is_named(tmp_path, text, said):
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(LaunchError, match=said):
        flags_of(str(tmp_path / "c.yaml"))
    with pytest.raises(LaunchError, match="nowhere cannot be read"):
        flags_of("nowhere")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("params:\n  fusion: 1", "line 2, is passed over: 'fusion' is not known in section params"),
        ("params:\n  cycle_time: 1", "section params; did you mean 'cycle_time_ms'?"),
        (
            "parms:\n  cycle_time_ms: 3",
            "line 1, is passed over: 'parms' is not known; did you mean",
        ),
        ("params: {a: 1}", "line 1, is passed over: 'a' is not known in section params"),
        ("fusion_threshold_mb: 1", "it belongs to section params"),
        ("logging:\n  hostfile: h", "it belongs to no section"),
        ("timeline:\n  enabled: false", "a timeline is written where there is a filename"),
        ("autotune:\n  cycles_per_sample: 10", "steps_per_sample stands for it"),
        ("library_options:\n  mpi_threads_disabled: false", "mpi_threads_disable stands for it"),
    ],
)
def test_what_no_flag_stands_for_is_passed_over_and_told(tmp_path, capfd, text, said):
    (tmp_path / "c.yaml").write_text(f"{text}\nnum_proc: 1\n")
    words, (told,) = flags_of(str(tmp_path / "c.yaml"))
    assert words == ["--num-proc=1"]
    assert said in told
    parser().parse_args(["--config-file", str(tmp_path / "c.yaml"), "true"])
    assert told in capfd.readouterr().err


def test_check_build_says_what_there_is(capsys):
    assert main(["run", "--check-build"]) == 0
    said = capsys.readouterr().out
    assert "transport gloo: " in said
    assert "torch: " in said
