"""A rank that reduces until rank ``sys.argv[1]`` freezes; then it says what it learnt.

With ``idle`` it waits for messages instead of in a collective. With ``group`` it freezes with its
process group. With ``locked`` it holds the interpreter's lock for long instead, and all goes on. If
the rank is -1, none freezes.
"""

import ctypes
import faulthandler
import os
import signal
import sys
import threading

import numpy as np

from ringlet.ring.control.opening import open_control
from ringlet.ring.errors import LOST_PEER, PeerLost
from ringlet.ring.rendezvous.connect import connect


class Handler:
    """Broadcasts who was lost, and why."""

    def on_message(self, rank, message):
        return [message]

    def on_lost(self, rank, why=""):
        return [f"rank {rank} is gone: {why}".encode()]


# Where it hangs, before the test gives up: with the lock held, as tests/hang_watch.py says.
watch = threading.Timer(100, faulthandler.dump_traceback)
watch.daemon = True
watch.start()
victim, idle = int(sys.argv[1]), "idle" in sys.argv
comm = connect()
control = open_control(comm, Handler() if comm.rank == 0 else None)
values = np.ones(1 << 20, np.float32)
comm.allreduce(values)
comm.barrier()
if "locked" in sys.argv:
    if comm.rank == victim:
        print("locking", flush=True)
        ctypes.PyDLL(None).sleep(6)  # three times the limit
        control.send(b"all is well")
    if not idle:
        comm.allreduce(values)
    print(control.receive(60.0)[0].decode(), flush=True)
    comm.barrier()
    control.close()
    comm.close()
    sys.exit()
if comm.rank == victim:
    sys.stdout.write("freezing\n")
    sys.stdout.flush()
    os.kill(0 if "group" in sys.argv else os.getpid(), signal.SIGSTOP)
if victim < 0:
    print("reducing", flush=True)
try:
    if not idle:
        while True:
            comm.allreduce(values)
except PeerLost:
    pass  # which rank, only the control plane knows
try:
    told = control.receive(60.0)[0].decode()
except PeerLost as error:
    told = str(error)
sys.stdout.write(f"{told}\n")
sys.stdout.flush()
os._exit(LOST_PEER)
