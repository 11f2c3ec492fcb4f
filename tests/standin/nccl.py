"""NCCL that is none: its calls on host memory, by ranks that are threads of one process."""

import ctypes
import threading

import numpy as np

from ringlet.ring.transports.nccl import TYPES
from ringlet.ring.transports.nccl_library import ID_BYTES, IN_PROGRESS

KINDS = {number: name for name, number in TYPES.items()}
UFUNCS = [np.add, np.multiply, np.maximum, np.minimum]


class World:
    """What the stand-ins of all ranks share, and what each communicator's ranks do."""

    def __init__(self, size):
        self.size, self.posts = size, [None] * size
        self.barrier = threading.Barrier(size, timeout=20)
        self.lock, self.parts = threading.Lock(), {}  # by unique id


class StandIn:
    """NCCL's calls as ``nccl_library.Library`` offers them, for threads of one process.

    They have to be made on what ``stream`` returns.
    """

    def __init__(self, world, rank, stream):
        self.world, self.rank, self.stream = world, rank, stream
        self.calls, self.aborted, self.states, self.seen = [], 0, [], []
        self.joined = {}  # communicators and ranks in them, by handle

    def unique_id(self):
        with self.world.lock:
            made = b"%d" % len(self.world.parts)
            self.world.parts[made.ljust(ID_BYTES)] = None
        return made.ljust(ID_BYTES)

    def join(self, size, unique_id, rank):
        with self.world.lock:
            part = self.world.parts[unique_id] = self.world.parts[unique_id] or World(size)
        assert part.size == size
        handle = 7 + len(self.joined)
        self.joined[handle] = part, rank
        return IN_PROGRESS, handle

    def state(self, handle):
        assert handle in self.joined
        return self.states.pop(0) if self.states else 0

    def explain(self, code, handle):
        return f"code {code}"

    def call(self, name, *arguments):
        self.seen.append(name)
        if name == "GroupStart":
            self.calls = []
        elif name == "GroupEnd":
            return self.run()
        elif name == "CommAbort":
            self.aborted += 1
        elif not name.startswith("Comm"):
            assert arguments[-1] == self.stream()
            self.calls.append((name, arguments[:-2], arguments[-2]))
        return 0

    def run(self):
        """Exchange what was grouped: every rank posts its calls and reads the others'."""
        ((part, rank),) = {self.joined[handle] for _, _, handle in self.calls}
        part.posts[rank] = [(n, a, memory(n, a, part.size, rank)) for n, a, _ in self.calls]
        part.barrier.wait()
        written = [effect(part, rank, i, n, a) for i, (n, a, _) in enumerate(self.calls)]
        part.barrier.wait()
        for address, data in filter(None, written):
            ctypes.memmove(address, data, len(data))
        part.barrier.wait()
        return 0


def effect(part, rank, i, name, a):
    """Return what a rank's call number ``i`` writes, and where; None if it writes nothing."""
    said = [posts[i][2] for posts in part.posts] if name not in ("Send", "Recv") else []
    if name in ("AllReduce", "ReduceScatter", "Reduce"):
        dtype = np.dtype(KINDS[a[3]])
        total = UFUNCS[a[4]].reduce([np.frombuffer(d, dtype) for d in said])
        if name == "AllReduce":
            return a[1], total.tobytes()
        if name == "ReduceScatter":
            return a[1], total[rank * a[2] :][: a[2]].tobytes()
        return (a[1], total.tobytes()) if a[5] == rank else None
    if name == "AllGather":
        return a[1], b"".join(said)
    if name == "Broadcast":
        return a[1], said[a[4]]
    if name == "Recv":
        for called, b, data in part.posts[a[3]]:
            if called == "Send" and b[3] == rank:
                assert len(data) == a[1]
                return a[0], data
    return None


def memory(name, a, size, rank):
    """Return the bytes that a call sends."""
    if name == "Recv" or (name == "Broadcast" and a[4] != rank):
        return b""
    if name == "Send":
        return ctypes.string_at(a[0], a[1])
    itemsize = np.dtype(KINDS[a[3]]).itemsize
    count = a[2]
    if name == "ReduceScatter":
        count *= size
    return ctypes.string_at(a[0], count * itemsize)
