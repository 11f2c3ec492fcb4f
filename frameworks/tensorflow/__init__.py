"""Ringlet for TensorFlow: Horovod's interface, with compressors, eager and in tf.function.

```python
import ringlet.tensorflow as hvd

hvd.init()
with tf.GradientTape() as tape:
    loss = ...
tape = hvd.DistributedGradientTape(tape, compression="int8 | ef")
optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
```
"""

from typing import TYPE_CHECKING, NoReturn

from ringlet.job.requirements import need

need("tensorflow", "ringlet.tensorflow")
need("keras", "ringlet.tensorflow")


from ringlet.horovod import common_names
from ringlet.horovod.common_names import *  # noqa: F403
from ringlet.horovod.other_names import no_such_name
from ringlet.keras.compression import Compression
from ringlet.keras.dtype_policy import set_precision
from ringlet.keras.layer_dtypes import apply_precision
from ringlet.keras.scaling import LossScaleOptimizer
from ringlet.tensorflow import elastic
from ringlet.tensorflow.checkpoint import CompressorState
from ringlet.tensorflow.functions import (
    BroadcastGlobalVariablesHook,
    allgather_object,
    broadcast_global_variables,
    broadcast_object,
    broadcast_object_fn,
    broadcast_variables,
    replicas_equal,
)
from ringlet.tensorflow.ops.movements import (
    allgather,
    alltoall,
    barrier,
    broadcast,
    broadcast_,
    grouped_allgather,
    join,
)
from ringlet.tensorflow.ops.reducescatter import grouped_reducescatter, reducescatter
from ringlet.tensorflow.ops.reductions import allreduce, grouped_allreduce
from ringlet.tensorflow.ops.topology_ops import (
    check_num_rank_power_of_2,
    gpu_available,
    local_rank_op,
    local_size_op,
    num_rank_is_power_2,
    process_set_included_op,
    rank_op,
    size_op,
)
from ringlet.tensorflow.optimizer import DistributedOptimizer
from ringlet.tensorflow.sync_batch_norm import SyncBatchNormalization
from ringlet.tensorflow.tape import DistributedGradientTape, PartialDistributedGradientTape
from ringlet.tensorflow.util import _executing_eagerly as _executing_eagerly

__all__ = [
    "BroadcastGlobalVariablesHook",
    "Compression",
    "CompressorState",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "LossScaleOptimizer",
    "PartialDistributedGradientTape",
    "SyncBatchNormalization",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "apply_precision",
    "barrier",
    "broadcast",
    "broadcast_",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_object_fn",
    "broadcast_variables",
    "check_num_rank_power_of_2",
    "elastic",
    "gpu_available",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "join",
    "local_rank_op",
    "local_size_op",
    "num_rank_is_power_2",
    "process_set_included_op",
    "rank_op",
    "reducescatter",
    "replicas_equal",
    "set_precision",
    "size_op",
]
__all__ += common_names.__all__

if not TYPE_CHECKING:  # which would take any name for one that is there

    def __getattr__(name: str) -> NoReturn:
        raise no_such_name(__name__, name)
