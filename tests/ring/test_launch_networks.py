"""Jobs over several hosts with networks of their own, which are namespaces."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import netns
import pytest
from launched_jobs import (
    DEADLINE,
    MARK,
    RINGLET,
    both,
    marked,
    needs_torch,
    until,
)

pytestmark = pytest.mark.preloaded("torch")

missing = netns.unavailable()
needs_hosts = pytest.mark.skipif(missing is not None, reason=str(missing))

REPORT = """
import socket
import numpy
from ringlet.job import session
session.init()
now = session.current()
comm = now._comm
x = numpy.ones(1 << 20, numpy.float32)
comm.allreduce(x)
there = now.topology
print(now.rank, now.transport, int(x[0]), socket.gethostname(), there.local_rank, there.cross_rank)
session.shutdown()
"""


@needs_hosts
@both
@pytest.mark.parametrize("by", ["interface", "address"])
def test_hosts_with_networks_of_their_own(transport: str, by: str, mark: str) -> None:
    with netns.Hosts(2) as hosts:
        names = hosts.names if by == "interface" else hosts.addresses
        listed = ",".join(f"{name}:2" for name in names)
        network = ["--network-interface", "nosuchif0,v0"] if by == "interface" else []
        # Here alone do hosts share memory, which UCX would find.
        ucx = ["--env", "UCX_TLS=tcp,self", "--env", "UCX_NET_DEVICES=v0"]
        options = ["-H", listed, "--rsh", hosts.rsh, "--transport", transport, *network, *ucx]
        before = hosts.sent(1)
        job = hosts.popen(
            0,
            [*RINGLET, *options, "--no-prefix", sys.executable, "-c", REPORT],
            env=os.environ | {MARK: mark},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        out, err = job.communicate(timeout=DEADLINE)
        assert job.returncode == 0, err
        assert sorted(out.splitlines()) == [
            f"{r} {transport} 4 node{r // 2} {r % 2} {r // 2}" for r in range(4)
        ]
        assert hosts.sent(1) - before > 4 << 20  # the tensor did cross the network
        until(lambda: not marked(mark))


FAR = """
import numpy
from ringlet.job import session
session.init()
comm = session.current()._comm
sums = [numpy.full(n, comm.rank + 1, numpy.float32) for n in (7, 100_000, 1 << 20)]
for x in sums:
    comm.allreduce(x)
    assert (x == 6).all()
gathered = numpy.empty(3 * 300_000, numpy.float32)
comm.allgather(sums[0].repeat(300_000)[:300_000] + comm.rank, gathered)
assert (gathered.reshape(3, -1) == numpy.arange(6, 9)[:, None]).all()
print(comm._delay, comm.far)
session.shutdown()
"""


@pytest.mark.skipif(netns.unavailable(copied=True) is not None, reason=f"needs {netns.TUN}")
@needs_torch
def test_ranks_know_that_others_are_far_away() -> None:
    with netns.Hosts(3, delay=0.02) as hosts:
        options = ["-H", hosts.slots(1), "--rsh", hosts.rsh, "--transport", "gloo", "--no-prefix"]
        network = ["--network-interface", "v0"]
        command = [*RINGLET, *options, *network, sys.executable, "-c", FAR]
        done = subprocess.run(
            hosts.command(0, command), capture_output=True, text=True, timeout=DEADLINE, check=False
        )
    assert done.returncode == 0, done.stderr
    (told,) = set(done.stdout.splitlines())  # the same on all ranks
    delay, far = told.split()
    assert far == "True"
    assert 0.02 <= float(delay) < 0.2


@needs_hosts
@needs_torch
def test_a_host_without_the_interface_says_so() -> None:
    with netns.Hosts(2) as hosts:
        subprocess.run(
            hosts.command(1, ["ip", "link", "set", "v0", "down"]), check=True, capture_output=True
        )
        subprocess.run(
            hosts.command(1, ["ip", "link", "set", "v0", "name", "w0"]),
            check=True,
            capture_output=True,
        )
        subprocess.run(
            hosts.command(1, ["ip", "link", "set", "w0", "up"]), check=True, capture_output=True
        )
        options = ["-H", hosts.slots(1), "--rsh", hosts.rsh, "--network-interface", "v0"]
        job = hosts.popen(
            0,
            [*RINGLET, "--gloo", *options, "sleep", "1000"],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        _, err = job.communicate(timeout=DEADLINE)
        assert job.returncode == 1
        assert b"[1]<stderr>: host node1 has no network interface v0 with an address" in err
        assert b"; it has lo, w0" in err


@needs_hosts
@needs_torch
@pytest.mark.parametrize("victim", [1, 0])
def test_a_host_that_vanishes_without_a_word(victim: int, tmp_path: Path) -> None:
    worker = Path(__file__).with_name("worker_pulse.py")
    with netns.Hosts(3) as hosts:
        # The launcher is on the host that stays, and no rank is.
        listed = f"{hosts.names[0]}:1,{hosts.names[1]}:1"
        options = ["-H", listed, "--rsh", hosts.rsh, "--network-interface", "v0", "--no-prefix"]
        job = hosts.popen(
            2,
            [*RINGLET, "--gloo", *options, sys.executable, str(worker), "-1"],
            env=os.environ | {"RINGLET_HEARTBEAT": "2", "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert [job.stdout.readline() for _ in range(2)] == ["reducing\n"] * 2
        hosts.cut(victim)
        out, err = job.communicate(timeout=DEADLINE)
    name = "rank 0, the coordinator," if victim == 0 else "rank 1"
    assert out == f"{name} is gone: no sign of life for 2 s\n", err
    assert job.returncode == 75
