"""What of the launcher's environment ranks on other hosts find in theirs."""

from __future__ import annotations

import re
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
_CREDENTIAL = re.compile(
    "SECRET|TOKEN|PASSWORD|PASSWD|PASSPHRASE|KEY|CREDENTIAL|AUTH(?![A-Z])|AUTHORI[SZ]ATION",
    re.IGNORECASE,
)
# Settings whose names only look so: of partitions of a network, caches, random numbers, retries.
_SETTINGS = {
    "NCCL_IB_PKEY",
    "UCX_IB_PKEY",
    "JAX_COMPILATION_CACHE_INCLUDE_METADATA_IN_KEY",
    "JAX_DEBUG_KEY_REUSE",
    "JAX_LEGACY_PRNG_KEY",
    "JAX_REMOVE_CUSTOM_PARTITIONING_PTR_FROM_CACHE_KEY",
    "TF_GCS_AUTH_MAX_REQUESTS",
    "TF_GCS_AUTH_RETRY_DELAY_SEC",
    "TORCH_COMPILE_CACHE_KEY_TAG",
    "TORCH_COMPILE_STICKY_PGO_KEY",
}


def forwarded(base: Mapping[str, str], asked: Collection[str] = ()) -> dict[str, str]:
    """Return the variables of ``base`` for ranks on other hosts; ``asked`` for are always in.

    By default these are the search paths and the families above, without what looks like a
    credential.
    """
    return {
        name: value
        for name, value in base.items()
        if name in asked
        or ((name in START or name.startswith(_FAMILIES)) and not is_credential(name))
    }


def without_credentials(env: Mapping[str, str]) -> dict[str, str]:
    """Return what of ``env`` a launcher's link may carry, where a remote shell carries the rest."""
    return {name: value for name, value in env.items() if not is_credential(name)}


def is_credential(name: str) -> bool:
    """Whether a variable is a credential by its name, in capitals or not."""
    return name not in _SETTINGS and _CREDENTIAL.search(name) is not None
