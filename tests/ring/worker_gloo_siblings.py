"""One rank whose threads add at the same time: ``worker_gloo_siblings.py STORE RANK SIZE HOSTS``.

Each thread has a sibling of one communicator, of two levels if there are several hosts. No two
ranks begin what they add in the same order.
"""

import sys
import threading

import numpy as np
from torch.distributed import FileStore

from ringlet.ring import Topology
from ringlet.ring.transports.gloo import GlooCommunicator
from ringlet.ring.transports.hierarchical import two_levels

THREADS, SUMS = 4, 40

rank, size, hosts = map(int, sys.argv[2:])
comm = GlooCommunicator(FileStore(sys.argv[1], size), rank, size, timeout=60.0, host="127.0.0.1")
comm = two_levels(
    comm, Topology.from_hosts(rank, [f"host{r * hosts // size}" for r in range(size)])
)
lanes = [comm, *(comm.sibling(number) for number in range(1, THREADS))]
failures = []


def add(number):
    sizes = np.random.default_rng(number).integers(1, 200_000, SUMS)
    try:
        for i, n in enumerate(sizes):
            values = np.full(n, rank + number + i, np.float32)
            lanes[number].allreduce(values)
            wanted = size * (number + i) + size * (size - 1) / 2
            assert (values == wanted).all(), f"thread {number}, sum {i}: {values[0]}, not {wanted}"
    except BaseException as error:
        failures.append(error)


order = np.random.default_rng(rank).permutation(THREADS)
threads = [threading.Thread(target=add, args=(int(number),)) for number in order]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
if failures:
    raise failures[0]
comm.barrier()
comm.close()
print("ADDED", flush=True)
