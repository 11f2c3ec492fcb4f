"""Hosts with IPv6 addresses, over ::1."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ringlet.ring.errors import LaunchError
from ringlet.ring.hosts.hosts import Host, bare, is_here, parse_hosts, read_hostfile
from ringlet.ring.hosts.interfaces import find_interface, launcher_address
from ringlet.ring.launch import start
from ringlet.ring.wire import addresses as network
from ringlet.ring.wire.addresses import family_of, interface_address, listen, split_port, with_port

DEADLINE = 120.0  # seconds; generous, nothing waits for it when all is well
LONG = "[0:0:0:0:0:0:0:1]"  # this host, but not by a name that the launcher knows for it
HAS_MPI = importlib.util.find_spec("mpi4py") is not None and start.mpiexec() is not None
HAS_TORCH = importlib.util.find_spec("torch") is not None


def lacking() -> str | None:
    """Say why there is no IPv6 here, or return None if there is."""
    try:
        listen("::1").close()
    except OSError as error:
        return f"needs IPv6: {error}"
    return None


pytestmark = [
    pytest.mark.skipif(lacking() is not None, reason=str(lacking())),
    pytest.mark.preloaded("torch"),
]


def test_names_of_hosts(tmp_path: Path) -> None:
    hosts = [Host("[::1]", 2), Host("me@[fe80::1%eth0]", 1), Host("me@a", 3)]
    assert parse_hosts("[::1]:2,me@[fe80::1%eth0],me@a:3") == hosts
    file = tmp_path / "hosts"
    file.write_text("[::1] slots=2\nme@[fe80::1%eth0]\nme@a:3\n")
    assert read_hostfile(str(file)) == hosts
    assert bare("me@[::1]") == "me@::1"
    with pytest.raises(LaunchError, match="an IPv6 address needs brackets"):
        parse_hosts("fd00::1:2")


def test_addresses(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert (is_here("[::1]"), is_here(LONG), is_here(LONG, resolve=False)) == (True, True, False)
    assert launcher_address((), [LONG]) == "::1"
    assert launcher_address(["lo"], [LONG]) == "::1"
    assert launcher_address(["lo"], ["127.0.0.2"]) == "127.0.0.1"
    assert find_interface(["lo"], "::2") == ("lo", "::1")
    assert (family_of("::1"), family_of("127.0.0.1")) == (socket.AF_INET6, socket.AF_INET)
    for address in ("::1", "127.0.0.1"):
        assert split_port(with_port(address, 80)) == (address, 80)
    table = tmp_path / "if_inet6"
    table.write_text(  # link-local, a duplicate, a good one
        "fe8000000000000000fc00fffe000001 04 40 20 80     v6\n"
        "fd000000000000000000000000000001 04 40 00 08     v6\n"
        "fd000000000000000000000000000002 04 40 00 80     v6\n"
    )
    monkeypatch.setattr(network, "_IPV6", table)
    assert interface_address("v6") == "fd00::2"
    with pytest.raises(OSError, match="v7 has no address that other hosts can reach"):
        interface_address("v7")


def test_a_name_that_means_ipv6_only(monkeypatch: pytest.MonkeyPatch) -> None:
    entry = (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", 0, 0, 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [entry])
    assert launcher_address((), ["me@six"]) == "::1"
    assert is_here("six")


PROGRAM = """
import os, socket
import numpy
from ringlet.ring.control import opening
from ringlet.ring.rendezvous.connect import connect

class Handler:
    def on_message(self, rank, message):
        return [message]

    def on_lost(self, rank, why=""):
        return []

comm = connect()
opening._host = lambda: b"host %d" % comm.rank  # so that it does not choose loopback
control = opening.open_control(comm, Handler() if comm.rank == 0 else None)
values = numpy.full(3, comm.rank + 1.0, numpy.float32)
comm.allreduce(values)
peers = set()
for name in os.listdir("/proc/self/fd"):
    try:
        with socket.socket(fileno=os.dup(int(name))) as sock:
            if sock.family in (socket.AF_INET, socket.AF_INET6):
                peers.add(sock.getpeername()[0])
    except OSError:
        pass
if comm.rank == 1:
    control.send(b"hello")
assert control.receive(60) == [b"hello"]
names = ("RINGLET_ADDRESS", "MASTER_ADDR")
print(comm.rank, int(values[0]), *(os.environ[name] for name in names), *sorted(peers), flush=True)
comm.barrier()
control.close()
comm.close()
"""


@pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
@pytest.mark.parametrize("interface", [[], ["--network-interface", "lo"]])
def test_a_job_over_ipv6(interface: list[str], tmp_path: Path) -> None:
    shell = tmp_path / "shell"
    shell.write_text('#!/bin/sh\necho "$1" > "$0.log"\nshift\ncd /\nexec sh -c "$*"\n')
    shell.chmod(0o755)
    where = ["-H", f"{LONG}:1,localhost:1", "--rsh", str(shell), "--no-prefix", *interface]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "ringlet", "run", "--gloo", *where),
            *(sys.executable, "-c", PROGRAM),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    peers = "::1" if not interface else done.stdout.splitlines()[0].split(maxsplit=4)[4]
    assert sorted(done.stdout.splitlines()) == [f"{r} 3 ::1 ::1 {peers}" for r in range(2)]
    assert (tmp_path / "shell.log").read_text() == f"{bare(LONG)}\n"  # as ssh wants it


@pytest.mark.mpi
@pytest.mark.skipif(not HAS_MPI, reason="needs mpi4py and mpiexec")
def test_mpi_finds_its_ranks_over_ipv6(tmp_path: Path) -> None:
    shell = tmp_path / "shell"
    shell.write_text('#!/bin/sh\nshift\ncd /\nexec sh -c "$*"\n')
    shell.chmod(0o755)
    where = ["-H", f"{LONG}:1,localhost:1", "--rsh", str(shell), "--no-prefix"]
    code = "from mpi4py import MPI; print(MPI.COMM_WORLD.allreduce(MPI.COMM_WORLD.rank + 1))"
    command = [sys.executable, "-m", "ringlet", "run", "--mpi", *where, sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "3\n3\n"
