"""A quick look at the network, to say what a step would have taken without compression."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from ringlet.ring.communicator import Communicator

SMALL, LARGE = 1 << 10, 1 << 20  # float32 elements
_TIMES = 5


class Network(NamedTuple):
    """An uncompressed bucket takes ``latency_s + sent bytes / bytes_per_s``, and two copies.

    Measured by allreduce on the ranks at hand: a line through a small and a large one.
    """

    latency_s: float
    bytes_per_s: float
    copied_bytes_per_s: float

    def seconds(self, sent: float, tensors: float) -> float:
        """Return the time of a bucket that sends ``sent`` bytes for ``tensors`` bytes."""
        copies = 2 * tensors / self.copied_bytes_per_s
        return self.latency_s + sent / self.bytes_per_s + copies


def measure(comm: Communicator) -> Network:
    """Measure the network of ``comm``. Collective; the slowest rank counts."""
    small = _median(comm, np.zeros(SMALL, np.float32))
    large_array = np.zeros(LARGE, np.float32)
    large = _median(comm, large_array)
    into = np.empty_like(large_array)
    copying = _timed(lambda: np.concatenate([large_array], out=into))
    share = 2 * (comm.size - 1) / comm.size * 4
    per_element = max(1e-12, large - small) / (LARGE - SMALL)
    rate = share / per_element if comm.size > 1 else float("inf")
    latency = max(0.0, small - SMALL * per_element)
    return Network(latency, min(rate, 1e15), large_array.nbytes / max(copying, 1e-9))


def _median(comm: Communicator, buffer: np.ndarray[tuple[int], np.dtype[np.float32]]) -> float:
    times = []
    for _ in range(_TIMES + 1):
        comm.barrier()
        times.append(_timed(lambda: comm.allreduce(buffer)))
    told = np.zeros(comm.size)
    comm.allgather(np.array([statistics.median(times[1:])]), told)
    return float(told.max())


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
