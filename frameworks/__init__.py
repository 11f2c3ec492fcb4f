"""Ringlet: data-parallel training that is cheap to communicate."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ringlet.as_horovod import install_as_horovod
    from ringlet.ring.functions import WorkerFailed, run

__version__ = "0.1.0"
__all__ = ["WorkerFailed", "__version__", "install_as_horovod", "run"]

_LAZY = {
    "WorkerFailed": "ringlet.ring.functions",
    "install_as_horovod": "ringlet.as_horovod",
    "run": "ringlet.ring.functions",
}
_MODULES = (
    "compressors", "dask", "data_loaders", "jax", "keras", "mxnet", "observe", "precision", "ray",
    "spark", "tensorflow", "torch",
)  # fmt: skip


class _HorovodsModules:
    """Finds what Horovod calls its modules, such as ringlet.torch.mpi_ops, where all else fails."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        if not name.startswith("ringlet."):
            return None
        from ringlet.horovod.aliases import Aliases

        return Aliases().find_ours(name)


sys.meta_path.append(_HorovodsModules)


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        from importlib import import_module

        return getattr(import_module(_LAZY[name]), name)
    told = f"module 'ringlet' has no attribute {name!r}"
    if name in _MODULES:
        told += f": write 'import ringlet.{name}' first"
    elif not name.startswith("_"):
        told += ": init() and the rest are in ringlet.torch, .tensorflow, .keras, .jax, .mxnet:"
        told += " import one of these, as in 'import ringlet.torch as hvd'"
    raise AttributeError(told)
