"""Ringlet for MXNet 1.9: Horovod's interface, with compressors.

```python
import ringlet.mxnet as hvd

hvd.init()
trainer = hvd.DistributedTrainer(net.collect_params(), "sgd", compression="int8 | ef")
hvd.broadcast_parameters(net.collect_params(), root_rank=0)
```
"""

from typing import TYPE_CHECKING, NoReturn

from ringlet.job.requirements import need
from ringlet.shared.removed_numpy_names import restore

restore()
need("mxnet", "ringlet.mxnet")


from ringlet.horovod import common_names
from ringlet.horovod.common_names import *  # noqa: F403
from ringlet.horovod.other_names import no_such_name
from ringlet.job.objects import allgather_object, broadcast_object
from ringlet.mxnet.collectives import (
    allgather,
    allreduce,
    allreduce_,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    grouped_allgather,
    grouped_allreduce,
    grouped_allreduce_,
    grouped_reducescatter,
    join,
    reducescatter,
)
from ringlet.mxnet.compression import Compression
from ringlet.mxnet.functions import broadcast_parameters, replicas_equal
from ringlet.mxnet.optimizer import DistributedOptimizer, DistributedTrainer

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "DistributedTrainer",
    "allgather",
    "allgather_object",
    "allreduce",
    "allreduce_",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_object",
    "broadcast_parameters",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_allreduce_",
    "grouped_reducescatter",
    "join",
    "reducescatter",
    "replicas_equal",
]
__all__ += common_names.__all__

if not TYPE_CHECKING:  # which would take any name for one that is there

    def __getattr__(name: str) -> NoReturn:
        raise no_such_name(__name__, name)
