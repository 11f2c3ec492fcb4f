"""A quick look at the network, to say what a step would have taken without compression."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from ringlet.ring.communicator import Communicator

SMALL, LARGE = 1 << 10, 1 << 20  # float32 elements
_TIMES = (5, 40)  # at least, and at most
_SECONDS = 0.25  # for each size; a slow network takes longer
_SLOW = (2, 1.0)  # times that do, once they took so many seconds together
_MOST = 0.9  # of all measurements, this share is no longer than the upper bound


class Pace(NamedTuple):
    """An uncompressed bucket takes ``latency_s + sent bytes / bytes_per_s``, and two copies."""

    latency_s: float
    bytes_per_s: float
    copied_bytes_per_s: float

    def seconds(self, sent: float, tensors: float) -> float:
        """Return the time of a bucket that sends ``sent`` bytes for ``tensors`` bytes."""
        copies = 2 * tensors / self.copied_bytes_per_s
        return self.latency_s + sent / self.bytes_per_s + copies


class Network(NamedTuple):
    """What uncompressed allreduces took on the ranks at hand: the least, and an upper bound.

    Each is a line through a small and a large one. Other programs on the machines make some take
    longer, and none shorter: the least is what the network does, and the bound what it may come to.
    """

    least: Pace
    upper: Pace

    def as_record(self) -> dict[str, Any]:
        """Return both as a record of metrics: the least by its fields' names."""
        return self.least._asdict() | {"upper": self.upper._asdict()}


def measure(comm: Communicator) -> Network:
    """Measure the network of ``comm``. Collective; the slowest rank counts, on every rank."""
    buffers = [np.zeros(elements, np.float32) for elements in (SMALL, LARGE)]
    small, large = (_bounds(comm, lambda b=b: comm.allreduce(b)) for b in buffers)  # type: ignore[misc]
    into = np.empty_like(buffers[1])
    copy = _bounds(comm, lambda: np.concatenate([buffers[1]], out=into))
    least, upper = (
        _pace(comm.size, *took, buffers[1].nbytes) for took in zip(small, large, copy, strict=True)
    )
    # A line through noise may fall below the other one.
    latency, rate, copied = zip(least, upper, strict=True)
    return Network(least, Pace(max(latency), min(rate), min(copied)))


def _pace(size: int, small: float, large: float, copying: float, copied: int) -> Pace:
    share = 2 * (size - 1) / size * 4
    per_element = max(1e-12, large - small) / (LARGE - SMALL)
    rate = share / per_element if size > 1 else float("inf")
    latency = max(0.0, small - SMALL * per_element)
    return Pace(latency, min(rate, 1e15), copied / max(copying, 1e-9))


def _bounds(comm: Communicator, call: Callable[[], object]) -> tuple[float, float]:
    """Return the least of many times that ``call`` took, and what nearly all do not exceed."""
    times: list[float] = []
    own, everybody = np.zeros(1), np.zeros(comm.size)
    _timed(call)  # the first one may connect
    comm.barrier()
    while (len(times) < _SLOW[0] or sum(times) < _SLOW[1]) and (
        len(times) < _TIMES[0] or (len(times) < _TIMES[1] and sum(times) < _SECONDS)
    ):
        own[0] = _timed(call)
        comm.allgather(own, everybody)  # all begin the next one together, and end after the same
        times.append(float(everybody.max()))
    times.sort()
    return times[0], times[int(_MOST * (len(times) - 1))]


def _timed(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start
