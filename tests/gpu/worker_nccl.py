"""One rank of test_gpu_nccl.py: collectives over NCCL, all ranks on one GPU."""

import cupy
import numpy as np

from ringlet.ring import ReduceOp, Topology
from ringlet.ring.rendezvous.connect import connect
from ringlet.ring.transports.hierarchical import HierarchicalCommunicator


def on_gpu(values, dtype=np.float32):
    return cupy.asarray(np.asarray(values, dtype))


comm = connect("nccl")
rank, size = comm.rank, comm.size
assert comm.name == "nccl"

big = on_gpu(np.arange(100_000) % 7 + rank)
comm.allreduce(big)
comm.synchronize()
expected = (np.arange(100_000) % 7) * size + sum(range(size))
assert np.array_equal(big.get(), expected.astype(np.float32))

for dtype, op, want in (np.int64, ReduceOp.MAX, size - 1), (np.float16, ReduceOp.MIN, 0):
    some = on_gpu([rank] * 3, dtype)
    comm.allreduce(some, op)
    assert some.get().tolist() == [want] * 3, (dtype, op)
bf16 = cupy.asarray(np.full(4, 0x3F80, np.uint16))  # ones
comm.allreduce(bf16, dtype="bfloat16")
assert (bf16.get().astype(np.uint32) << 16).view(np.float32).tolist() == [float(size)] * 4

for counts in [4] * size, [r + 1 for r in range(size)], [0, *[3] * (size - 1)]:
    total, mine = sum(counts), on_gpu(np.zeros(counts[rank]))
    comm.reduce_scatter(on_gpu(np.arange(total) + rank), mine, counts)
    start = sum(counts[:rank])
    want = size * np.arange(start, start + counts[rank]) + sum(range(size))
    assert mine.get().tolist() == want.tolist(), counts
    whole = on_gpu(np.zeros(total))
    comm.allgather(mine, whole, counts)
    assert whole.get().tolist() == (size * np.arange(total) + sum(range(size))).tolist(), counts

out = on_gpu(np.zeros(size * (rank + 1)), np.uint8)
send = on_gpu([rank * 16 + r for r in range(size) for _ in range(r + 1)], np.uint8)
comm.alltoall(send, out, [r + 1 for r in range(size)], [rank + 1] * size)
assert out.get().tolist() == [s * 16 + rank for s in range(size) for _ in range(rank + 1)]

word = on_gpu([rank] * 5)
comm.broadcast(word, size - 1)
assert word.get().tolist() == [size - 1] * 5

half = comm.subset([0, size - 1])
if half is not None:
    pair = on_gpu([1])
    half.allreduce(pair)
    assert pair.get().tolist() == [2]
if size == 4:  # as if two were on each of two hosts
    two = HierarchicalCommunicator(comm, Topology.from_hosts(rank, "aabb"))
    for n in 100_000, 100_003:
        big = on_gpu(np.arange(n) % 7 + rank)
        two.allreduce(big)
        assert np.array_equal(big.get(), ((np.arange(n) % 7) * 4 + 6).astype(np.float32)), n
host = np.ones(3, np.float32)
comm.allreduce(host)
assert host.tolist() == [size] * 3
comm.barrier()
comm.close()
print(f"rank {rank} is done")
