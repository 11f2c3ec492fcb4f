"""Where nodes meet that run ``ringlet node``, without ssh: the first one waits for the others.

They prove to each other that they know a secret. Each node says what it has, hears which ranks to
start, and in the end how the job has ended. The job's own secret is made of the nodes' and of a
fresh number, which travels.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import json
import os
import random
import re
import select
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any, Self

from ringlet.ring.errors import LaunchError, ProtocolError
from ringlet.ring.hosts.hosts import Host
from ringlet.ring.hosts.remote import Arrived
from ringlet.ring.launch.agent import finish, obey
from ringlet.ring.processes import processes
from ringlet.ring.wire.addresses import addresses_of, with_port
from ringlet.ring.wire.entry import enter
from ringlet.ring.wire.framing import derive
from ringlet.ring.wire.handshake import Unwelcome
from ringlet.ring.wire.launch_link import Channel, Kind
from ringlet.ring.wire.listener import Listener

ADDRESS = 15.0  # seconds for one of the first node's addresses: not all may lead to it
PAUSE = 0.1, 2.0  # seconds between two tries to reach the first node: at first, and at most
LONGEST = 3600.0  # seconds of one wait: some say "never" with more than poll takes, 24 days
FLUSH = 5.0  # seconds for the other nodes to hear how the job has ended
MOST = 4096  # ranks of a node
_JOB = "job of nodes"
_REMEDY = {  # by what a listener cannot be made for
    errno.EADDRINUSE: ". Where another job has that port, give all nodes another --port",
    errno.EADDRNOTAVAIL: ". --first has to name node 0, which is this one",
}
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,253}")
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class NodeRendezvous:
    """The first of ``nodes`` nodes, on ``address``; it takes ``slots`` ranks itself."""

    def __init__(self, nodes: int, address: str, port: int, secret: bytes, slots: int) -> None:
        self._nodes = nodes
        self.channels: dict[int, Channel] = {}  # to the other nodes
        self.names: dict[int, tuple[str, int]] = {0: (own_name(), _checked(slots))}
        self.replaced: list[int] = []  # nodes that came once more while the earlier one was here
        self.gone: list[int] = []  # nodes that were here, and are not any more
        try:
            self._listener = Listener(nodes, address, port, secret)
        except OSError as error:
            raise LaunchError(
                f"cannot listen on {with_port(address, port)} for the other nodes: {error.strerror}"
                f"{_REMEDY.get(error.errno or 0, '')}"
            ) from error
        self.address = address
        self._nonce = os.urandom(32)
        self.secret = derive(secret, _JOB, self._nonce)  # the job's

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def gather(self, timeout: float) -> list[Host]:
        """Wait for all nodes, ``timeout`` seconds at most; return them as hosts, in their order.

        Raises LaunchError that names those which have not come.
        """
        limit = time.monotonic() + timeout
        while len(self.names) < self._nodes:
            left = limit - time.monotonic()
            if left <= 0:
                lacking = sorted(set(range(self._nodes)) - set(self.names))
                raise LaunchError(
                    f"node {', '.join(map(str, lacking))} of {self._nodes} did not come to"
                    f" {self._listener.address} within {timeout:g} s (see --start-timeout)"
                    f"{_only_here(self.address)}"
                )
            self.serve(left)
        count = Counter(name for name, _ in self.names.values())
        hosts = []
        for node in range(self._nodes):
            name, slots = self.names[node]
            hosts.append(Host(name if count[name] == 1 else f"{name}/{node}", slots))
        self._hosts = hosts
        return hosts

    def serve(self, seconds: float) -> None:
        """Wait ``seconds`` at most for something to happen, and take in who comes."""
        poll = select.poll()
        for source in self._listener.sources():
            poll.register(source, select.POLLIN)
        for channel in self.channels.values():
            poll.register(channel, select.POLLIN)
        patience = self._listener.patience()
        wait = min(seconds, LONGEST, LONGEST if patience is None else patience)
        ready = {descriptor for descriptor, _ in poll.poll(1000 * wait)}
        for guest in self._listener.admit(ready):
            if guest.visitor or guest.rank == 0:
                guest.channel.close()
                continue
            if known := self.channels.pop(guest.rank, None):  # it was started once more
                known.send(Kind.REPLACED)
                known.close()
                self.names.pop(guest.rank, None)
                self.replaced.append(guest.rank)
            self.channels[guest.rank] = guest.channel
        for node, channel in list(self.channels.items()):
            if channel.fileno() in ready:
                self._hear(node, channel)

    def _hear(self, node: int, channel: Channel) -> None:
        try:
            for kind, body in channel.receive():
                if kind is not Kind.NODE or node in self.names:
                    raise ProtocolError(f"a node does not send {kind.name} now")
                self.names[node] = _told(body)
        except ProtocolError:
            channel.close()
        if channel.closed:
            del self.channels[node]
            if self.names.pop(node, None) is not None:
                self.gone.append(node)

    def arrived(self) -> Arrived:
        """Return how the launcher reaches those who are here."""
        names = frozenset(host.name for host in self._hosts[1:])
        return Arrived(self.address, self.secret, names, self._deliver)

    def _deliver(self, host: str, order: Mapping[str, Any]) -> None:
        self.order([known.name for known in self._hosts].index(host), order)

    def order(self, node: int, order: Mapping[str, Any]) -> None:
        """Tell a node what to start; the job's secret, which it can make, does not travel."""
        said = {name: value for name, value in order.items() if name != "secret"}
        said["nonce"] = self._nonce.hex()
        self.channels[node].send(Kind.JOB, json.dumps(said).encode())

    def dismiss(self, code: int) -> None:
        """Tell the others how the job has ended."""
        limit = time.monotonic() + FLUSH
        for channel in self.channels.values():
            channel.send(Kind.CODE, b"%d" % code)
        for channel in self.channels.values():
            while channel.pending and not channel.closed and time.monotonic() < limit:
                channel.wait(max(0.0, limit - time.monotonic()))

    def close(self) -> None:
        """Let everybody go. Idempotent."""
        self._listener.close()
        for channel in self.channels.values():
            channel.close()


