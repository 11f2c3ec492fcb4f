"""Ringlet for JAX: collectives and an optax transformation, eager and in compiled programs.

```python
import ringlet.jax as hvd

hvd.init()
optimizer = optax.chain(hvd.reduce_gradients("topk(ratio=0.01) | ef"), optax.adam(1e-3))
```
"""

from typing import TYPE_CHECKING, NoReturn

from ringlet.job.requirements import need

need("jax", "ringlet.jax")
need("optax", "ringlet.jax")


from ringlet.horovod import common_names
from ringlet.horovod.common_names import *  # noqa: F403
from ringlet.horovod.other_names import no_such_name
from ringlet.jax import elastic
from ringlet.jax.carried_states import carry_over
from ringlet.jax.distributed import init
from ringlet.jax.functions import broadcast_pytree, replicas_equal
from ringlet.jax.gradient_transformation import reduce_gradients
from ringlet.jax.ops.movements import (
    allgather,
    alltoall,
    barrier,
    broadcast,
    grouped_allgather,
    join,
)
from ringlet.jax.ops.reducescatter import grouped_reducescatter, reducescatter
from ringlet.jax.ops.reductions import allreduce, grouped_allreduce
from ringlet.jax.reduction_state import ReduceGradientsState, residual_norm
from ringlet.jax.sharded.mesh_mean import sharded_mean, sharded_state
from ringlet.job.objects import allgather_object, broadcast_object

__all__ = [
    "ReduceGradientsState",
    "allgather",
    "allgather_object",
    "allreduce",
    "alltoall",
    "barrier",
    "broadcast",
    "broadcast_object",
    "broadcast_pytree",
    "carry_over",
    "elastic",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "join",
    "reduce_gradients",
    "reducescatter",
    "replicas_equal",
    "residual_norm",
    "sharded_mean",
    "sharded_state",
]
__all__ += [name for name in common_names.__all__ if name not in __all__]

if not TYPE_CHECKING:  # which would take any name for one that is there

    def __getattr__(name: str) -> NoReturn:
        raise no_such_name(__name__, name)
