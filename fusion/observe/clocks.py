"""How far the ranks' clocks are apart, from nothing but collectives.

A collective in which everybody waits for everybody gives two inequalities per rank: nobody leaves
before anybody has entered. Over some rounds they enclose the offset; the tightest ones count.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from ringlet.ring.communicator import Communicator

ROUNDS = 24


class Offset(NamedTuple):
    """This rank's clock minus rank 0's, in seconds, known to within ``uncertainty`` either way."""

    seconds: float
    uncertainty: float


def estimate(
    comm: Communicator, clock: Callable[[], float] = time.perf_counter, rounds: int = ROUNDS
) -> Offset:
    """Return the offset of ``clock`` on this rank. Collective.

    Ranks of one machine (and one boot of it) share the clock: there it is exactly 0.
    """
    if comm.size == 1:
        return Offset(0.0, 0.0)
    shared = clock is time.perf_counter
    said = comm.allgather_bytes(_machine().encode())
    if shared and all(machine == said[0] for machine in said):
        return Offset(0.0, 0.0)
    entered = np.zeros((rounds, comm.size))
    left = np.zeros((rounds, comm.size))
    mine = np.zeros(rounds)
    for i in range(rounds):
        comm.allgather(np.array([clock()]), entered[i])
        mine[i] = clock()
    gathered = np.zeros(rounds * comm.size)
    comm.allgather(mine, gathered)
    left = gathered.reshape(comm.size, rounds).T
    if shared and said[comm.rank] == said[0]:
        return Offset(0.0, 0.0)
    return enclosed(entered[:, comm.rank], left[:, comm.rank], entered[:, 0], left[:, 0])


def enclosed(
    entered: np.ndarray[tuple[int], np.dtype[np.float64]],
    left: np.ndarray[tuple[int], np.dtype[np.float64]],
    entered0: np.ndarray[tuple[int], np.dtype[np.float64]],
    left0: np.ndarray[tuple[int], np.dtype[np.float64]],
) -> Offset:
    """Return the offset that satisfies, for every round, left0 >= entered and left >= entered0."""
    at_least = float(np.max(entered - left0))
    at_most = float(np.min(left - entered0))
    return Offset((at_least + at_most) / 2, max(0.0, (at_most - at_least) / 2))


def _machine() -> str:
    """Return what is the same for processes that share a monotonic clock."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        boot = socket.gethostname()
    with contextlib.suppress(OSError):
        boot += Path("/proc/self/timens_offsets").read_text()
    return boot
