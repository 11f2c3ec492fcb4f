"""Threads for kernels: a kernel that releases the GIL runs over ranges of a tensor at once.

Every kernel gives the same bits for any division into ranges, so the number of threads changes
nothing but the time. The pool is ours because Numba's default one aborts the process when two
threads enter it at once, which several in-process ranks would do.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager

# Handing a range to another thread costs tens of microseconds: what a kernel does with this many.
MIN_ELEMENTS = 1 << 18

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None
_threads = 0
_pid = 0


def threads() -> int:
    """Return how many threads a kernel uses: RINGLET_NUM_THREADS, else a rank's share of cores.

    Of these no more than OMP_NUM_THREADS, which says what the user, or torchrun, leaves a rank.
    """
    named = os.environ.get("RINGLET_NUM_THREADS", "")
    if named:
        if not named.isdigit() or int(named) < 1:
            raise ValueError(f"RINGLET_NUM_THREADS={named!r} is not a number of at least 1")
        return int(named)
    ranks = max(1, int(os.environ.get("RINGLET_LOCAL_SIZE", "1") or "1"))
    share = len(os.sched_getaffinity(0)) // ranks
    most = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()
    return max(1, min(share, int(most)) if most.isdigit() else share)


def run_ranges(n: int, granule: int, kernel: Callable[[int, int], None]) -> None:
    """Call ``kernel(start, stop)`` on ranges that cover 0 .. n and start at multiples of granule.

    Small tensors run as one range on the calling thread. The first exception is raised.
    """
    if n < 2 * MIN_ELEMENTS or (count := min(_size(), n // MIN_ELEMENTS)) < 2:
        kernel(0, n)
        return
    each = -(-n // (count * granule)) * granule
    ranges = [(start, min(start + each, n)) for start in range(0, n, each)]
    pool = _pool
    assert pool is not None
    futures = [pool.submit(kernel, start, stop) for start, stop in ranges[1:]]
    try:
        kernel(*ranges[0])
    finally:
        wait(futures)
    for future in futures:
        future.result()


@contextmanager
def limited(count: int) -> Iterator[None]:
    """Use ``count`` threads inside the with-block, whatever the machine has."""
    global _pool, _threads
    _size()
    before = _pool, _threads
    with ThreadPoolExecutor(max(1, count - 1), "ringlet-limited") as pool:
        _pool, _threads = pool, count
        try:
            yield
        finally:
            _pool, _threads = before


def _size() -> int:
    """Return the pool's size, starting it on first use and anew in a forked child."""
    global _pool, _threads, _pid
    if _pid != os.getpid():
        with _lock:
            if _pid != os.getpid():
                _threads = threads()
                _pool = ThreadPoolExecutor(max(1, _threads - 1), "ringlet-kernel")
                _pid = os.getpid()
    return _threads
