"""Ringlet for PyTorch: Horovod's interface, with compressors.

import ringlet.torch as hvd

hvd.init()
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression="int8 | ef"
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
"""

from ringlet.shared.requirements import need

need("torch", "ringlet.torch")


from ringlet.fusion.errors import OutOfMemory, StepAbandoned
from ringlet.job.capabilities import (
    ccl_built,
    cuda_built,
    ddl_built,
    gloo_built,
    gloo_enabled,
    mpi_built,
    mpi_enabled,
    mpi_threads_supported,
    nccl_built,
    rocm_built,
)
from ringlet.job.lifecycle import init
from ringlet.job.objects import allgather_object, broadcast_object
from ringlet.job.observation import start_metrics, start_timeline, stop_timeline, timeline_span
from ringlet.job.process_sets import (
    ProcessSet,
    add_process_set,
    global_process_set,
    remove_process_set,
)
from ringlet.job.session import is_initialized, shutdown
from ringlet.job.topology import (
    cross_rank,
    cross_size,
    is_homogeneous,
    local_rank,
    local_size,
    rank,
    reset_stats,
    size,
    stats,
)
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.errors import RingError as HorovodInternalError
from ringlet.torch import elastic
from ringlet.torch.casting import apply_precision
from ringlet.torch.compression import Compression
from ringlet.torch.functions import broadcast_optimizer_state, broadcast_parameters
from ringlet.torch.ops.handles import poll, synchronize
from ringlet.torch.ops.movements import (
    allgather,
    allgather_async,
    alltoall,
    alltoall_async,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    grouped_allgather,
    grouped_allgather_async,
    join,
)
from ringlet.torch.ops.reducescatter import (
    grouped_reducescatter,
    grouped_reducescatter_async,
    reducescatter,
    reducescatter_async,
)
from ringlet.torch.ops.reductions import (
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_allreduce_async,
    grouped_allreduce_async_,
)
from ringlet.torch.ops.replicas import replicas_equal
from ringlet.torch.ops.sparse_allreduce import sparse_allreduce_async
from ringlet.torch.optimizer.wrapper import DistributedOptimizer
from ringlet.torch.parallel.ddp import ddp_hook
from ringlet.torch.parallel.fsdp import compress_fsdp
from ringlet.torch.parallel.hsdp import compress_hsdp
from ringlet.torch.recipes.diloco import DiLoCo
from ringlet.torch.recipes.onebit_adam import OneBitAdam
from ringlet.torch.sync_batch_norm import SyncBatchNorm

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

__all__ = [
    "Adasum",
    "Average",
    "Compression",
    "DiLoCo",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "OneBitAdam",
    "OutOfMemory",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "StepAbandoned",
    "Sum",
    "SyncBatchNorm",
    "add_process_set",
    "allgather",
    "allgather_async",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "alltoall",
    "alltoall_async",
    "apply_precision",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_object",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "ccl_built",
    "compress_fsdp",
    "compress_hsdp",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "ddp_hook",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "poll",
    "rank",
    "reducescatter",
    "reducescatter_async",
    "remove_process_set",
    "replicas_equal",
    "reset_stats",
    "rocm_built",
    "shutdown",
    "size",
    "sparse_allreduce_async",
    "start_metrics",
    "start_timeline",
    "stats",
    "stop_timeline",
    "synchronize",
    "timeline_span",
]
