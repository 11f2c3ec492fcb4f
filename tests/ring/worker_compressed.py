"""Compressed collectives between real processes: ``worker_compressed.py mpi``, or ``... gloo STORE
RANK SIZE DISTANCE``. Rank 0 prints DONE once every rank has the bits that threads of one process
get.
"""

import hashlib
import runpy
import sys
from pathlib import Path

import numpy as np

from ringlet.ring import ProtocolError, Topology
from ringlet.ring.collectives.compressed import AllgatherReduce, ScatterReduce, encode
from ringlet.ring.transports.hierarchical import HierarchicalCommunicator
from ringlet.ring.transports.local import run_local

TWO = runpy.run_path(str(Path(__file__).with_name("test_two_level.py")))
CODEC = runpy.run_path(str(Path(__file__).with_name("test_compressed.py")))
SIZES = (0, 1, 1000, 400_001, 2_200_000, 17)


def play(comm):
    """Return a digest of many exchanges, in a pipeline and over two levels."""
    gradient, codec_of = CODEC["gradient"], CODEC["Int8Codec"]
    siblings, digest = CODEC["siblings"](comm), hashlib.sha256()
    for repeat in range(2):  # each size by either collective
        codecs, exchanges = [], []
        for i, n in enumerate(SIZES):
            scatter = (i + repeat) % 2 == 0
            codec = codec_of(gradient(comm.rank, n, i), comm.size if scatter else 1)
            encoded = encode(codec)
            if scatter:
                exchanges.append(ScatterReduce(comm, codec, encoded, plan=7, siblings=siblings))
            else:
                sizes = [encoded.nbytes] * comm.size
                exchanges.append(
                    AllgatherReduce(comm, codec, encoded, sizes, plan=7, siblings=siblings)
                )
            codecs.append(codec)
        CODEC["run_pipelined"](exchanges, overlapping=bool(siblings))
        for codec in codecs:
            digest.update(codec.output.tobytes())
    if comm.size == 4:
        two = HierarchicalCommunicator(comm, Topology.from_hosts(comm.rank, "aabb"))
        total = np.arange(100_000, dtype=np.int64)
        two.allreduce(total)
        np.testing.assert_array_equal(total, 4 * np.arange(100_000))
        for n in (1, 1001, 400_001):
            for scatter in (True, False):
                digest.update(TWO["reduce"](two, n, n, scatter)[0].tobytes())
        tasks = [(n, i % 2 == 0, 1 if i == 4 else None) for i, n in enumerate(SIZES)]
        for result in TWO["pipelined"](two, tasks, 0, TWO["FailsToEncode"], bool(siblings)):
            digest.update(result if isinstance(result, bytes) else result.encode())
        try:
            codec = TWO["FailsToEncode"] if comm.rank == 2 else codec_of
            TWO["reduce"](two, 1000, 0, True, codec=codec)
        except ProtocolError as error:
            digest.update(str(error).encode())
        two.allreduce(total)  # it still serves
        digest.update(total.tobytes())
    return digest.digest()


def main():
    if sys.argv[1] == "mpi":
        from ringlet.ring.transports.mpi import MpiCommunicator

        comm = MpiCommunicator()
    else:
        from torch.distributed import FileStore

        from ringlet.ring.transports.gloo import GlooCommunicator

        rank, size = int(sys.argv[3]), int(sys.argv[4])
        store = FileStore(sys.argv[2], size)
        comm = GlooCommunicator(store, rank, size, timeout=60.0, host="127.0.0.1")
        if sys.argv[5] == "all far":
            comm._nearest, comm._delay, comm._spread = 0.01, 0.01, True
    found = set(comm.allgather_bytes(play(comm)))
    if comm.rank == 0:
        assert found == set(run_local(play, comm.size)), "other bits than between threads"
        print("DONE")
    comm.close()


if __name__ == "__main__":
    main()
