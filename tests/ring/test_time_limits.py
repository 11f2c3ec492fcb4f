"""How long a job may take to start, or have too few ranks: by flags, else by variables."""

import argparse

import pytest

from ringlet.ring.command import cli, node
from ringlet.ring.command.elastic_flags import rules_of
from ringlet.ring.functions.elastic_run import elastic_plan
from ringlet.ring.launch.time_limits import time_limit

CASES = [  # variables, flags, seconds to start (None: the default), seconds with too few ranks
    ({}, [], None, 600.0),
    ({"HOROVOD_START_TIMEOUT": "7", "HOROVOD_ELASTIC_TIMEOUT": "8.5"}, [], 7.0, 8.5),
    ({"HOROVOD_START_TIMEOUT": "7", "RINGLET_START_TIMEOUT": "9"}, [], 9.0, 600.0),
    ({"HOROVOD_ELASTIC_TIMEOUT": "7", "RINGLET_ELASTIC_TIMEOUT": "0"}, [], None, 0.0),
    ({"RINGLET_START_TIMEOUT": "", "RINGLET_ELASTIC_TIMEOUT": ""}, [], None, 600.0),
    ({"HOROVOD_START_TIMEOUT": "7", "RINGLET_ELASTIC_TIMEOUT": "8"},
     ["--start-timeout", "3", "--elastic-timeout", "4"], 3.0, 4.0),
]  # fmt: skip


@pytest.fixture(params=CASES, ids=str)
def case(request, monkeypatch):
    variables, *wanted = request.param
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    return wanted


@pytest.mark.parametrize(
    ("command", "patience"), [(cli, 120.0), (node, 300.0)], ids=["run", "node"]
)
def test_flags_count_before_variables_and_ours_before_horovods(command, patience, case):
    flags, start, elastic = case
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    options = parser.parse_args([*flags, "--min-np", "2", "true"])
    assert cli.reach_of(options).start_timeout == (patience if start is None else start)
    assert rules_of(options, None, [], nodes=True).timeout == elastic


def test_functions_read_the_variables_too(case):
    flags, start, elastic = case
    given = float(flags[3]) if flags else None
    rules, _ = elastic_plan(None, [], min_np=2, elastic_timeout=given)
    assert rules.timeout == elastic
    assert flags or time_limit("start_timeout") == start
