"""What this installation can do: Horovod's build queries, answered truthfully."""

from __future__ import annotations

import os
from importlib.util import find_spec

from ringlet.job.session import current
from ringlet.job.settings import wishes_from
from ringlet.ring.transports.nccl_library import lacking, load


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
    """Return NCCL's version as a number, such as 22403; 0 where the transport "nccl" lacks a part.

    A GPU is none of them: this is about what is installed.
    """
    library = load()
    return 0 if library is None or lacking(gpu=False) is not None else library.version()


def cuda_built() -> bool:
    """Whether what reduces CUDA tensors on the GPU is installed; otherwise the host does it."""
    return nccl_built() > 0


def gpu_path() -> str:
    """Say how tensors on a GPU travel from this machine."""
    staged, over = "through host memory", "directly over transport nccl"
    try:
        wishes = wishes_from(os.environ)
    except ValueError as error:  # what diagnoses has to tell of it, and not to fail
        return f"unknown: {error}"
    if "staged" in wishes:
        return f"{staged}: RINGLET_STAGED asks for it"
    missing = lacking()
    if missing is not None:
        return f"{staged}: {missing.why}"
    if find_spec("torch") is None:
        return f"TensorFlow's eager ones {over}, others {staged}: torch is not installed"
    try:
        import torch
    except (ImportError, OSError) as error:
        return f"{staged}: torch cannot be imported: {error}"
    if not torch.cuda.is_available():
        return f"{staged}: this torch does not see the GPU"
    eager = f"TensorFlow's eager ones {over}"
    return f"PyTorch's {over} or torch's NCCL, {eager}; others, and other transports, {staged}"


def rocm_built() -> bool:
    """Whether ROCm tensors can be reduced: no."""
    return False


def ddl_built() -> bool:
    """Whether IBM's DDL is supported: no."""
    return False


def ccl_built() -> bool:
    """Whether Intel's oneCCL is supported: no."""
    return False


def sycl_built() -> bool:
    """Whether tensors on Intel's GPUs, by SYCL, can be reduced: no."""
    return False
