"""One rank of an endless gloo allreduce: ``worker_gloo_victim.py STORE RANK SIZE``.

Prints READY after the first one, and LOST when a peer went away. Before that it adds float16 as
ranks on different hosts do.
"""

import sys

import numpy as np
from torch.distributed import FileStore

from ringlet.ring import PeerLost, ReduceOp, RingError
from ringlet.ring.gloo import GlooCommunicator

rank, size = int(sys.argv[2]), int(sys.argv[3])
comm = GlooCommunicator(FileStore(sys.argv[1], size), rank, size, timeout=60.0, host="127.0.0.1")
assert not comm.reduces(ReduceOp.SUM, "float16")
comm._spread = True
assert comm.reduces(ReduceOp.SUM, "float16")
halves = [np.random.default_rng(r).standard_normal(100_001).astype(np.float16) for r in range(size)]
total = halves[rank].copy()
comm.allreduce(total)
exact = np.sum(halves, axis=0, dtype=np.float64)
assert np.abs(total - exact).max() <= 2.0**-10 * np.abs(halves).max() * size
assert len(set(comm.allgather_bytes(total.tobytes()))) == 1, "ranks hold different sums"

buffer = np.zeros(1 << 20, np.float32)
comm.allreduce(buffer)
print("READY", flush=True)
try:
    while True:
        comm.allreduce(buffer)
except PeerLost:
    try:
        comm.barrier()
    except RingError:
        print("LOST", flush=True)
comm.close()
