"""Horovod's names that mean the same in every adapter: the job, its ranks, ops and errors."""

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
    sycl_built,
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
    "HorovodInternalError",
    "Max",
    "Min",
    "OutOfMemory",
    "ProcessSet",
    "Product",
    "ReduceOp",
    "StepAbandoned",
    "Sum",
    "add_process_set",
    "ccl_built",
    "cross_rank",
    "cross_size",
    "cuda_built",
    "ddl_built",
    "global_process_set",
    "gloo_built",
    "gloo_enabled",
    "init",
    "is_homogeneous",
    "is_initialized",
    "local_rank",
    "local_size",
    "mpi_built",
    "mpi_enabled",
    "mpi_threads_supported",
    "nccl_built",
    "rank",
    "remove_process_set",
    "reset_stats",
    "rocm_built",
    "shutdown",
    "size",
    "start_metrics",
    "start_timeline",
    "stats",
    "stop_timeline",
    "sycl_built",
    "timeline_span",
]
