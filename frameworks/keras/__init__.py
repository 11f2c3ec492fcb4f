"""Ringlet for Keras 3, on its TensorFlow and torch backends: Horovod's interface, with compressors.

import ringlet.keras as hvd

hvd.init()
model.compile(hvd.DistributedOptimizer(keras.optimizers.Adam(), compression="int8 | ef"), loss)
model.fit(..., callbacks=[hvd.callbacks.BroadcastGlobalVariablesCallback(0)])
"""

from ringlet.shared.requirements import need

need("keras", "ringlet.keras")


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
from ringlet.keras import callbacks, elastic
from ringlet.keras.checkpoint import (
    compressor_state,
    load_compressor_state,
    save_compressor_state,
    set_compressor_state,
)
from ringlet.keras.compression import Compression
from ringlet.keras.dtype_policy import set_precision
from ringlet.keras.functions import (
    allgather,
    allreduce,
    broadcast,
    broadcast_global_variables,
    broadcast_variables,
    reducescatter,
)
from ringlet.keras.layer_dtypes import apply_precision
from ringlet.keras.models import load_model
from ringlet.keras.optimizer import DistributedOptimizer, PartialDistributedOptimizer
from ringlet.keras.scaling import LossScaleOptimizer
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.errors import RingError as HorovodInternalError

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
    "DistributedOptimizer",
    "HorovodInternalError",
    "LossScaleOptimizer",
    "Max",
    "Min",
    "OutOfMemory",
    "PartialDistributedOptimizer",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "StepAbandoned",
    "Sum",
    "add_process_set",
    "allgather",
    "allgather_object",
    "allreduce",
    "apply_precision",
    "broadcast",
    "broadcast_global_variables",
    "broadcast_object",
    "broadcast_variables",
    "callbacks",
    "ccl_built",
    "compressor_state",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "elastic",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "load_compressor_state",
    "load_model",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "reducescatter",
    "remove_process_set",
    "reset_stats",
    "rocm_built",
    "save_compressor_state",
    "set_compressor_state",
    "set_precision",
    "shutdown",
    "size",
    "start_metrics",
    "start_timeline",
    "stats",
    "stop_timeline",
    "timeline_span",
]
