"""Sparse gradients: indices and values are gathered; whoever reads them adds up duplicates."""

from __future__ import annotations

import torch

from ringlet.job.process_sets import InvalidArgument, ProcessSet, global_process_set
from ringlet.ring.communicator import ReduceOp
from ringlet.shared.requests import SUMS, as_op
from ringlet.torch.ops.entry_points import public
from ringlet.torch.ops.handles import SparseHandle
from ringlet.torch.ops.movements import allgather_async


@public
def sparse_allreduce_async(
    tensor: torch.Tensor,
    name: str,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
) -> SparseHandle:
    """Start the sum or average of sparse COO tensors over all ranks.

    The handle, called or synchronised, returns an uncoalesced sparse tensor of the same shape.
    """
    if not (isinstance(tensor, torch.Tensor) and tensor.layout is torch.sparse_coo):
        raise InvalidArgument("sparse_allreduce_async needs a sparse COO tensor")
    op = as_op(op)
    if op not in SUMS:
        raise InvalidArgument(f"a sparse tensor can be summed or averaged, not {op!r}")
    compact = tensor.detach().coalesce()  # what one rank sends twice all ranks receive twice
    rows = compact.indices().t().contiguous()
    handles = [
        allgather_async(rows, f"{name}.indices", process_set),
        allgather_async(compact.values().contiguous(), f"{name}.values", process_set),
    ]

    def result(indices: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if op is ReduceOp.AVERAGE:
            values = values / process_set.size()
        return torch.sparse_coo_tensor(indices.t(), values, tensor.shape, check_invariants=False)

    return SparseHandle(handles, result)
