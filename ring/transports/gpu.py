"""Ranks with a GPU each: arrays on it go one way, arrays in host memory another.

What is on the GPU has ``__cuda_array_interface__`` and a NumPy dtype, such as CuPy's arrays. A
collective of those is enqueued on CuPy's current stream and returns at once; nothing is copied to
the host. All else goes to a communicator of the CPU.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ringlet.ring.communicator import Communicator, ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.ring.interrupt import remember

# Element types that GPUs reduce; others are only moved. Booleans are reduced as bytes.
REDUCED = (
    "int8", "uint8", "int32", "uint32", "int64", "uint64", "float16", "float32", "float64",
    "bfloat16",
)  # fmt: skip
_NOT_READY = 600  # cudaErrorNotReady


class GpuCommunicator(Communicator):
    """The ranks of ``host``, a communicator of the CPU, which this one owns from now on.

    ``device`` is the number of this rank's GPU. A transport implements what GPUs do, which is
    called with arrays that all lie there.
    """

    def __init__(self, host: Communicator, device: int) -> None:
        super().__init__(host.rank, host.size, host.origin)
        self._host, self._device = host, device

    @property
    def device(self) -> int:
        """The number of this rank's GPU."""
        return self._device

    def _breakable(self) -> None:
        """Let whoever finds that a rank is lost end what is under way here."""
        remember(self, _Breaker(self))

    def _allreduce(self, buffer: Array, op: ReduceOp, name: str) -> None:
        if not _on_device(buffer):
            self._host.allreduce(buffer, op, name)
            return
        self._gpu_allreduce(buffer, *_reduction(name, op))

    def _reduce_scatter(
        self, send: Array, receive: Array, counts: list[int], op: ReduceOp, name: str
    ) -> None:
        if not _on_device(send, receive):
            self._host.reduce_scatter(send, receive, counts, op, name)
            return
        kind, op = _reduction(name, op)
        if any(counts):
            self._gpu_reduce_scatter(send, receive, counts, kind, op)

    def _allgather(self, send: Array, receive: Array, counts: list[int]) -> None:
        if not _on_device(send, receive):
            self._host.allgather(send, receive, counts)
        elif any(counts):
            self._gpu_allgather(send, receive, counts)

    def _alltoall(
        self, send: Array, receive: Array, send_counts: list[int], receive_counts: list[int]
    ) -> None:
        if not _on_device(send, receive):
            self._host.alltoall(send, receive, send_counts, receive_counts)
            return
        self._gpu_alltoall(send, receive, send_counts, receive_counts)

    def _broadcast(self, buffer: Array, root: int) -> None:
        if not _on_device(buffer):
            self._host.broadcast(buffer, root)
            return
        self._gpu_broadcast(buffer, root)

    def _barrier(self) -> None:
        self._host.barrier()

    # What a transport implements.

    @abstractmethod
    def _gpu_allreduce(self, buffer: Array, kind: str, op: ReduceOp) -> None:
        """Combine in place, as elements of ``kind``, one of ``REDUCED``."""

    @abstractmethod
    def _gpu_reduce_scatter(
        self, send: Array, receive: Array, counts: list[int], kind: str, op: ReduceOp
    ) -> None:
        """Combine; keep this rank's piece. Not all ``counts`` are 0."""

    @abstractmethod
    def _gpu_allgather(self, send: Array, receive: Array, counts: list[int]) -> None:
        """Concatenate. Not all ``counts`` are 0."""

    @abstractmethod
    def _gpu_alltoall(
        self, send: Array, receive: Array, send_counts: list[int], receive_counts: list[int]
    ) -> None:
        """Exchange pieces."""

    @abstractmethod
    def _gpu_broadcast(self, buffer: Array, root: int) -> None:
        """Copy the buffer of rank ``root``."""


class _Breaker:
    """Interrupts a communicator without keeping it alive."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = weakref.ref(comm)

    def interrupt(self) -> None:
        """Interrupt it, if it is still there."""
        comm = self._comm()
        if comm is not None:
            comm.interrupt()


@contextmanager
def on_device(cuda: Any, device: int) -> Iterator[None]:
    """Make GPU ``device`` the calling thread's; ``cuda`` is CuPy's module of that name.

    A thread that has used no GPU so far stays there: to go back to GPU 0, as CuPy does, would make
    a context on it, of some hundred MB, in every rank of the host.
    """
    before = int(cuda.runtime.getDevice())
    if before == device:
        yield
        return
    fresh = not cuda.driver.ctxGetCurrent()
    cuda.runtime.setDevice(device)
    try:
        yield
    finally:
        if not fresh:
            cuda.runtime.setDevice(before)


def over(cuda: Any, event: Any) -> bool:
    """Whether an event is over, asked without waiting; ``cuda`` is CuPy's module of that name.

    Raises CuPy's error of a GPU that failed, where ``event.done`` stays False for ever.
    """
    code = cuda.runtime.eventQuery(event.ptr)
    if code not in (0, _NOT_READY):
        raise cuda.runtime.CUDARuntimeError(code)
    return bool(code == 0)


def reduced(dtype: str) -> bool:
    """Whether GPUs reduce elements of a dtype, by name."""
    return dtype in REDUCED or dtype == "bool"


def _on_device(*arrays: Array) -> bool:
    found = {hasattr(array, "__cuda_array_interface__") for array in arrays}
    if len(found) > 1:
        raise TypeError("send and receive are to lie both on the GPU, or neither")
    return found.pop()


def _reduction(name: str, op: ReduceOp) -> tuple[str, ReduceOp]:
    """Return the elements and the operation that stand for these."""
    if name == "bool":  # any is a maximum, all a minimum
        any_of = op in (ReduceOp.SUM, ReduceOp.MAX)
        return "uint8", ReduceOp.MAX if any_of else ReduceOp.MIN
    if not reduced(name):
        raise TypeError(f"NCCL does not reduce {name}; it reduces {', '.join(REDUCED)} and bool")
    return name, op
