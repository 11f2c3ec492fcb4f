"""Ranks with a stand-in GPU each: threads of one process, and a transport that reads its memory."""

from functools import partial

from ringlet.fusion import Engine, Limits
from ringlet.fusion.devices.cuda import CudaPlace
from ringlet.ring.communicator import Topology
from ringlet.ring.control.opening import open_control
from ringlet.ring.transports.hierarchical import HierarchicalCommunicator
from ringlet.ring.transports.local import run_local
from standin.arrays import DeviceArray, array_module
from standin.streams import Gpu


class Framework:
    """Whose tensors they are; its default stream is ``gpu.train``."""

    def __init__(self, gpu):
        self.gpu = gpu

    def stream(self, device):
        stack = getattr(self.gpu.local, "stack", None)
        return (stack[-1] if stack else self.gpu.train).ptr

    def allocator(self):
        return None


class Enqueuing:
    """A communicator like NCCL's: arrays of the GPU on the current stream, and no siblings."""

    def __init__(self, inner):
        self.inner = inner
        self.moved = 0  # arrays of the GPU
        self.interrupted = False

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def interrupt(self):
        self.interrupted = True
        self.inner.interrupt()

    def sibling(self, number):
        return None

    def subset(self, ranks):
        found = self.inner.subset(ranks)
        return None if found is None else Enqueuing(found)

    def allreduce(self, buffer, *args, **options):
        self.inner.allreduce(self._touched(buffer, True), *args, **options)

    def broadcast(self, buffer, root=0):
        self.inner.broadcast(self._touched(buffer, True), root)

    def allgather(self, send, receive, *args):
        self._move(self.inner.allgather, send, receive, *args)

    def alltoall(self, send, receive, *args):
        self._move(self.inner.alltoall, send, receive, *args)

    def reduce_scatter(self, send, receive, *args):
        self._move(self.inner.reduce_scatter, send, receive, *args)

    def _move(self, collective, send, receive, *args):
        assert isinstance(send, DeviceArray) == isinstance(receive, DeviceArray)
        collective(self._touched(send, False), self._touched(receive, True), *args)

    def _touched(self, array, write):
        if not isinstance(array, DeviceArray):
            return array
        self.moved += 1
        array.memory.touch(write)
        return array.raw


def engine_on(gpu, comm, limits, module="standin", hosts=None):
    """Return an engine on ``comm``, a local one, whose tensors may lie on ``gpu``.

    There are two levels if ``hosts`` names the host of every rank.
    """
    place = CudaPlace(array_module(gpu, module), 0)
    place.adopt(lambda: Framework(gpu))
    control = partial(_open, comm)
    enqueuing = Enqueuing(comm)
    if hosts is not None:
        enqueuing = HierarchicalCommunicator(enqueuing, Topology.from_hosts(comm.rank, hosts))
    return Engine(enqueuing, control, limits, [place])


def _open(comm, _, handler):
    return open_control(comm, handler)


def on_ranks(size, body, module="standin", hosts=None, **limits):
    """Run ``body(engine, gpu)`` on ``size`` ranks with a GPU each; return the results by rank.

    ``module`` names the array module, by which compressors find kernels; ``hosts`` are as above.
    """

    def rank_main(comm):
        gpu = Gpu()
        engine = engine_on(gpu, comm, Limits(**limits), module, hosts)
        try:
            with gpu.train:
                return body(engine, gpu)
        finally:
            engine.shutdown()

    return run_local(rank_main, size)
