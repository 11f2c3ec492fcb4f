"""Compression inside FSDP2: a reduce-scatter whose pieces travel compressed.

fully_shard(model)
ringlet.torch.compress_fsdp(model, "int8")
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter

from ringlet.compressors import Compressor, Context, NoCompression, Payload, Workspace
from ringlet.compressors.context import State
from ringlet.compressors.contract import storage
from ringlet.compressors.payload import padded
from ringlet.process_sets import InvalidArgument
from ringlet.ring.communicator import Communicator
from ringlet.ring.distributed import TorchCommunicator
from ringlet.ring.dtypes import Array
from ringlet.torch.compression import as_compressor


class CompressedReduceScatter(ReduceScatter):
    """One FSDP module's reduce-scatter: every rank's piece is compressed by who sends it.

    FSDP hands over one flat tensor, a piece for every rank; quantisation buckets start anew at each
    piece. Sums are formed in float32, in rank order. With error feedback a rank keeps a residual of
    the whole unsharded gradient: 4 bytes an element of the module. Needs a compressor of fixed
    size whose payloads are decoded to be summed (quantisers, casts, block_topk).
    """

    def __init__(self, compressor: Compressor, name: str) -> None:
        self.compressor, self.name = compressor, name
        self.states: dict[int, State] = {}  # by destination
        self._step = 0
        self._workspace = Workspace()
        self._comms: dict[Any, Communicator] = {}

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return memory for FSDP's inputs and outputs."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Overwrite ``output_tensor`` with this rank's piece of the sum, or average, over ranks."""
        average = op == dist.ReduceOp.AVG
        if not average and op != dist.ReduceOp.SUM:
            raise InvalidArgument(f"compressed reduce-scatter sums or averages; FSDP asks for {op}")
        comm = self._comms.get(group)
        if comm is None:
            comm = self._comms[group] = TorchCommunicator(group)
        total = self._reduce(comm, _float32(input_tensor))
        result = torch.from_numpy(total)
        output_tensor.copy_(result / comm.size if average else result)
        self._step += 1

    def _reduce(self, comm: Communicator, values: Array) -> Array:
        n = values.size // comm.size
        layout = [(p.name, storage(p.dtype), p.elements) for p in self.compressor.layout(n)]
        nbytes = sum(padded(dtype.itemsize * elements) for _, dtype, elements in layout)
        send = self._workspace.array("send", nbytes * comm.size, np.uint8)
        receive = self._workspace.array("receive", nbytes * comm.size, np.uint8)
        for rank in range(comm.size):
            payload = _views(send[rank * nbytes : (rank + 1) * nbytes], layout)
            context = self._context(rank, n, comm)
            self.compressor.encode_into(values[rank * n : (rank + 1) * n], payload, context)
        comm.alltoall(send, receive)
        pieces = np.split(receive, comm.size)
        total = self._workspace.array("total", n)
        context = self._context(comm.rank, n, comm)
        self.compressor.sum_into([_views(piece, layout) for piece in pieces], total, context)
        return total

    def _context(self, destination: int, n: int, comm: Communicator) -> Context:
        return Context(
            name=f"{self.name}.{destination}",
            shape=(n,),
            numel=n,
            state=self.states.setdefault(destination, {}),
            step=self._step,
            rank=comm.rank,
            size=comm.size,
            workspace=self._workspace,
        )


def compress_fsdp(module: torch.nn.Module, compression: Any) -> list[CompressedReduceScatter]:
    """Compress the gradients of every FSDP2 module inside ``module``; return what does it.

    ``compression`` is a spec or compressor of fixed size. Raises InvalidArgument where there is no
    FSDP module, or for a compressor whose payloads cannot be scattered: sparsifiers of variable
    size, low rank, shared scales.
    """
    compressor = as_compressor(compression)
    modules = [(n, m) for n, m in module.named_modules() if isinstance(m, FSDPModule)]
    if not modules:
        raise InvalidArgument("there is no FSDP2 module here; call fully_shard(model) first")
    traits = compressor.traits()
    if isinstance(compressor, NoCompression):
        return []
    if not traits.fixed_size or traits.combine == "rounds":
        raise InvalidArgument(
            f"{str(compressor)!r} cannot compress a reduce-scatter, whose pieces have a fixed size "
            "and one receiver each; use a quantiser, a cast or block_topk"
        )
    made = []
    for name, each in modules:
        made.append(CompressedReduceScatter(compressor, name or "root"))
        each.set_custom_reduce_scatter(made[-1])
    return made


def _float32(tensor: torch.Tensor) -> Array:
    if tensor.device.type != "cpu":
        raise InvalidArgument(
            f"gradients on {tensor.device}: FSDP2 is supported on the CPU only so far"
        )
    array: Array = tensor.detach().float().numpy()
    return array


def _views(buffer: Array, layout: list[tuple[str, Any, int]]) -> Payload:
    payload: Payload = {}
    start = 0
    for name, dtype, elements in layout:
        size = dtype.itemsize * elements
        payload[name] = buffer[start : start + size].view(dtype)
        start += padded(size)
    return payload
