"""A rank whose partner's place somebody may take: ``worker_seized.py STORE RANK SIZE HOST``.

Does what a job of old did at its start: hands a secret on, and opens a pickle of another rank. Says
READY, goes on when it is told to, and says OPENED; or what went wrong. With a fifth argument it may
open only so many descriptors, unless it gets itself more.
"""

import os
import pickle
import resource
import sys

from torch.distributed import FileStore

from ringlet.ring import RingError
from ringlet.ring.transports.gloo import GlooCommunicator
from ringlet.ring.wire.keys import job_key

store, rank, size, host = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
if len(sys.argv) > 5:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[5]), hard))
key = job_key(os.environ)
try:
    comm = GlooCommunicator(FileStore(store, size), rank, size, timeout=60.0, host=host, key=key)
    comm.broadcast_bytes(b"the job's secret" if rank == 0 else None)
    said = comm.broadcast_bytes(pickle.dumps("hello") if rank == 1 else None, root=1)
    print("READY", flush=True)
    sys.stdin.readline()
    comm.barrier()
    print("OPENED", pickle.loads(said), flush=True)
    comm.close()
except RingError as error:
    print(type(error).__name__, error, flush=True)
