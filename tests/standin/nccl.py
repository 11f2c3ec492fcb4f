"""NCCL that is none: its calls on host memory, by ranks that are threads of one process."""

import ctypes
import threading

import numpy as np

from ringlet.ring.nccl import TYPES
from ringlet.ring.nccl_library import ID_BYTES, IN_PROGRESS

KINDS = {number: name for name, number in TYPES.items()}
UFUNCS = [np.add, np.multiply, np.maximum, np.minimum]


class World:
    """What the stand-ins of all ranks share."""

    def __init__(self, size):
        self.size, self.barrier, self.posts = (
            size,
            threading.Barrier(size, timeout=20),
            [None] * size,
        )


class StandIn:
    """NCCL's calls as ``nccl_library.Library`` offers them, for threads of one process.

    They have to be made on what ``stream`` returns.
    """

    def __init__(self, world, rank, stream):
        self.world, self.rank, self.stream = world, rank, stream
        self.calls, self.aborted, self.states, self.seen = [], 0, [], []

    def unique_id(self):
        return b"i" * ID_BYTES

    def init(self, size, unique_id, rank):
        assert (size, unique_id, rank) == (self.world.size, b"i" * ID_BYTES, self.rank)
        return IN_PROGRESS, 7

    def state(self, handle):
        assert handle == 7
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
            assert arguments[-2:] == (7, self.stream())
            self.calls.append((name, arguments[:-2]))
        return 0

    def run(self):
        """Exchange what was grouped: every rank posts its calls and reads the others'."""
        self.world.posts[self.rank] = [(n, a, memory(n, a, self.world.size)) for n, a in self.calls]
        self.world.barrier.wait()
        written = [self.effect(i, *call) for i, call in enumerate(self.calls)]
        self.world.barrier.wait()
        for address, data in filter(None, written):
            ctypes.memmove(address, data, len(data))
        self.world.barrier.wait()
        return 0

    def others(self, i):
        return [posts[i][2] for posts in self.world.posts]

    def effect(self, i, name, a):
        if name in ("AllReduce", "ReduceScatter", "Reduce"):
            dtype = np.dtype(KINDS[a[3]])
            total = UFUNCS[a[4]].reduce([np.frombuffer(d, dtype) for d in self.others(i)])
            if name == "AllReduce":
                return a[1], total.tobytes()
            if name == "ReduceScatter":
                return a[1], total[self.rank * a[2] :][: a[2]].tobytes()
            return (a[1], total.tobytes()) if a[5] == self.rank else None
        if name == "AllGather":
            return a[1], b"".join(self.others(i))
        if name == "Broadcast":
            return a[1], self.others(i)[a[4]]
        if name == "Recv":
            for called, b, data in self.world.posts[a[3]]:
                if called == "Send" and b[3] == self.rank:
                    assert len(data) == a[1]
                    return a[0], data
        return None


def memory(name, a, size):
    """Return the bytes that a call sends."""
    if name == "Recv":
        return b""
    if name == "Send":
        return ctypes.string_at(a[0], a[1])
    itemsize = np.dtype(KINDS[a[3]]).itemsize
    count = a[2]
    if name == "ReduceScatter":
        count *= size
    return ctypes.string_at(a[0], count * itemsize)
