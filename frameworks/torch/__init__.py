"""Ringlet for PyTorch: Horovod's interface, with compressors.

```python
import ringlet.torch as hvd

hvd.init()
optimizer = hvd.DistributedOptimizer(
    optimizer, named_parameters=model.named_parameters(), compression="int8 | ef"
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
```
"""

from typing import TYPE_CHECKING, NoReturn

from ringlet.job.requirements import need
from ringlet.ring.collector import paused

need("torch", "ringlet.torch")

with paused():
    from ringlet.horovod import common_names
    from ringlet.horovod.common_names import *  # noqa: F403
    from ringlet.horovod.other_names import no_such_name
    from ringlet.job.objects import allgather_object, broadcast_object
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
    from ringlet.torch.ops.replica_check import replicas_equal
    from ringlet.torch.ops.sparse_allreduce import sparse_allreduce_async
    from ringlet.torch.optimizer.wrapper import DistributedOptimizer
    from ringlet.torch.parallel.ddp import ddp_hook
    from ringlet.torch.parallel.fsdp import compress_fsdp
    from ringlet.torch.parallel.hsdp import compress_hsdp
    from ringlet.torch.recipes.diloco import DiLoCo
    from ringlet.torch.recipes.onebit_adam import OneBitAdam
    from ringlet.torch.sync_batch_norm import SyncBatchNorm

__all__ = [
    "Compression",
    "DiLoCo",
    "DistributedOptimizer",
    "OneBitAdam",
    "SyncBatchNorm",
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
    "compress_fsdp",
    "compress_hsdp",
    "ddp_hook",
    "elastic",
    "grouped_allgather",
    "grouped_allgather_async",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_allreduce_async",
    "grouped_allreduce_async_",
    "grouped_reducescatter",
    "grouped_reducescatter_async",
    "join",
    "poll",
    "reducescatter",
    "reducescatter_async",
    "replicas_equal",
    "sparse_allreduce_async",
    "synchronize",
]
__all__ += common_names.__all__

if not TYPE_CHECKING:  # which would take any name for one that is there

    def __getattr__(name: str) -> NoReturn:
        raise no_such_name(__name__, name)
