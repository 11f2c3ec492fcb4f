"""Ranks of which one is killed in a phase of an exchange: three, or four on two levels.

    worker_killed.py FOLDER near|far|levels PHASE...

The ranks are forked, so that torch is imported once. Prints what each survivor raised.
"""

import os
import signal
import sys
import traceback
from pathlib import Path

import numpy as np
from torch.distributed import FileStore

from ringlet.compressors import parse
from ringlet.fusion import Engine, Limits, Request
from ringlet.fusion.planning import pieces
from ringlet.ring import RingError, Topology
from ringlet.ring.control.opening import open_control
from ringlet.ring.transports.gloo import GlooCommunicator
from ringlet.ring.transports.hierarchical import two_levels
from ringlet.ring.transports.process_group import ProcessGroupCommunicator

VICTIM, SPEC = 1, "int8 | ef"
HOSTS = {"near": "abc", "far": "abc", "levels": "aabb"}
PHASES = ("idle", "encode", "first collective", "sum", "second collective", "decode", "plain")


def doomed(original):
    """Return a method that ends the victim's process when the fifth step calls it."""
    calls = [0]

    def call(*args, **kwargs):
        calls[0] += 1
        if calls[0] > 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)

    return call


def prepare(phase, distance):
    """Let this process die in ``phase``."""
    compressor = type(parse(SPEC))
    plain = "_alltoall" if distance == "far" else "_allreduce"
    where = {
        "encode": (compressor, "encode_into"),
        "sum": (compressor, "sum_into"),
        "decode": (compressor, "decompress"),
        "first collective": (ProcessGroupCommunicator, "_alltoall"),
        "second collective": (ProcessGroupCommunicator, "_allgather"),
        "plain": (ProcessGroupCommunicator, plain),
    }[phase]
    setattr(*where, doomed(getattr(*where)))


def train(folder, phase, distance, rank):
    """Train until something is raised."""
    hosts = HOSTS[distance]
    store = FileStore(str(Path(folder) / phase.replace(" ", "-")), len(hosts))
    comm = GlooCommunicator(store, rank, len(hosts), timeout=60.0, host="127.0.0.1")
    if distance == "far":
        comm._nearest, comm._delay, comm._spread = 0.01, 0.01, True
    levels = two_levels(comm, Topology.from_hosts(rank, hosts))
    engine = Engine(levels, open_control, Limits(fusion_threshold=1 << 18))
    spec = "none" if phase == "plain" else SPEC
    n = 400_000
    group = engine.declare("g", [Request("w", shape=(n,), spec=spec)], [parse(spec)], [{}])
    x = np.ones(n, np.float32)
    try:
        for step in range(1000):
            if rank == VICTIM and step == 2:
                if phase == "idle":
                    os.kill(os.getpid(), signal.SIGKILL)
                prepare(phase, distance)
            group.submit("w", x)
            group.wait(60)
    except RingError as error:
        print(f"{phase}: rank {rank}: {type(error).__name__}: {error}", flush=True)
    engine.shutdown()
    levels.close()


def main():
    pieces.PIECE = 50_000
    distance = sys.argv[2]
    for phase in sys.argv[3:]:
        children = []
        for rank in range(len(HOSTS[distance])):
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    train(sys.argv[1], phase, distance, rank)
                    code = 0
                except BaseException:
                    traceback.print_exc()
                finally:
                    sys.stdout.flush()
                    os._exit(code)
            children.append(child)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        expected = [0] * len(codes)
        expected[VICTIM] = -signal.SIGKILL
        assert codes == expected, (phase, codes)


if __name__ == "__main__":
    main()
