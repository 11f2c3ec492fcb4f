"""Ranks with a GPU each, through a process group of torch's for NCCL.

For jobs that torch started, where torch's NCCL is there already. Arrays on the GPU become tensors
of the same memory, and collectives of torch's that are in order with CuPy's current stream; torch's
watchdog ends what takes longer than the group's timeout, and the process with it.
"""

from __future__ import annotations

import secrets
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from ringlet.ring.communicator import Communicator, ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.ring.errors import PeerLost
from ringlet.ring.transports.gpu import GpuCommunicator
from ringlet.ring.transports.process_group import import_torch

_SIGNED = {"uint32": "int32", "uint64": "int64"}  # torch's NCCL has no unsigned ones
_WRAPS = (ReduceOp.SUM, ReduceOp.PRODUCT)  # do not depend on the sign an integer is read with


class TorchNcclCommunicator(GpuCommunicator):
    """The ranks of ``host``, a communicator of the CPU, with ``group`` for what is on their GPUs.

    ``group`` is a ``torch.distributed`` process group, or backend, for NCCL, of the same ranks in
    the same order; None for one rank. Nothing else may use it meanwhile: the ranks' calls would
    not be in one order. ``close`` leaves it to its owner unless it is ``owned``, and only then does
    ``interrupt`` end what waits in it. ``device`` is the number of this rank's GPU.
    """

    name = "torch-nccl"

    def __init__(self, host: Communicator, group: Any, device: int, owned: bool = False) -> None:
        super().__init__(host, device)
        self._torch, self._dist = import_torch(self.name)
        self._group, self._owned = group, owned
        self._breakable()

    @classmethod
    def join(cls, host: Communicator, device: int) -> TorchNcclCommunicator:
        """Let the ranks of ``host`` have a group of their own, which meets at torch's store.

        Not by new_group, which all ranks of the default group would have to call. Collective.
        """
        _, dist = import_torch(cls.name)
        token = host.broadcast_bytes(secrets.token_hex(8).encode() if host.rank == 0 else None)
        group = None
        if host.size > 1:
            store = dist.distributed_c10d._get_default_store()
            store = dist.PrefixStore(f"ringlet-nccl/{token.decode()}", store)
            options = dist.ProcessGroupNCCL.Options()
            group = dist.ProcessGroupNCCL(store, host.rank, host.size, options)
        return cls(host, group, device, owned=True)

    def interrupt(self) -> None:
        """End what is under way because a rank was lost; for any thread."""
        where = f"NCCL of rank {self.origin[self.rank]}"
        self._error = self._error or PeerLost(f"{where} was ended: another rank was lost")
        self._abandon()

    def _gpu_allreduce(self, buffer: Array, kind: str, op: ReduceOp) -> None:
        if buffer.size:
            options = self._combining(self._dist.AllreduceOptions(), op)
            values = self._tensor(buffer, _readable(kind, op))
            self._run("allreduce", lambda group: group.allreduce([values], options))

    def _gpu_reduce_scatter(
        self, send: Array, receive: Array, counts: list[int], kind: str, op: ReduceOp
    ) -> None:
        options = self._combining(self._dist.ReduceScatterOptions(), op)
        kind = _readable(kind, op)
        source, target = self._tensor(send, kind), self._tensor(receive, kind)
        if len(set(counts)) == 1:
            self._run("reduce_scatter", lambda g: g._reduce_scatter_base(target, source, options))
            return
        pieces = _pieces(source, counts)
        self._run("reduce_scatter", lambda g: g.reduce_scatter([target], [pieces], options))

    def _gpu_allgather(self, send: Array, receive: Array, counts: list[int]) -> None:
        source, target = self._tensor(send), self._tensor(receive)
        if len(set(counts)) == 1:
            self._run("allgather", lambda group: group._allgather_base(target, source))
            return
        pieces = _pieces(target, [count * receive.itemsize for count in counts])
        self._run("allgather", lambda group: group.allgather([pieces], [source]))

    def _gpu_alltoall(
        self, send: Array, receive: Array, send_counts: list[int], receive_counts: list[int]
    ) -> None:
        source, target = self._tensor(send), self._tensor(receive)
        outgoing, incoming = (
            [count * send.itemsize for count in counts] for counts in (send_counts, receive_counts)
        )
        self._run("alltoall", lambda g: g.alltoall_base(target, source, incoming, outgoing))

    def _gpu_broadcast(self, buffer: Array, root: int) -> None:
        if buffer.size:
            options = self._dist.BroadcastOptions()
            options.rootRank = root
            values = self._tensor(buffer)
            self._run("broadcast", lambda group: group.broadcast([values], options))

    def _subset(self, ranks: list[int]) -> TorchNcclCommunicator | None:
        host = self._host.subset(ranks)
        return None if host is None else self.join(host, self._device)

    def _close(self) -> None:
        group, self._group = self._group, None
        if self._owned and group is not None:
            group.shutdown()
        self._host.close()

    # -- how calls are made ------------------------------------------------------------------------

    def _combining(self, options: Any, op: ReduceOp) -> Any:
        options.reduceOp = getattr(self._dist.ReduceOp, op.name)
        return options

    def _tensor(self, array: Array, kind: str = "uint8") -> Any:
        return _tensor(self._torch, array, self._device).view(getattr(self._torch, kind))

    def _run(self, what: str, start: Callable[[Any], Any]) -> None:
        """Enqueue a collective behind CuPy's current stream, and that stream behind it."""
        group = self._group
        self._usable()  # it may have been interrupted just now
        try:
            with _on_current_stream(self._torch, self._device):
                work = start(group)
                if work is not None:
                    work.wait()  # of torch's current stream, not of the host
        except RuntimeError as error:
            traceback.clear_frames(error.__traceback__)
            reason = str(error).strip().split("\n")[0]
            rank = self.origin[self.rank]
            text = f"NCCL {what} of torch's failed on rank {rank}: {reason}"
            self._error = self._error or PeerLost(text)
            self._abandon()
        self._usable()

    def _abandon(self) -> None:
        group, self._group = self._group, None
        if self._owned and group is not None:
            group.abort()


def _readable(kind: str, op: ReduceOp) -> str:
    """Return what torch reads elements as, with the same result; TypeError for what it cannot."""
    if kind not in _SIGNED:
        return kind
    if op not in _WRAPS:
        raise TypeError(f"torch's NCCL has no {op.name.title()} of {kind}")
    return _SIGNED[kind]


def _pieces(tensor: Any, sizes: Sequence[int]) -> list[Any]:
    return [tensor[start:stop] for start, stop in pairwise([0, *accumulate(sizes)])]


def _tensor(torch: Any, array: Array, device: int) -> Any:
    """Return an array's memory as a tensor of bytes, which keeps the array alive."""
    return torch.as_tensor(array.view(np.uint8), device=f"cuda:{device}")


@contextmanager
def _on_current_stream(torch: Any, device: int) -> Iterator[None]:
    """Make CuPy's current stream torch's as well."""
    import cupy

    pointer = int(cupy.cuda.get_current_stream().ptr)
    stream = (
        torch.cuda.ExternalStream(pointer, device=device)
        if pointer
        else torch.cuda.default_stream(device)  # of 0 torch makes a new one
    )
    with torch.cuda.stream(stream):
        yield