def serve_as_node(
    node: int, first: str, port: int, secret: bytes, slots: int, timeout: float
) -> int:
    """Be node ``node``: start what the node at ``first`` says; return the job's exit code.

    Raises LaunchError when it is not found within ``timeout`` seconds, or goes away.
    """
    slots = _checked(slots)
    channel = _reach(node, first, port, secret, timeout)
    with contextlib.closing(channel):
        channel.send(Kind.NODE, json.dumps([own_name(), slots]).encode())
        processes.adopt_orphans()
        woken, waker = socket.socketpair()
        for end in (woken, waker):
            end.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        for number in (*_SIGNALS, signal.SIGCHLD):
            if signal.getsignal(number) is not signal.SIG_IGN:  # nohup holds for the ranks too
                signal.signal(number, lambda *_: None)
        try:
            return _attend(node, channel, woken, secret)
        finally:
            processes.kill_children()


def _only_here(address: str) -> str:
    """Say that no other host can come to a loopback address, where names of hosts may lead too."""
    if not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return ""
    return (
        ". Other hosts cannot reach this address: where --first is a name that means it here (see"
        " /etc/hosts), give --first an address, or --network-interface"
    )


def own_name() -> str:
    """Return this host's name, as nodes tell it."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", socket.gethostname())[:253] or "host"


def _checked(slots: int) -> int:
    if not 1 <= slots <= MOST:
        raise LaunchError(f"--slots {slots}: a node takes 1 to {MOST} ranks")
    return slots


def _told(body: bytes) -> tuple[str, int]:
    """Return a node's name, and how many ranks it takes. Raises ProtocolError."""
    try:
        name, slots = json.loads(body)
        if _NAME.fullmatch(name) and type(slots) is int and 1 <= slots <= MOST:
            return name, slots
    except (ValueError, TypeError, RecursionError):
        pass
    raise ProtocolError("what a node says of itself makes no sense")


def _attend(node: int, channel: Channel, woken: socket.socket, secret: bytes) -> int:
    wrappers: list[subprocess.Popen[bytes]] = []
    comes_and_goes, leaving = False, 0
    poll = select.poll()
    poll.register(channel, select.POLLIN)
    poll.register(woken, select.POLLIN)
    while True:
        for kind, body in channel.receive():
            if kind is Kind.JOB:  # once more for each rank that comes later
                order = json.loads(body)
                comes_and_goes = bool(order.get("elastic"))
                own = derive(secret, _JOB, bytes.fromhex(order["nonce"]))
                wrappers += obey(order | {"secret": own.hex()})
            elif kind is Kind.CODE:
                finish()
                return int(body)
            elif kind is Kind.REPLACED:
                finish()
                raise LaunchError(
                    f"another node has come as node {node}, and takes this one's place: give each"
                    " node a number of its own"
                )
        if channel.closed:
            finish()
            raise LaunchError("the first node has gone, and with it the job")
        for descriptor, _ in poll.poll():
            if descriptor == woken.fileno():
                leaving = _pass_on(woken.recv(4096), wrappers) or leaving
        if comes_and_goes and leaving and not wrappers:
            return 128 + leaving  # the others go on


def _pass_on(numbers: bytes, wrappers: list[subprocess.Popen[bytes]]) -> int:
    """Let the wrappers, which pass them on, have the signals that came here.

    Forgets those that have ended. Returns the signal that asks this node to end, 0 for none.
    """
    asked = 0
    for number in numbers:
        if number == signal.SIGCHLD:
            processes.reap()
        children = set(processes.children_of(os.getpid()))
        wrappers[:] = [wrapper for wrapper in wrappers if wrapper.pid in children]
        if number == signal.SIGCHLD:
            continue
        if not wrappers:  # nothing has been started, or is left
            sys.exit(128 + number)
        for wrapper in wrappers:
            processes.signal_group(wrapper.pid, number)
        if number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            asked = number
    return asked


def _reach(node: int, first: str, port: int, secret: bytes, timeout: float) -> Channel:
    """Connect to the first node, whose name may not be known yet, and which may not listen yet."""
    limit, pause = time.monotonic() + timeout, PAUSE[0]
    while True:
        found = addresses_of(first)
        why, refused = f"the name {first} is not known", ""
        for address in found:
            left = max(1.0, min(ADDRESS, limit - time.monotonic()))
            try:
                return enter(with_port(address, port), secret, node, patience=left)
            except Unwelcome as error:  # at another of its addresses somebody else may listen
                refused = f"{with_port(address, port)} does not let this node in: {error}"
            except (OSError, ProtocolError) as error:
                why = f"{with_port(address, port)}: {error}"
        if refused:
            raise LaunchError(
                f"node 0 at {refused} (RINGLET_SECRET and --nodes have to be the same for every"
                f" node, and --node {node} less than the latter)"
            )
        if time.monotonic() + pause >= limit:
            raise LaunchError(
                f"node {node} did not reach node 0 within {timeout:g} s (see --start-timeout):"
                f" {why}"
            )
        time.sleep(pause * random.uniform(0.5, 1.0))  # so that not all come at once
        pause = min(2 * pause, PAUSE[1])
