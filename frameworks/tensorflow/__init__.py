"""Ringlet for TensorFlow: Horovod's interface, with compressors, eager and in tf.function.

import ringlet.tensorflow as hvd

hvd.init()
with tf.GradientTape() as tape:
    loss = ...
tape = hvd.DistributedGradientTape(tape, compression="int8 | ef")
optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)
"""

from ringlet.shared.requirements import need

need("tensorflow", "ringlet.tensorflow")
need("keras", "ringlet.tensorflow")


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
from ringlet.keras.compression import Compression
from ringlet.keras.dtype_policy import set_precision
from ringlet.keras.layer_dtypes import apply_precision
from ringlet.keras.scaling import LossScaleOptimizer
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.errors import RingError as HorovodInternalError
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

Average = ReduceOp.AVERAGE
Sum = ReduceOp.SUM
Adasum = ReduceOp.ADASUM
Min = ReduceOp.MIN
Max = ReduceOp.MAX
Product = ReduceOp.PRODUCT

__all__ = [
    "Adasum",
    "Average",
    "BroadcastGlobalVariablesHook",
    "Compression",
    "CompressorState",
    "DistributedGradientTape",
    "DistributedOptimizer",
    "HorovodInternalError",
    "LossScaleOptimizer",
    "Max",
    "Min",
    "OutOfMemory",
    "PartialDistributedGradientTape",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "StepAbandoned",
    "Sum",
    "SyncBatchNormalization",
    "add_process_set",
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
    "ccl_built",
    "check_num_rank_power_of_2",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "gpu_available",
    "grouped_allgather",
    "grouped_allreduce",
    "grouped_reducescatter",
    "init",
    "is_homogeneous",
    "is_initialized",
    "join",
    "local_rank",
    "local_rank_op",
    "local_size",
    "local_size_op",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "num_rank_is_power_2",
    "process_set_included_op",
    "rank",
    "rank_op",
    "reducescatter",
    "remove_process_set",
    "replicas_equal",
    "reset_stats",
    "rocm_built",
    "set_precision",
    "shutdown",
    "size",
    "size_op",
    "start_metrics",
    "start_timeline",
    "stats",
    "stop_timeline",
    "timeline_span",
]
