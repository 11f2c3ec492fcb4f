"""What this installation can do: Horovod's build queries, answered truthfully."""

from __future__ import annotations

from importlib.util import find_spec

from ringlet.runtime import current


def mpi_built() -> bool:
    """Whether the transport "mpi" is installed."""
    return find_spec("mpi4py") is not None


def gloo_built() -> bool:
    """Whether the transport "gloo" is installed."""
    if find_spec("torch") is None:
        return False
    import torch.distributed

    return torch.distributed.is_available() and torch.distributed.is_gloo_available()


def mpi_enabled() -> bool:
    """Whether this job talks MPI."""
    return current().transport == "mpi"


def gloo_enabled() -> bool:
    """Whether this job talks gloo."""
    return current().transport == "gloo"


def mpi_threads_supported() -> bool:
    """Whether MPI may be called by several threads at once; ValueError without MPI."""
    if not mpi_enabled():
        raise ValueError("this job does not use MPI")
    from mpi4py import MPI

    return bool(MPI.Query_thread() == MPI.THREAD_MULTIPLE)


def nccl_built() -> int:
    """Return 0: tensors of a framework do not reach the transport "nccl" yet."""
    return 0


def cuda_built() -> bool:
    """Whether CUDA tensors can be reduced: not yet."""
    return False


def rocm_built() -> bool:
    """Whether ROCm tensors can be reduced: no."""
    return False


def ddl_built() -> bool:
    """Whether IBM's DDL is supported: no."""
    return False


def ccl_built() -> bool:
    """Whether Intel's oneCCL is supported: no."""
    return False
