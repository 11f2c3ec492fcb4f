"""Ranks with a GPU each, through NCCL.

NumPy arrays go to a communicator of the CPU, which also carries the unique id. With GPU arrays a
call returns once its work is in the stream, which orders it like a kernel; ``synchronize`` waits,
and is where a lost rank shows.

NCCL decides the order of additions; all ranks hold the same bits. What it does with NaN in minima
and maxima is its own.
"""

from __future__ import annotations

import os
import platform
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

from ringlet.ring.communicator import Communicator, ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.ring.errors import PeerLost, RingError, unavailable
from ringlet.ring.transports.gpu import GpuCommunicator, on_device, over
from ringlet.ring.transports.nccl_library import (
    IN_PROGRESS,
    REMOTE_ERROR,
    SUCCESS,
    Library,
    lacking,
    load,
)

TYPES = {
    "int8": 0, "uint8": 1, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5, "float16": 6,
    "float32": 7, "float64": 8, "bfloat16": 9,
}  # fmt: skip
OPS = {ReduceOp.SUM: 0, ReduceOp.PRODUCT: 1, ReduceOp.MAX: 2, ReduceOp.MIN: 3}
_BYTE = TYPES["uint8"]
_BOOT = Path("/proc/sys/kernel/random/boot_id")  # another one on every host
_SPIN = 200  # polls before sleeping in between


