"""Starting something on another host: the remote shell, and what it is told to run."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ringlet.ring.descriptors import limit_as_before
from ringlet.ring.errors import LaunchError
from ringlet.ring.hosts.forwarding import START, is_credential
from ringlet.ring.hosts.hosts import bare

AGENT = [sys.executable, "-P", "-m", "ringlet.ring.launch.agent"]
LONGEST = 3600.0  # seconds for a connection of ssh's: some say "never" with more than it takes


@dataclass(frozen=True)
class Arrived:
    """Hosts that have come by themselves: their ``names``, and what delivers one its orders.

    ``address`` is this host's, as it leads to them. ``secret`` (32 bytes) is the job's, which they
    know how to make: it is in no order.
    """

    address: str
    secret: bytes
    names: frozenset[str]
    deliver: Callable[[str, Mapping[str, Any]], None]


@dataclass(frozen=True)
class Reach:
    """How other hosts are reached.

    ``rsh`` is a command that takes a host and a command for a shell there; None stands for ssh,
    with ``ssh_port`` and ``ssh_identity_file`` if given. ``interfaces`` are network interfaces to
    use, in order of preference; none means the ones that lead from host to host.
    ``start_timeout`` is in seconds, ``forward`` names variables to pass on besides the usual ones.
    Where hosts have ``arrived`` by themselves, no shell is needed, and each keeps its environment.
    """

    rsh: str | None = None
    ssh_port: int | None = None
    ssh_identity_file: str | None = None
    interfaces: tuple[str, ...] = ()
    start_timeout: float = 120.0
    forward: tuple[str, ...] = ()
    arrived: Arrived | None = None

    def shell(self) -> list[str]:
        """Return the remote shell as a command. Raises LaunchError if it is contradictory."""
        if self.rsh is not None:
            if self.ssh_port is not None or self.ssh_identity_file is not None:
                raise LaunchError(
                    "--rsh replaces ssh: put the port and the identity file into its command"
                )
            try:
                words = shlex.split(self.rsh)
            except ValueError as error:
                raise LaunchError(f"--rsh {self.rsh!r} is not a command: {error}") from error
            if not words:
                raise LaunchError("--rsh is an empty command")
            return words
        wait = max(1, int(min(self.start_timeout, LONGEST)))
        words = ["ssh", "-o", "BatchMode=yes", "-o", f"ConnectTimeout={wait}"]
        if self.ssh_port is not None:
            words += ["-p", str(self.ssh_port)]
        if self.ssh_identity_file is not None:
            words += ["-i", self.ssh_identity_file]
        return words


def start_agent(
    shell: Sequence[str],
    host: str,
    env: Mapping[str, str],
    order: Mapping[str, Any],
    noise: Any,
) -> subprocess.Popen[bytes]:
    """Have ``host`` run what ``order`` says, in this directory; return the remote shell.

    ``env`` is this job's environment, of which the command line carries the search paths only;
    ``order``, with the job's secret and the credentials of ``env``, goes over the standard input,
    whose end tells the agent that the launcher has gone. Raises LaunchError if the shell cannot be
    started.
    """
    credentials = {name: value for name, value in env.items() if is_credential(name)}
    paths = [f"{name}={env[name]}" for name in START if name in env]
    try:
        here = os.getcwd()
    except OSError as error:
        raise LaunchError(
            f"host {host} is to work in this directory, which has been removed: {error.strerror}"
        ) from error
    line = f"cd {shlex.quote(here)} && exec {shlex.join(['env', *paths, *AGENT])}"
    try:
        process = subprocess.Popen(
            [*shell, bare(host), line],
            stdin=subprocess.PIPE,
            stdout=noise,
            stderr=noise,
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(f"cannot start {shell[0]}: {error.strerror}") from error
    limit_as_before(process.pid)
    assert process.stdin is not None
    try:
        process.stdin.write(json.dumps({**order, "credentials": credentials}).encode() + b"\n")
        process.stdin.flush()
    except OSError:
        pass  # it ended at once: whoever waits for its ranks says so
    return process
