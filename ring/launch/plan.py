"""What a job is to run: its ranks, their transport, and what each finds in its environment."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from ringlet.ring.control import pulse
from ringlet.ring.errors import LaunchError
from ringlet.ring.hosts.forwarding import forwarded, without_credentials
from ringlet.ring.hosts.hosts import Host
from ringlet.ring.hosts.remote import Reach
from ringlet.ring.launch import start
from ringlet.ring.launch.allocation import Allocation
from ringlet.ring.launch.horovod_hint import horovod_hint
from ringlet.ring.processes.pmi import Pmi
from ringlet.ring.processes.torchrun import users_own
from ringlet.ring.variables import check

SHOWN = 300  # characters of a command that are shown


class Plan:
    """``command`` as ``size`` ranks at ``site``; the arguments are those of ``launch``.

    ``remark`` is something to say about the ``transport``; ``remote_env`` is what ranks on other
    hosts find of this process's environment; ``pmi`` answers MPI if nobody else does; ``silence``
    is after how many seconds without a sign of life a rank is frozen. Raises LaunchError or
    TransportUnavailable.
    """

    def __init__(
        self,
        command: Sequence[str],
        np: int,
        transport: str | None,
        env: Mapping[str, str],
        hosts: Sequence[Host],
        reach: Reach,
    ) -> None:
        if np < 1:
            raise LaunchError(f"a job needs at least one rank, not {np}")
        if not command:
            raise LaunchError("a job needs a command")
        self._env = {**os.environ, **env}
        try:
            check(self._env)
            self.silence = pulse.seconds_from(self._env)
        except ValueError as error:
            raise LaunchError(str(error)) from None
        self.size, self.command = np, list(command)
        self.transport, self.remark = start.choose_transport(start.asked_transport(transport, env))
        self.site = Allocation(hosts, np, reach)
        # Another MPI's ranks are started by its own mpiexec.
        asks_us = self.transport == "mpi" and start.is_mpich(reach.start_timeout)
        self.pmi = Pmi([count for _, count in self.site.counts()]) if asks_us else None
        asked = {*env, *reach.forward}
        # Hosts that came by themselves have an environment, and GPUs, of their own.
        arrived = reach.arrived is not None
        self.remote_env = dict(env) if arrived else forwarded(self._env, asked)
        self._remote_told = self.remote_env if arrived else without_credentials(self.remote_env)
        self._users = users_own(self._env, asked)

    def task(self, rank: int, address: str) -> dict[str, Any]:
        """Return what the wrapper of ``rank`` is told; the launcher is at ``address``."""
        seat = self.site.seats[rank]
        base = self._remote_told if seat.host in self.site.elsewhere else self._env
        env = start.rank_environment(
            base, rank, self.size, self.transport, address, seat, self._users
        )
        peers = [r for r, s in enumerate(self.site.seats) if s.local_rank == seat.local_rank]
        env |= start.cross_environment(seat.host, rank, peers)
        if number := seat.host.partition("/")[2]:  # of nodes whose hosts have the same name
            env["RINGLET_NODE"] = number
        return {
            "command": self.command,
            "env": env,
            "drop": start.dropped(),
            "local_size": seat.local_size,
            "interfaces": self.site.reach.interfaces,
            "leads": rank == 0,
            "pmi": self.pmi is not None,
        }

    def missing_module(self) -> str | None:
        """Return what to do where a rank lacked a module, if that is known.

        Ranks on this host may run another Python than the one of Ringlet, or import Horovod.
        """
        there = self._env.get("PATH")
        other = None if self.site.several else start.other_python(self.command[0], there)
        return other or horovod_hint(self.command)

    def __str__(self) -> str:
        ranks = "1 rank" if self.size == 1 else f"{self.size} ranks"
        where = f" on {self.site.listed()}" if self.site.several else ""
        return f"{ranks}{where} over {self.transport}: {shown(self.command)}"


def shown(command: Sequence[str]) -> str:
    """Return a command to be read: one line, whatever is in it."""
    line = " ".join(shlex.join(command).split())
    return line if len(line) <= SHOWN else f"{line[:SHOWN]} ..."
