"""Several hosts on one machine: network namespaces behind a bridge, with links of a chosen rate.

    with Hosts(4, mbit=100) as hosts:
        hosts.popen(0, ["ringlet", "run", "-H", hosts.slots(2), "--rsh", hosts.rsh, ...])

Every host is a network namespace of its own with one interface, ``v0``; the bridge has one too, so
nothing here touches the machine's network. ``tc tbf`` shapes what a host sends and what it
receives. Needs root and iproute2; ``unavailable`` says what is missing.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PREFIX = "ringlet-rig"
INTERFACE = "v0"
# Loss-based, as hosts commonly are: with bbr, connections that share a shaped link leave it idle.
CONGESTION_CONTROL = "reno"
BURST_KB = 256  # kilobytes; a quarter of it halves the throughput


def unavailable() -> str | None:
    """Say why there can be no namespaces here, or return None if there can."""
    if os.geteuid() != 0:
        return "needs root to make network namespaces"
    for program in ("ip", "tc", "unshare"):
        if shutil.which(program) is None:
            return f"needs {program} (iproute2, util-linux)"
    probe = f"{PREFIX}-{os.getpid()}-probe"
    if _ip("netns", "add", probe, check=False):
        return "may not make network namespaces here"
    _ip("netns", "del", probe)
    return None


class Hosts:
    """``count`` hosts named node0, node1, ... whose links carry ``mbit`` (None: as fast as can be).

    A context manager; afterwards nothing is left, and processes still in the namespaces are
    killed. Rates are megabits a second, for each direction by itself.
    """

    def __init__(self, count: int, mbit: float | None = None) -> None:
        if not 0 < count < 250:
            raise ValueError(f"a rig has 1 to 249 hosts, not {count}")
        if mbit is not None and mbit <= 0:
            raise ValueError(f"a link carries more than 0 Mbit/s, not {mbit}")
        self.mbit = mbit
        self.names = [f"node{i}" for i in range(count)]
        self.addresses = [f"10.77.0.{i + 1}" for i in range(count)]
        self._namespaces = [f"{PREFIX}-{os.getpid()}-{name}" for name in self.names]
        self._bridge = f"{PREFIX}-{os.getpid()}-bridge"
        self._directory = ""

    def __enter__(self) -> Hosts:
        _sweep()
        try:
            self._directory = tempfile.mkdtemp(prefix=f"{PREFIX}-")
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill what runs in the namespaces and remove them. Idempotent."""
        for namespace in (*self._namespaces, self._bridge):
            _remove(namespace)
        shutil.rmtree(self._directory, ignore_errors=True)

    @property
    def rsh(self) -> str:
        """A remote shell: ``RSH HOST COMMAND`` runs COMMAND in a shell on HOST, as ssh does."""
        return str(Path(self._directory) / "rsh")

    def slots(self, each: int) -> str:
        """Return the hosts as ``ringlet run -H`` wants them, with ``each`` ranks on every one."""
        return ",".join(f"{name}:{each}" for name in self.names)

    def command(self, host: int, command: Sequence[str]) -> list[str]:
        """Return what runs ``command`` on ``host``: inside its namespace, under its name."""
        return [self.rsh, self.names[host], f"exec {shlex.join(command)}"]

    def popen(self, host: int, command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start ``command`` on ``host``."""
        return subprocess.Popen(self.command(host, command), **options)

    def sent(self, host: int) -> int:
        """Return the bytes that ``host`` has sent through its interface, headers included."""
        return self._counter(host, "tx")

    def received(self, host: int) -> int:
        """Return the bytes that ``host`` has received, headers included."""
        return self._counter(host, "rx")

    def cut(self, host: int) -> None:
        """Take ``host`` off the network without a word to anybody."""
        _ip("-n", self._bridge, "link", "set", f"p{host}", "nomaster")

    def mend(self, host: int) -> None:
        """Connect ``host`` again."""
        _ip("-n", self._bridge, "link", "set", f"p{host}", "master", "br0")

    def _build(self) -> None:
        _ip("netns", "add", self._bridge)
        _ip("-n", self._bridge, "link", "add", "br0", "type", "bridge")
        _ip("-n", self._bridge, "link", "set", "br0", "up")
        for i, namespace in enumerate(self._namespaces):
            port = f"p{i}"
            _ip("netns", "add", namespace)
            _ip("-n", namespace, "link", "set", "lo", "up")
            peer = ("peer", "name", INTERFACE, "netns", namespace)
            _ip("-n", self._bridge, "link", "add", port, "type", "veth", *peer)
            _ip("-n", self._bridge, "link", "set", port, "master", "br0", "up")
            _ip("-n", namespace, "addr", "add", f"{self.addresses[i]}/24", "dev", INTERFACE)
            _ip("-n", namespace, "link", "set", INTERFACE, "up")
            control = "/proc/sys/net/ipv4/tcp_congestion_control"
            _ip("netns", "exec", namespace, "sh", "-c", f"echo {CONGESTION_CONTROL} > {control}")
            if self.mbit is not None:
                for where, device in ((namespace, INTERFACE), (self._bridge, port)):
                    _shape(where, device, self.mbit)
        # Arguments are joined and given to a shell, with all that means for quoting.
        script = [
            "#!/bin/sh",
            "host=$1; shift",
            'case "$host" in',
            *(
                f"{name}|{address}) ns={ns}; name={name};;"
                for name, address, ns in zip(
                    self.names, self.addresses, self._namespaces, strict=True
                )
            ),
            '*) echo "rsh: $host: no such host" >&2; exit 255;;',
            "esac",
            'exec ip netns exec "$ns" unshare --uts sh -c \'hostname "$0"; exec sh -c "$1"\''
            ' "$name" "$*"',
        ]
        path = Path(self.rsh)
        path.write_text("\n".join(script) + "\n")
        path.chmod(0o700)

    def _counter(self, host: int, way: str) -> int:
        command = ["ip", "-n", self._namespaces[host], "-s", "-j", "link", "show", INTERFACE]
        told = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        return int(told[0]["stats64"][way]["bytes"])


def _shape(namespace: str, device: str, mbit: float) -> None:
    rate = ("rate", f"{mbit}mbit", "burst", f"{BURST_KB}kb", "latency", "50ms")
    subprocess.run(
        ["tc", "-n", namespace, "qdisc", "add", "dev", device, "root", "tbf", *rate], check=True
    )


def _ip(*arguments: str, check: bool = True) -> int:
    done = subprocess.run(["ip", *arguments], check=False, capture_output=True, text=True)
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.returncode


def _remove(namespace: str) -> None:
    listed = subprocess.run(
        ["ip", "netns", "pids", namespace], check=False, capture_output=True, text=True
    )
    for pid in listed.stdout.split():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)
    limit = time.monotonic() + 5
    while _ip("netns", "del", namespace, check=False) and time.monotonic() < limit:
        if not Path("/run/netns", namespace).exists():
            return
        time.sleep(0.05)


def _sweep() -> None:
    """Remove what rigs of processes that were killed have left."""
    with contextlib.suppress(FileNotFoundError):
        for path in Path("/run/netns").iterdir():
            prefix, _, rest = path.name.partition(f"{PREFIX}-")
            pid = rest.partition("-")[0]
            if not prefix and pid.isdecimal() and not Path("/proc", pid).exists():
                _remove(path.name)
