"""Ringlet for PyTorch: Horovod's interface, with compressors.

import ringlet.torch as hvd

hvd.init()
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression="int8 | ef"
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
"""

from ringlet.ring.communicator import ReduceOp
from ringlet.ring.errors import RingError as HorovodInternalError
from ringlet.runtime import init, is_initialized, shutdown
from ringlet.torch.compression import Compression
from ringlet.torch.diloco import DiLoCo
from ringlet.torch.functions import broadcast_optimizer_state, broadcast_parameters
from ringlet.torch.onebit_adam import OneBitAdam
from ringlet.torch.ops import (
    allgather,
    allgather_async,
    allreduce,
    allreduce_,
    allreduce_async,
    allreduce_async_,
    barrier,
    broadcast,
    broadcast_,
    broadcast_async,
    broadcast_async_,
    poll,
    synchronize,
)
from ringlet.torch.optimizer import DistributedOptimizer
from ringlet.torch.replicas import replicas_equal
from ringlet.torch.topology import (
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

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

__all__ = [
    "Average",
    "Compression",
    "DiLoCo",
    "DistributedOptimizer",
    "HorovodInternalError",
    "Max",
    "Min",
    "OneBitAdam",
    "Product",
    "ReduceOp",
    "Sum",
    "allgather",
    "allgather_async",
    "allreduce",
    "allreduce_",
    "allreduce_async",
    "allreduce_async_",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_async",
    "broadcast_async_",
    "broadcast_optimizer_state",
    "broadcast_parameters",
    "cross_rank",
    "cross_size",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "poll",
    "rank",
    "replicas_equal",
    "reset_stats",
    "shutdown",
    "size",
    "stats",
    "synchronize",
]
