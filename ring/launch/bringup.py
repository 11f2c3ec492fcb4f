"""Bringing the ranks of a job up: what is started for each transport, and what went wrong."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

from ringlet.ring.errors import LaunchError
from ringlet.ring.launch import hydra, start
from ringlet.ring.launch.crew import Rank
from ringlet.ring.launch.door import Door
from ringlet.ring.launch.hosts import bare
from ringlet.ring.launch.remote import start_agent
from ringlet.ring.launch.site import Site
from ringlet.ring.launch.start import Started
from ringlet.ring.network import family_of


@dataclass(frozen=True)
class Noise:
    """What helpers say themselves: where they write, and where the launcher reads it."""

    writer: BinaryIO
    reader: BinaryIO


def bring_up(
    site: Site,
    transport: str,
    door: Door,
    remote_env: Mapping[str, str],
    noise: Noise,
    limit: float,
) -> Iterator[Started]:
    """Start the wrappers of all ranks, or what starts them, one process after the other.

    ``remote_env`` is the environment of ranks on other hosts, ``limit`` the moment of the monotonic
    clock until which MPI's process manager may think. Raises LaunchError.
    """
    env = start.wrapper_environment(door.address, door.secret)
    if transport == "mpi" and not site.several:
        yield start.start_mpiexec(len(site.seats), env, noise.writer)
        return
    programs: dict[str, list[dict[str, Any]]]
    if transport == "mpi":
        if family_of(site.address()) == socket.AF_INET6:
            raise LaunchError(
                f"MPICH's process manager knows no IPv6, but {', '.join(site.elsewhere)} would be"
                f" reached from {site.address()}: use --transport gloo, or IPv4 addresses"
            )
        manager = start.start_hydra(site.counts(), env, site.interface(), noise.writer)
        yield manager
        commands = hydra.commands(noise.reader, manager.process, limit)
        proxies = dict(zip(site.by_host, commands, strict=True))
        for host, ranks in site.by_host.items():
            if host not in site.elsewhere:
                process = start.start_process(proxies[host], env, noise.writer)
                yield Started(process, "hydra_pmi_proxy", frozenset(ranks))
        programs = {host: [{"command": proxies[host], "env": {}}] for host in site.elsewhere}
    else:
        yield from start.start_wrappers(site.here, env, noise.writer)
        programs = {
            host: [{"command": None, "env": {"RINGLET_RANK": str(rank)}} for rank in ranks]
            for host, ranks in site.elsewhere.items()
        }
    shell = site.reach.shell() if programs else []
    for host, wanted in programs.items():
        order = {"address": door.address, "secret": door.secret.hex(), "programs": wanted}
        process = start_agent(shell, host, remote_env, order, noise.writer)
        who = f"`{' '.join([*shell, bare(host)])} ...`"
        yield Started(process, who, frozenset(site.elsewhere[host]))


def hopeless(started: Sequence[Started], missing: Sequence[int]) -> Started | None:
    """Return what has ended without bringing up a rank that is missing, if something has."""
    wanted = frozenset(missing)
    return next((s for s in started if s.ranks & wanted and s.process.poll() is not None), None)


def complaint(
    site: Site,
    ranks: Sequence[Rank],
    started: Sequence[Started],
    missing: Sequence[int],
    gone: Started | None,
    said: str,
) -> str:
    """Say which ranks did not start, where, what was tried, and what that said."""
    if gone:
        missing = sorted(gone.ranks.intersection(missing))
        why = f"{gone.who} ended with code {gone.process.returncode}"
    else:
        why = f"{site.reach.start_timeout:g} s have passed"
        tried = [s.who for s in started if s.process.stdin and s.ranks.intersection(missing)]
        if tried:
            why += f" since {', '.join(tried)} was started (see --start-timeout)"
    where = ""
    if site.several:
        where = f" on {', '.join(dict.fromkeys(ranks[rank].host for rank in missing))}"
    heard = f"; it said:\n{said}" if said else ""
    return f"rank {', '.join(map(str, missing))}{where} did not start: {why}{heard}"
