"""The hosts that batch systems give a job, from their variables alone; tests/engines has Slurm."""

import argparse

import pytest

from ringlet.ring.command import cli
from ringlet.ring.errors import LaunchError
from ringlet.ring.hosts.batch_hosts import allocated, expand
from ringlet.ring.hosts.batch_shell import command_for
from ringlet.ring.hosts.hosts import Host

SLURM = {"SLURM_JOB_ID": "4", "SLURM_JOB_NODELIST": "n[1-3]", "SLURM_TASKS_PER_NODE": "4(x2),1"}


@pytest.mark.parametrize(
    ("nodes", "hosts"),
    [
        ("n1", ["n1"]),
        ("gpu[007-009,12],login1", ["gpu007", "gpu008", "gpu009", "gpu12", "login1"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("a[1-2]-ib.x.org,b", ["a1-ib.x.org", "a2-ib.x.org", "b"]),
    ],
)
def test_node_lists(nodes, hosts):
    assert expand(nodes, "X") == hosts


@pytest.mark.parametrize(
    "nodes", ["", "n[1", "n[x]", "n[]", "n 1", "[", "n[1-]", "-n1", f"n[0-{9999 * '9'}]"]
)
def test_node_lists_that_are_none(nodes):
    with pytest.raises(LaunchError, match=r"X=.* is not a Slurm node list"):
        expand(nodes, "X")


@pytest.mark.parametrize(
    "nodes", ["n[0-999999999]", "a,n[0-99]x[0-99]x[0-99]x[0-99]x[0-99]x[0-99]"]
)
def test_node_lists_that_would_fill_the_memory(nodes):
    with pytest.raises(LaunchError, match="X names more than 65536 hosts"):
        expand(nodes, "X")


def test_slurm_says_how_many_ranks_a_host_takes():
    found = allocated(SLURM)
    assert found.hosts == (Host("n1", 4), Host("n2", 4), Host("n3", 1))
    batch = {"SLURM_PROCID": "0", "SLURM_STEP_ID": str(0xFFFFFFFB)}
    assert allocated(SLURM | batch) == found
    assert allocated(SLURM | {"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}) is None
    assert allocated({}) is None


def test_lsf_and_grid_engine(tmp_path):
    env = {"LSB_MCPU_HOSTS": "a 2 b 3 a 1"}
    assert allocated(env).hosts == (Host("a", 3), Host("b", 3))
    (tmp_path / "hosts").write_text("a.x 2 all.q@a <NULL>\nb.x 3 all.q@b <NULL>\n")
    env = {"PE_HOSTFILE": str(tmp_path / "hosts")}
    assert allocated(env).hosts == (Host("a.x", 2), Host("b.x", 3))


@pytest.mark.parametrize(
    ("env", "said"),
    [
        (SLURM | {"SLURM_TASKS_PER_NODE": "4,4"}, "is of 2 hosts, but there are 3"),
        (SLURM | {"SLURM_TASKS_PER_NODE": "many"}, "SLURM_TASKS_PER_NODE='many' is not like"),
        ({"LSB_MCPU_HOSTS": "a 2 b"}, "is not `host slots"),
        ({"LSB_MCPU_HOSTS": "a two"}, "LSB_MCPU_HOSTS: expected host:slots"),
        ({"PE_HOSTFILE": "/nowhere/hosts"}, "PE_HOSTFILE=/nowhere/hosts cannot be read"),
    ],
)
def test_what_cannot_be_read_is_named(env, said):
    with pytest.raises(LaunchError, match=said):
        allocated(env)


def test_a_command_reaches_a_host_as_one_word():
    line = "cd '/a b' && exec x"
    assert command_for("slurm", "n2", line)[-4:] == ["n2", "/bin/bash", "-c", line]
    assert command_for("lsf", "n2", line)[1:] == ["n2", "bash -c 'cd '\"'\"'/a b'\"'\"' && exec x'"]


def options(**given):
    none = {"np": None, "rsh": None, "ssh_port": None, "ssh_identity_file": None}
    return argparse.Namespace(**(none | given))


def test_ringlet_run_takes_the_batch_jobs_hosts():
    asked = options(np="9")
    assert [host.name for host in cli.batch_hosts(asked, SLURM)] == ["n1", "n2", "n3"]
    assert asked.rsh.endswith("batch_shell slurm")
    with pytest.raises(cli.UsageError, match=r"has 9: n1:4, n2:4, n3:1 \(SLURM_TASKS_PER_NODE\)"):
        cli.batch_hosts(options(np="10"), SLURM)
    own = options(rsh="my-shell")
    cli.batch_hosts(own, SLURM)
    assert own.rsh == "my-shell"
    alone = SLURM | {"SLURM_JOB_NODELIST": "localhost", "SLURM_TASKS_PER_NODE": "1"}
    assert cli.batch_hosts(options(np="4"), alone) == []
    assert cli.batch_hosts(options(), alone) == [Host("localhost", 1)]
