"""Who this rank is, and what its engine has counted."""

from __future__ import annotations

from ringlet.fusion import Stats
from ringlet.job.session import current
from ringlet.ring.callers import public


@public
def rank() -> int:
    """Return this rank: 0 to ``size() - 1``."""
    return current().rank


@public
def size() -> int:
    """Return the number of ranks."""
    return current().size


@public
def local_rank() -> int:
    """Return this rank among those of its host."""
    return current().topology.local_rank


@public
def local_size() -> int:
    """Return the number of ranks on this host."""
    return current().topology.local_size


@public
def cross_rank() -> int:
    """Return this host among those that have a rank with this local rank."""
    return current().topology.cross_rank


@public
def cross_size() -> int:
    """Return the number of hosts that have a rank with this local rank."""
    return current().topology.cross_size


@public
def is_homogeneous() -> bool:
    """Whether every host has the same number of ranks."""
    hosts = current().topology.hosts
    return len({hosts.count(host) for host in hosts}) == 1


@public
def stats() -> Stats:
    """Return what this rank's engine has counted since ``init`` or ``reset_stats``."""
    return current().engine.stats


@public
def reset_stats() -> None:
    """Start counting anew."""
    current().engine.reset_stats()
