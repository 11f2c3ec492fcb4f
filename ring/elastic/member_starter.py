"""Starts the members of an elastic job, here or on other hosts, and says what each is to run."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from typing import Any, BinaryIO

from ringlet.ring.elastic.membership import JobMember
from ringlet.ring.elastic.placement_engine import PlacementEngine, StartedMember, StartedProcess
from ringlet.ring.errors import LaunchError
from ringlet.ring.hosts.forwarding import forwarded, without_credentials
from ringlet.ring.hosts.hosts import Host, Seat, bare, is_here
from ringlet.ring.hosts.interfaces import launcher_address
from ringlet.ring.hosts.remote import Reach, start_agent
from ringlet.ring.launch import start
from ringlet.ring.launch.horovod_hint import horovod_hint
from ringlet.ring.processes import torchrun
from ringlet.ring.variables import check
from ringlet.ring.wire.keys import MEMBER
from ringlet.ring.wire.listener import Listener

LOCAL = "127.0.0.1"


class MemberStarter:
    """Members of one job run ``command`` over ``transport``.

    ``env`` adds to this process's environment. Where there is an ``engine``, it has the hosts and
    starts what runs there; else members elsewhere are started by the remote shell of ``reach``.
    Raises LaunchError where a value of the environment, or the transport, is no good.
    """

    def __init__(
        self,
        command: Sequence[str],
        transport: str | None,
        env: Mapping[str, str],
        reach: Reach,
        engine: PlacementEngine | None,
    ) -> None:
        transport = start.asked_transport(transport, env)
        if transport == "mpi":
            raise LaunchError(
                "an elastic job cannot use MPI, whose library ends every rank when one is lost: "
                "use --transport gloo"
            )
        self.transport, _ = start.choose_transport(transport or "gloo")
        self.command, self.env = list(command), {**os.environ, **env}
        try:
            check(self.env)
        except ValueError as error:
            raise LaunchError(str(error)) from None
        self._asked = {*env, *reach.forward}
        self._reach, self._engine = reach, engine
        # A remote shell of the user's own may know hosts by names that mean nothing here.
        self._resolve = reach.rsh is None
        self._known_here: dict[str, bool] = {}

    def is_here(self, host: str) -> bool:
        """Whether this launcher runs on ``host`` and starts members there itself."""
        if self._engine is not None:
            return host == self._engine.here
        if host not in self._known_here:  # a name is looked up once: a resolver may hang
            self._known_here[host] = is_here(host, self._resolve)
        return self._known_here[host]

    def elsewhere(self, hosts: Sequence[Host]) -> list[str]:
        """Return the names of those of ``hosts`` that are not this one."""
        return [host.name for host in hosts if not self.is_here(host.name)]

    def address(self, hosts: Sequence[Host]) -> str:
        """Return the address of this launcher, as it leads from ``hosts`` here."""
        if self._engine is not None:
            return self._engine.address
        others, interfaces = self.elsewhere(hosts), self._reach.interfaces
        return launcher_address(interfaces, others) if others or interfaces else LOCAL

    def remedy(self, here: bool) -> str | None:
        """Return what may help where the command failed, on this host or elsewhere."""
        python = start.other_python(self.command[0], self.env.get("PATH")) if here else None
        return python or horovod_hint(self.command)

    def start(self, number: int, host: str, listener: Listener, writer: BinaryIO) -> StartedMember:
        """Start what will report to ``listener`` as member ``number``. Raises LaunchError.

        What it says before it does goes to ``writer``.
        """
        if self.is_here(host):
            env = start.wrapper_environment(listener.address, listener.secret)
            (one,) = start.start_wrappers([number], env, writer)
            return StartedProcess(one.process)
        order = {
            "address": listener.address,
            "secret": listener.secret.hex(),
            "programs": [{"RINGLET_RANK": str(number)}],
        }
        if self._engine is not None:
            return self._engine.start(host, order)
        env = forwarded(self.env, self._asked)
        return StartedProcess(start_agent(self._reach.shell(), bare(host), env, order, writer))

    def task(
        self, member: JobMember, living: Collection[JobMember], here: bool, address: str
    ) -> dict[str, Any]:
        """Return what ``member`` is to run, one of those ``living``.

        ``here`` tells whether it runs on this host, ``address`` is where it has reported.
        """
        remote = without_credentials(forwarded(self.env, self._asked))
        base = self.env if here else remote
        if self._engine is not None:  # whose workers have an environment, and GPUs, of their own
            base = {name: self.env[name] for name in self._asked}
        number = member.number
        there, size = [m for m in living if m.host == member.host], len(living)
        seat = Seat(member.host, member.local, len(there))
        env = start.rank_environment(
            base, number, max(size, number + 1), self.transport, address, seat, {}
        )
        peers = [m.number for m in living if m.local == member.local]
        env |= start.cross_environment(member.host, number, peers)
        if index := member.host.partition("/")[2]:  # of nodes whose hosts have the same name
            env["RINGLET_NODE"] = index
        for name in torchrun.NAMES:
            env.pop(name, None)  # they would not follow the ranks
        # As Horovod's programs know them, with HOROVOD_RANK and so on: what held at their start.
        env |= {
            MEMBER: str(number),
            "HOROVOD_HOSTNAME": member.host,
            "HOROVOD_ELASTIC": "1",
        }
        return {
            "command": self.command,
            "env": env,
            "drop": start.dropped(),
            "local_size": len(there),
            "interfaces": self._reach.interfaces,
            "leads": False,
            "pmi": False,
        }
