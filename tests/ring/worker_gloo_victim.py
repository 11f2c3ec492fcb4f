"""One rank of an endless gloo allreduce: ``worker_gloo_victim.py STORE RANK SIZE``.

Prints READY after the first one, and LOST when a peer went away.
"""

import sys

import numpy as np
from torch.distributed import FileStore

from ringlet.ring import PeerLost, RingError
from ringlet.ring.gloo import GlooCommunicator

rank, size = int(sys.argv[2]), int(sys.argv[3])
comm = GlooCommunicator(FileStore(sys.argv[1], size), rank, size, timeout=60.0, host="127.0.0.1")
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
