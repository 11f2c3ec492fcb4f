"""What of the launcher's environment ranks on other hosts find in theirs."""

from __future__ import annotations

from collections.abc import Collection, Mapping

# What starting Python there needs before anything else can be said.
START = ("PATH", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH", "VIRTUAL_ENV")

# Families of settings that every rank should see alike. Credentials are in none of them.
_FAMILIES = (
    "RINGLET_",
    "HOROVOD_",
    "PYTHON",
    "OMP_",
    "KMP_",
    "MKL_",
    "OPENBLAS_",
    "NUMBA_",
    "CUDA_",
    "NCCL_",
    "GLOO_",
    "UCX_",
    "FI_",
    "MPICH_",
    "MPIR_CVAR_",
    "TORCH_",
    "TF_",
    "KERAS_",
    "XLA_",
    "JAX_",
)
_PRIVATE = ("SECRET", "TOKEN", "PASSWORD", "KEY")


def forwarded(base: Mapping[str, str], asked: Collection[str] = ()) -> dict[str, str]:
    """Return the variables of ``base`` for ranks on other hosts; ``asked`` for are always in.

    By default these are the search paths and the families above, without what looks like a
    credential.
    """
    return {
        name: value
        for name, value in base.items()
        if name in asked
        or (
            (name in START or name.startswith(_FAMILIES))
            and not any(word in name for word in _PRIVATE)
        )
    }
