"""Bringing the ranks of a job up: what is started for each transport, and what went wrong."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import BinaryIO

from ringlet.ring.errors import LaunchError
from ringlet.ring.hosts.hosts import bare
from ringlet.ring.hosts.remote import start_agent
from ringlet.ring.launch import start
from ringlet.ring.launch.allocation import Allocation
from ringlet.ring.launch.rank_table import Rank
from ringlet.ring.launch.start import Started
from ringlet.ring.wire.listener import Listener


def bring_up(
    site: Allocation,
    managed: bool,
    listener: Listener,
    remote_env: Mapping[str, str],
    noise: BinaryIO,
) -> Iterator[Started]:
    """Start the wrappers of all ranks, or what starts them, one process after the other.

    ``managed``: MPI's own process manager starts them. ``remote_env`` is the environment of ranks
    on other hosts; what helpers say themselves goes to ``noise``. Raises LaunchError.
    """
    env = start.wrapper_environment(listener.address, listener.secret)
    if managed:
        if site.several:
            raise LaunchError(
                "over several hosts MPI needs MPICH 4 or newer (pip install 'ringlet[mpi]'), which"
                f" {start.mpiexec()} does not come from; or use --transport gloo"
            )
        yield start.start_mpiexec(len(site.seats), env, noise)
        return
    yield from start.start_wrappers(site.here, env, noise)
    arrived = site.reach.arrived
    shell = site.reach.shell() if site.elsewhere and not arrived else []
    for host, ranks in site.elsewhere.items():
        programs = [{"RINGLET_RANK": str(rank)} for rank in ranks]
        order = {"address": listener.address, "programs": programs}
        if arrived:
            arrived.deliver(host, order)
            continue
        order["secret"] = listener.secret.hex()
        process = start_agent(shell, host, remote_env, order, noise)
        yield Started(process, f"`{' '.join([*shell, bare(host)])} ...`", frozenset(ranks))


def hopeless(started: Sequence[Started], missing: Sequence[int]) -> Started | None:
    """Return what has ended without bringing up a rank that is missing, if something has."""
    wanted = frozenset(missing)
    return next((s for s in started if s.ranks & wanted and s.process.poll() is not None), None)


def complaint(
    site: Allocation,
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
    number = "rank" if len(missing) == 1 else "ranks"
    return f"{number} {', '.join(map(str, missing))}{where} did not start: {why}{heard}"