class NcclCommunicator(GpuCommunicator):
    """The ranks of ``host``, a communicator of the CPU, which this one owns from now on.

    ``device`` is the number of this rank's GPU (None: CuPy's current one). ``timeout`` (seconds)
    bounds bringing up, and ``synchronize``. Collective. Raises TransportUnavailable where NCCL,
    CuPy or a GPU is missing, PeerLost when the ranks do not meet.
    """

    name = "nccl"

    def __init__(
        self, host: Communicator, device: int | None = None, timeout: float = 300.0
    ) -> None:
        self._library, self._cupy = _requirements()
        gpu = self._cupy.cuda.runtime.getDevice() if device is None else device
        super().__init__(host, int(gpu))
        self._timeout, self._handle = timeout, 0
        self._lock = threading.Lock()  # nobody uses a handle while it is aborted
        if self.size > 1:
            self._join()
            self._breakable()

    def interrupt(self) -> None:
        """End what is under way because a rank was lost; for any thread."""
        if self._handle:
            where = f"NCCL of rank {self.origin[self.rank]}"
            self._abandon(PeerLost(f"{where} was ended: another rank was lost"))

    def synchronize(self) -> None:
        """Wait for what is in CuPy's current stream; PeerLost if it does not end in time.

        Raises RingError where the GPU failed.
        """
        self._usable()
        with on_device(self._cupy.cuda, self._device):
            done = self._cupy.cuda.Event(disable_timing=True)
            done.record(self._cupy.cuda.get_current_stream())
            self._poll("synchronize", lambda: self._reached(done))

    # -- collectives -----------------------------------------------------------------------------

    def _gpu_allreduce(self, buffer: Array, kind: str, op: ReduceOp) -> None:
        place = _address(buffer)
        self._run("AllReduce", [(place, place, buffer.size, TYPES[kind], OPS[op])])

    def _gpu_reduce_scatter(
        self, send: Array, receive: Array, counts: list[int], kind: str, op: ReduceOp
    ) -> None:
        source, target, how = _address(send), _address(receive), (TYPES[kind], OPS[op])
        if len(set(counts)) == 1:
            self._run("ReduceScatter", [(source, target, receive.size, *how)])
            return
        places = _places(source, counts, send.itemsize)
        calls = [(places[r], target, counts[r], *how, r) for r in range(self.size)]
        self._run("Reduce", [call for call in calls if call[2]])

    def _gpu_allgather(self, send: Array, receive: Array, counts: list[int]) -> None:
        source, target = _address(send), _address(receive)
        if len(set(counts)) == 1:
            self._run("AllGather", [(source, target, send.nbytes, _BYTE)])
            return
        places = _places(target, counts, receive.itemsize)
        sizes = [count * receive.itemsize for count in counts]
        calls = [(source, places[r], sizes[r], _BYTE, r) for r in range(self.size)]
        self._run("Broadcast", [call for call in calls if call[2]])

    def _gpu_alltoall(
        self, send: Array, receive: Array, send_counts: list[int], receive_counts: list[int]
    ) -> None:
        calls: list[tuple[str, tuple[int, ...]]] = []
        sides = ("Send", send, send_counts), ("Recv", receive, receive_counts)
        for name, array, counts in sides:
            places = _places(_address(array), counts, array.itemsize)
            calls += [
                (name, (places[r], counts[r] * array.itemsize, _BYTE, r))
                for r in range(self.size)
                if counts[r]
            ]
        self._group("alltoall", calls)

    def _gpu_broadcast(self, buffer: Array, root: int) -> None:
        place = _address(buffer)
        self._run("Broadcast", [(place, place, buffer.nbytes, _BYTE, root)])

    def _subset(self, ranks: list[int]) -> NcclCommunicator | None:
        host = self._host.subset(ranks)
        return None if host is None else NcclCommunicator(host, self._device, self._timeout)

    def _close(self) -> None:
        with self._lock:
            handle, self._handle = self._handle, 0
        if handle:
            with on_device(self._cupy.cuda, self._device):
                code = self._library.call("CommFinalize", handle)
                if code == IN_PROGRESS:
                    code = self._settled(handle)
                # To destroy what has not settled would wait for its kernels, maybe for ever.
                self._library.call("CommDestroy" if code == SUCCESS else "CommAbort", handle)
        self._host.close()

    # -- how calls are made ------------------------------------------------------------------------

    def _join(self) -> None:
        """Meet the other ranks by an id that travels over the CPU's communicator."""
        self._refuse_shared_gpus()
        made, problem = b"", b""
        if self.rank == 0:
            try:
                made = self._library.unique_id()
            except OSError as error:  # the others must learn of it, or they would wait
                problem = str(error).encode()
        made = self._host.broadcast_bytes(made)
        problem = self._host.broadcast_bytes(problem)
        if problem:
            raise unavailable("nccl", problem.decode(), "Name one in NCCL_SOCKET_IFNAME.")
        with on_device(self._cupy.cuda, self._device):
            code, self._handle = self._library.join(self.size, made, self.rank)
            self._finish("joining", code)

    def _refuse_shared_gpus(self) -> None:
        """Raise TransportUnavailable, on all ranks, where two of them have one GPU."""
        first: dict[bytes, int] = {}
        for rank, gpu in enumerate(self._host.allgather_bytes(self._gpu_of_host())):
            if gpu in first:
                both = f"{self.origin[first[gpu]]} and {self.origin[rank]}"
                name = gpu.split()[0].decode(errors="replace")
                raise unavailable(
                    "nccl",
                    f"ranks {both} share a GPU of host {name}, and NCCL takes one rank for each",
                    "Start no more ranks on a host than it has GPUs, or use 'gloo'.",
                )
            if gpu:
                first[gpu] = rank

    def _gpu_of_host(self) -> bytes:
        """Return what tells this rank's GPU from others; nothing where NCCL was told to share."""
        if os.environ.get("NCCL_MULTI_RANK_GPU_ENABLE") == "1":
            return b""
        host = os.environ.get("NCCL_HOSTID")
        if host is None:
            with suppress(OSError):
                host = _BOOT.read_text().strip()  # names are not always of one host
        bus = self._cupy.cuda.runtime.deviceGetPCIBusId(self._device)
        return f"{platform.node()} {host} {bus}".encode()

    def _run(self, name: str, calls: Sequence[tuple[int, ...]]) -> None:
        """Make one call, or several as a group."""
        self._group(name, [(name, call) for call in calls])

    def _group(self, what: str, calls: Sequence[tuple[str, tuple[int, ...]]]) -> None:
        if not calls:
            return
        with on_device(self._cupy.cuda, self._device):
            stream = int(self._cupy.cuda.get_current_stream().ptr)
            with self._lock:
                self._usable()  # it may have been interrupted just now
                code = self._library.call("GroupStart")
                made = [self._library.call(n, *call, self._handle, stream) for n, call in calls]
                closed = self._library.call("GroupEnd")
            wrong = [c for c in (code, *made) if c not in (SUCCESS, IN_PROGRESS)]
            self._finish(what, wrong[0] if wrong else closed)

    def _finish(self, what: str, code: int) -> None:
        """Wait until NCCL has taken a call over: not until the GPU has done it."""
        if code == IN_PROGRESS:
            self._poll(what, self._state)
        elif code != SUCCESS:
            self._fail(what, code)

    def _poll(self, what: str, state: Callable[[], int]) -> None:
        end, polls = time.monotonic() + self._timeout, 0
        while (code := state()) == IN_PROGRESS:
            broken = self._state()
            if broken not in (SUCCESS, IN_PROGRESS):
                self._fail(what, broken)
            if time.monotonic() > end:
                text = f"rank {self.origin[self.rank]}: {what} over NCCL did not end within"
                self._abort(PeerLost(f"{text} {self._timeout:g} s"))
            polls += 1
            if polls > _SPIN:
                time.sleep(0.001)
        if code != SUCCESS:
            self._fail(what, code)

    def _state(self) -> int:
        with self._lock:
            self._usable()
            return self._library.state(self._handle) if self._handle else SUCCESS

    def _reached(self, event: Any) -> int:
        try:
            return SUCCESS if over(self._cupy.cuda, event) else IN_PROGRESS
        except self._cupy.cuda.runtime.CUDARuntimeError as error:
            where = f"GPU {self._device} of rank {self.origin[self.rank]}"
            self._abort(RingError(f"{where} failed: {error}; start the job anew"))

    def _settled(self, handle: int) -> int:
        """Wait a moment for a communicator that is being finalised; return its state."""
        end = time.monotonic() + min(self._timeout, 10.0)
        while (code := self._library.state(handle)) == IN_PROGRESS and time.monotonic() < end:
            time.sleep(0.001)
        return code

    def _fail(self, what: str, code: int) -> None:
        said = self._library.explain(code, self._handle)
        kind = PeerLost if code == REMOTE_ERROR else RingError
        self._abort(kind(f"NCCL {what} failed on rank {self.origin[self.rank]}: {said}"))

    def _abort(self, error: RingError) -> NoReturn:
        """End what is under way, so that the GPU does not wait forever, and raise."""
        self._abandon(error)
        raise error

    def _abandon(self, error: RingError) -> None:
        """End what is under way; who is told of ``error`` finds it ended."""
        with self._lock:
            self._error = self._error or error
            handle, self._handle = self._handle, 0
            if handle:
                self._library.call("CommAbort", handle)


def _requirements() -> tuple[Library, Any]:
    missing = lacking()
    if missing is not None:
        raise unavailable("nccl", missing.why, missing.remedy)
    import cupy

    library = load()
    assert library is not None
    return library, cupy


def _address(array: Array) -> int:
    return int(array.__cuda_array_interface__["data"][0])  # type: ignore[attr-defined]


def _places(start: int, counts: Sequence[int], itemsize: int) -> list[int]:
    """Return where each rank's piece begins."""
    return [start + before * itemsize for before in accumulate([0, *counts])]
