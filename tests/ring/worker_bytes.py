"""What leaves a host: ``worker_bytes.py INTERFACE STORE RANK``, on hosts of two ranks each.

Ranks 0 and 1 are on one host. Rank 0 prints a line of JSON: the bytes that a host sent through its
interface, by what was done. "dealt" ranks alternate between hosts, as cards are dealt.
"""

import json
import runpy
import sys
from pathlib import Path

import numpy as np
from torch.distributed import FileStore, PrefixStore

from ringlet.ring import Topology
from ringlet.ring.collectives.compressed import allgather_reduce, encode, scatter_reduce
from ringlet.ring.transports.gloo import GlooCommunicator
from ringlet.ring.transports.hierarchical import HierarchicalCommunicator

N = 200_000  # float32; payloads of all ranks are fewer bytes than what gloo sends around a ring
TWO = runpy.run_path(str(Path(__file__).with_name("test_two_level.py")))
CODEC = TWO["Int8Codec"]


def main():
    interface, place, rank = sys.argv[1], sys.argv[2], int(sys.argv[3])
    store = FileStore(place, 4)
    counter = Path("/sys/class/net") / interface / "statistics" / "tx_bytes"

    def connect(name, own):
        return GlooCommunicator(PrefixStore(name, store), own, 4, timeout=60.0)

    block, dealt = connect("block", rank), connect("dealt", [0, 2, 1, 3][rank])
    levels = {
        "block": HierarchicalCommunicator(block, Topology.from_hosts(block.rank, "aabb")),
        "dealt": HierarchicalCommunicator(dealt, Topology.from_hosts(dealt.rank, "abab")),
    }

    def dense(comm):
        values = np.full(N, comm.rank + 1, np.float32)
        comm.allreduce(values)
        assert (values == 10).all()

    def compressed(comm, scatter):
        codec = CODEC(TWO["gradient"](comm.rank, N, 0), 4 if scatter else 1)
        encoded = encode(codec)
        if scatter:
            scatter_reduce(comm, codec, encoded)
        else:
            allgather_reduce(comm, codec, encoded, [encoded.nbytes] * 4)

    work = {}
    for name, two in levels.items():
        work[f"dense, flat, {name}"] = lambda two=two: dense(two.flat)
        work[f"dense, two levels, {name}"] = lambda two=two: dense(two)
    two = levels["block"]
    for name, scatter in (("scatter-reduce", True), ("all-gather", False)):
        work[f"{name}, flat"] = lambda scatter=scatter: compressed(block, scatter)
        work[f"{name}, two levels"] = lambda scatter=scatter: TWO["reduce"](two, N, 0, scatter)
    found = {}
    for name, run in work.items():
        run()  # whatever is connected or compiled on first use
        block.barrier()
        before = int(counter.read_text())
        block.barrier()
        run()
        block.barrier()
        sent = np.array([int(counter.read_text()) - before])
        block.barrier()
        everybody = np.empty(4, np.int64)
        block.allgather(sent, everybody)
        found[name] = int(everybody.max())
    if rank == 0:
        print(json.dumps(found))
    dealt.close()
    block.close()


if __name__ == "__main__":
    main()
