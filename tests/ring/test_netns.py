"""The rig of shaped hosts: what it makes, what it measures, and that nothing is left of it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import netns
import pytest

missing = netns.unavailable()
pytestmark = pytest.mark.skipif(missing is not None, reason=str(missing))

RECEIVE = (
    "import socket\ns = socket.create_server(('10.77.0.2', 5000))\nprint('up', flush=True)\n"
    "c, _ = s.accept()\nn = 0\nwhile data := c.recv(1 << 20): n += len(data)\nprint(n)"
)
SEND = (
    "import socket\ns = socket.create_connection(('10.77.0.2', 5000))\n"
    "s.sendall(bytes(4 << 20))\ns.close()"
)


def left() -> list[str]:
    return [path.name for path in Path("/run/netns").glob(f"{netns.PREFIX}-{netns.os.getpid()}-*")]


def test_hosts_have_names_and_a_link_of_the_rate_asked_for() -> None:
    with netns.Hosts(2, mbit=100) as hosts:
        told = subprocess.run(hosts.command(1, ["hostname"]), capture_output=True, check=True)
        assert told.stdout == b"node1\n"
        python = [sys.executable, "-I", "-S", "-c"]
        with hosts.popen(1, [*python, RECEIVE], stdout=subprocess.PIPE) as receiver:
            assert receiver.stdout.readline() == b"up\n"
            before = hosts.sent(0)
            begin = netns.time.monotonic()
            hosts.popen(0, [*python, SEND]).wait()
            assert receiver.stdout.readline() == b"4194304\n"
            seconds = netns.time.monotonic() - begin
        assert 4 << 20 <= hosts.sent(0) - before < 1.1 * (4 << 20)
        assert seconds > 8 * (4 << 20) / 100e6 * 0.8  # the bucket lets a burst through
    assert left() == []


def test_what_still_runs_is_killed_whatever_happens() -> None:
    started = []

    def interrupted() -> None:
        with netns.Hosts(2) as hosts:
            code = "import time; print('up', flush=True); time.sleep(1000)"
            for host in range(2):
                command = [sys.executable, "-c", code]
                started.append(hosts.popen(host, command, stdout=subprocess.PIPE))
                assert started[-1].stdout.readline() == b"up\n"
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert all(process.wait(30) for process in started)
    for process in started:
        process.stdout.close()
    assert left() == []


def test_a_rig_that_cannot_be_built_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="1 to 249 hosts"):
        netns.Hosts(250)
    with pytest.raises(ValueError, match="more than 0 Mbit/s"):
        netns.Hosts(2, mbit=-1)
    monkeypatch.setattr(netns, "INTERFACE", "a name that no interface can have")
    with pytest.raises(RuntimeError, match="a name that no interface can have"), netns.Hosts(2):
        pass
    assert left() == []


COUNT = (
    "import socket\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
    "s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)\n"
    "s.bind(('10.77.0.2', 5000))\nprint('up', flush=True)\nn = 0\n"
    "while s.recv(100) != b'end': n += 1\nprint(n)"
)
COUNTED = (
    "import socket, time\ns = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
    "for i in range(2000):\n"
    "    s.sendto(b'x', ('10.77.0.2', 5000))\n    time.sleep(0.0005)\n"
    "for i in range(100): s.sendto(b'end', ('10.77.0.2', 5000))"
)


@pytest.mark.skipif(netns.unavailable(copied=True) is not None, reason=f"needs {netns.TUN}")
def test_links_lose_the_share_of_packets_asked_for() -> None:
    with netns.Hosts(2, loss=0.1) as hosts:
        python = [sys.executable, "-I", "-S", "-c"]
        with hosts.popen(1, [*python, COUNT], stdout=subprocess.PIPE) as receiver:
            assert receiver.stdout.readline() == b"up\n"
            assert hosts.popen(0, [*python, COUNTED]).wait() == 0
            arrived = int(receiver.stdout.readline())
    assert 0.76 < arrived / 2000 < 0.86  # two links: 0.81, and a standard deviation of 0.009
    assert left() == []
