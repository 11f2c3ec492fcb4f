"""One rank of an endless gloo allreduce: ``worker_gloo_victim.py STORE RANK SIZE``.

Prints READY after the first one, and LOST when a peer went away. Before that it adds float16
and moves bytes as ranks on different hosts do.
"""

import sys

import numpy as np
from torch.distributed import FileStore

from ringlet.ring import PeerLost, ReduceOp, RingError
from ringlet.ring.transports.gloo import GlooCommunicator

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

counts = [700_001, 0, 300_000][:size]
pieces = [np.random.default_rng(9 + r).integers(0, 256, n, np.uint8) for r, n in enumerate(counts)]
for buffers in (1, 2):  # below and above what goes around the ring
    own, whole = np.tile(pieces[rank], buffers), np.zeros(buffers * sum(counts), np.uint8)
    comm.allgather(own, whole, [buffers * n for n in counts])
    np.testing.assert_array_equal(whole, np.concatenate([np.tile(p, buffers) for p in pieces]))
sends = [(1 + rank + to) * 150_000 for to in range(size)]
receives = [(1 + rank + source) * 150_000 for source in range(size)]
arrived = np.zeros(sum(receives), np.uint8)
comm.alltoall(
    np.repeat(np.arange(size, dtype=np.uint8) + 10 * rank, sends), arrived, sends, receives
)
np.testing.assert_array_equal(arrived, np.repeat(10 * np.arange(size) + rank, receives))

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
