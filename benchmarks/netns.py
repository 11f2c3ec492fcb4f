"""Several hosts on one machine: network namespaces behind a bridge, with links of a chosen rate.

    with Hosts(4, mbit=100) as hosts:
        hosts.popen(0, ["ringlet", "run", "-H", hosts.slots(2), "--rsh", hosts.rsh, ...])

Every host is a network namespace of its own with one interface, ``v0``; the bridge has one too, so
nothing here touches the machine's network. ``tc tbf`` shapes what a host sends and what it
receives. A link that loses packets or delays them is two TAP devices and a process that copies
between them: the kernel's own ``netem`` is rarely there. Needs root and iproute2; ``unavailable``
says what is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import json
import os
import random
import select
import shlex
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PREFIX = "ringlet-rig"
INTERFACE = "v0"
# Loss-based, as hosts commonly are: with bbr, connections that share a shaped link leave it idle.
CONGESTION_CONTROL = "reno"
TUN = "/dev/net/tun"
TUNSETIFF, IFF_TAP, IFF_NO_PI = 0x400454CA, 0x0002, 0x1000
CLONE_NEWNET = 0x40000000
BURST_KB = 256  # kilobytes; a quarter of it halves the throughput
WAITING = 5000  # packets that a device keeps until they are copied, which may be late
LONG_FRAMES = 9000  # bytes; copying takes a sixth of the processor time then


def unavailable(copied: bool = False) -> str | None:
    """Say why there can be no namespaces here, None if there can.

    ``copied`` asks for links that lose packets or delay them too.
    """
    if os.geteuid() != 0:
        return "needs root to make network namespaces"
    for program in ("ip", "tc", "unshare"):
        if shutil.which(program) is None:
            return f"needs {program} (iproute2, util-linux)"
    if copied and not os.access(TUN, os.R_OK | os.W_OK):
        return f"needs {TUN} to lose packets, or to delay them"
    probe = f"{PREFIX}-{os.getpid()}-probe"
    if _ip("netns", "add", probe, check=False):
        return "may not make network namespaces here"
    _ip("netns", "del", probe)
    return None


class Hosts:
    """``count`` hosts named node0, node1, ... whose links carry ``mbit`` (None: as fast as can be).

    A context manager; afterwards nothing is left, and processes still in the namespaces are
    killed. Rates are megabits a second, for each direction by itself. So is ``loss``: the
    probability that a link loses a packet. A packet from host to host takes ``delay`` seconds, half
    of it on either link.
    """

    def __init__(
        self, count: int, mbit: float | None = None, loss: float = 0.0, delay: float = 0.0
    ) -> None:
        if not 0 < count < 250:
            raise ValueError(f"a rig has 1 to 249 hosts, not {count}")
        if mbit is not None and mbit <= 0:
            raise ValueError(f"a link carries more than 0 Mbit/s, not {mbit}")
        if not 0 <= loss < 1:
            raise ValueError(f"a link loses a part of all packets from 0 to below 1, not {loss}")
        if delay < 0:
            raise ValueError(f"packets take no less than 0 s, not {delay}")
        self.mbit, self._loss, self._delay = mbit, loss, delay
        self._copier: subprocess.Popen[bytes] | None = None
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
        if self._copier is not None:
            self._copier.kill()
            self._copier.communicate()
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
            if self._loss or self._delay:
                _ip("-n", self._bridge, "tuntap", "add", "dev", port, "mode", "tap")
                _ip("-n", namespace, "tuntap", "add", "dev", INTERFACE, "mode", "tap")
                for where, device in ((namespace, INTERFACE), (self._bridge, port)):
                    _ip("-n", where, "link", "set", device, "txqueuelen", str(WAITING))
            else:
                peer = ("peer", "name", INTERFACE, "netns", namespace)
                _ip("-n", self._bridge, "link", "add", port, "type", "veth", *peer)
            _ip("-n", self._bridge, "link", "set", port, "master", "br0", "up")
            _ip("-n", namespace, "addr", "add", f"{self.addresses[i]}/24", "dev", INTERFACE)
            if self._delay:
                for where, device in ((namespace, INTERFACE), (self._bridge, port)):
                    _ip("-n", where, "link", "set", device, "mtu", str(LONG_FRAMES))
            _ip("-n", namespace, "link", "set", INTERFACE, "up")
            control = "/proc/sys/net/ipv4/tcp_congestion_control"
            _ip("netns", "exec", namespace, "sh", "-c", f"echo {CONGESTION_CONTROL} > {control}")
            if self.mbit is not None:
                for where, device in ((namespace, INTERFACE), (self._bridge, port)):
                    _shape(where, device, self.mbit)
        if self._loss or self._delay:
            how = [str(self._loss), str(self._delay / 2)]
            where = [self._bridge, *self._namespaces]
            command = [sys.executable, "-I", "-S", __file__, *how, *where]
            self._copier = subprocess.Popen(command, stdout=subprocess.PIPE)
            assert self._copier.stdout is not None
            if self._copier.stdout.readline() != b"ready\n":
                raise RuntimeError("cannot copy packets between TAP devices")
        told = {}
        for name, address, ns in zip(self.names, self.addresses, self._namespaces, strict=True):
            told[name] = told[address] = (name, ns)
        # Arguments are joined and given to a shell, with all that means for quoting.
        script = [
            "#!/bin/sh",
            "host=$1; shift",
            'case "$host" in',
            *(f"{asked}) ns={ns}; name={name};;" for asked, (name, ns) in told.items()),
            '*) echo "rsh: $host: no such host" >&2; exit 255;;',
            "esac",
            'exec ip netns exec "$ns" unshare --uts sh -c \'hostname "$0"; exec sh -c "$1"\''
            ' "$name" "$*"',
        ]
        path = Path(self.rsh)
        path.write_text("\n".join(script) + "\n")
        path.chmod(0o700)
        path.with_name("hosts.json").write_text(json.dumps(told))  # for who can do without a shell

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


def _copy(loss: float, delay: float, bridge: str, namespaces: Sequence[str]) -> None:
    """Copy packets between the ends of each host's link, late, but for some; never returns."""
    other: dict[int, int] = {}
    ready = select.epoll()
    for i, namespace in enumerate(namespaces):
        ends = _tap(namespace, INTERFACE), _tap(bridge, f"p{i}")
        other |= {ends[0]: ends[1], ends[1]: ends[0]}
        for end in ends:
            os.set_blocking(end, False)
            ready.register(end, select.EPOLLIN)
    print("ready", flush=True)
    draw = random.Random(0).random
    held: deque[tuple[float, int, bytes]] = deque()  # when a packet is due, where, and itself
    while True:
        now = time.monotonic()
        while held and held[0][0] <= now:
            _, end, packet = held.popleft()
            with contextlib.suppress(OSError):  # a device that is down
                os.write(end, packet)
        for end, _ in ready.poll(max(0.0, held[0][0] - now) if held else None):
            with contextlib.suppress(OSError):
                packet = os.read(end, 1 << 16)
                if draw() >= loss:
                    held.append((time.monotonic() + delay, other[end], packet))


def _tap(namespace: str, device: str) -> int:
    """Return a descriptor of a TAP ``device``, which carries whole frames."""
    with open(f"/run/netns/{namespace}") as place:
        if ctypes.CDLL(None, use_errno=True).setns(place.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    descriptor = os.open(TUN, os.O_RDWR)
    request = struct.pack("16sH22x", device.encode(), IFF_TAP | IFF_NO_PI)
    fcntl.ioctl(descriptor, TUNSETIFF, request)
    return descriptor


if __name__ == "__main__":
    _copy(float(sys.argv[1]), float(sys.argv[2]), sys.argv[3], sys.argv[4:])
