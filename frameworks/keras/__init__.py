"""Ringlet for Keras 3 (TensorFlow, torch, JAX) and tf_keras: Horovod's names, with compressors.

```python
import ringlet.keras as hvd

hvd.init()
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(), compression="int8 | ef"), loss)
model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
```
"""

from typing import TYPE_CHECKING, NoReturn

from ringlet.job.requirements import need

need("keras", "ringlet.keras")


from ringlet.horovod import common_names
from ringlet.horovod.common_names import *  # noqa: F403
from ringlet.horovod.other_names import no_such_name
from ringlet.job.objects import allgather_object, broadcast_object
from ringlet.keras import callbacks, elastic
from ringlet.keras.checkpoint import (
    compressor_state,
    load_compressor_state,
    save_compressor_state,
    set_compressor_state,
)
from ringlet.keras.compression import Compression
from ringlet.keras.dtype_policy import set_precision
from ringlet.keras.layer_dtypes import apply_precision
from ringlet.keras.models import load_model
from ringlet.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from ringlet.keras.scaling import LossScaleOptimizer
from ringlet.keras.value_collectives import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    reducescatter,
)

__all__ = [
    "Compression",
    "DistributedOptimizer",
    "LossScaleOptimizer",
    "PartialDistributedOptimizer",
    "allgather",
    "allgather_object",
    "allreduce",
    "apply_precision",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "compressor_state",
    "elastic",
    "load_compressor_state",
    "load_model",
    "reducescatter",
    "save_compressor_state",
    "set_compressor_state",
    "set_precision",
]
__all__ += common_names.__all__

if not TYPE_CHECKING:  # which would take any name for one that is there

    def __getattr__(name: str) -> NoReturn:
        raise no_such_name(__name__, name)
