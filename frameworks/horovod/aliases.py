"""Horovod's modules by name, and where an import of each finds the same names in Ringlet."""

from __future__ import annotations

import importlib
import sys
from functools import partial
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_loader
from types import ModuleType
from typing import Any

# What Horovod calls a module, and where Ringlet keeps the same names.
ALIASES = {
    "horovod": "ringlet",
    "horovod.torch": "ringlet.torch",
    "horovod.torch.mpi_ops": "ringlet.torch",
    "horovod.torch.functions": "ringlet.torch",
    "horovod.torch.optimizer": "ringlet.torch",
    "horovod.torch.sync_batch_norm": "ringlet.torch",
    "horovod.torch.compression": "ringlet.torch.compression",
    "horovod.torch.elastic": "ringlet.torch.elastic",
    "horovod.torch.elastic.sampler": "ringlet.torch.elastic.sampler",
    "horovod.torch.elastic.state": "ringlet.torch.elastic.state",
    "horovod.tensorflow": "ringlet.tensorflow",
    "horovod.tensorflow.mpi_ops": "ringlet.tensorflow",
    "horovod.tensorflow.functions": "ringlet.tensorflow",
    "horovod.tensorflow.compression": "ringlet.keras.compression",
    "horovod.tensorflow.sync_batch_norm": "ringlet.tensorflow.sync_batch_norm",
    "horovod.tensorflow.elastic": "ringlet.tensorflow.elastic",
    "horovod.tensorflow.util": "ringlet.tensorflow.util",
    "horovod.tensorflow.keras": "ringlet.tensorflow.keras",
    "horovod.tensorflow.keras.callbacks": "ringlet.tensorflow.keras.callbacks",
    "horovod.tensorflow.keras.elastic": "ringlet.tensorflow.keras.elastic",
    "horovod.keras": "ringlet.keras",
    "horovod.keras.callbacks": "ringlet.keras.callbacks",
    "horovod.keras.elastic": "ringlet.keras.elastic",
    "horovod.mxnet": "ringlet.mxnet",
    "horovod.mxnet.mpi_ops": "ringlet.mxnet",
    "horovod.mxnet.functions": "ringlet.mxnet",
    "horovod.mxnet.compression": "ringlet.mxnet.compression",
    "horovod.common": "",  # a package with nothing of its own
    "horovod.common.process_sets": "ringlet.job.process_sets",
    "horovod.common.elastic": "ringlet.job.elastic",
    "horovod.common.basics": "ringlet.horovod.basics",
    "horovod.common.exceptions": "ringlet.horovod.basics",
    "horovod.common.util": "ringlet.horovod.basics",
    "horovod.data": "ringlet.data_loaders",
    "horovod.data.data_loader_base": "ringlet.data_loaders",
    "horovod.ray": "ringlet.ray",
    "horovod.ray.elastic": "ringlet.ray.elastic",
    "horovod.ray.runner": "ringlet.ray",
    "horovod.spark": "ringlet.spark",
    "horovod.spark.keras": "ringlet.spark",
    "horovod.spark.torch": "ringlet.spark",
    "horovod.runner": "ringlet",
    "horovod.runner.util": "",
    "horovod.runner.util.threads": "ringlet.horovod.basics",
    "horovod.runner.common": "",
    "horovod.runner.common.util": "",
    "horovod.runner.common.util.env": "ringlet.horovod.basics",
}
VERSION = "0.28.1"  # of Horovod, whose interface this is
# Here Horovod keeps the operations, and an object that programs reach for.
_OPERATIONS = ".mpi_ops"
_WITH_KERAS = ("horovod.keras", "horovod.tensorflow", "horovod.tensorflow.keras")


class Aliases(MetaPathFinder, Loader):
    """Finds ``horovod.*`` in Ringlet."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """Return the spec of a module of Horovod's; ModuleNotFoundError for what Ringlet lacks."""
        if name == "mxnet":
            _prepare_for_mxnet()
        if name != "horovod" and not name.startswith("horovod."):
            return None
        if name not in ALIASES:
            raise ModuleNotFoundError(
                f"Ringlet has nothing that stands for {name}; docs/migrating-from-horovod.md lists "
                "what it covers",
                name=name,
            )
        return spec_from_loader(name, self, is_package=True)

    def find_ours(self, name: str) -> ModuleSpec | None:
        """Return the spec of what Horovod calls a module, as ``ringlet.*``; None for others.

        For programs that change ``horovod`` to ``ringlet`` in their imports. There must be no
        module of that name.
        """
        known = _in_horovod(name) in ALIASES
        return spec_from_loader(name, self, is_package=True) if known else None

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """Leave it to Python."""
        return None

    def exec_module(self, module: ModuleType) -> None:
        """Put what stands for ``module`` into its place."""
        name = module.__name__
        theirs = _in_horovod(name)
        if not ALIASES[theirs]:
            return
        target = importlib.import_module(ALIASES[theirs])
        if name == "horovod":  # a module of its own, as programs compare its version
            vars(module).update(__version__=VERSION, __getattr__=partial(getattr, target))
            return
        if name.endswith(_OPERATIONS):
            basics = importlib.import_module("ringlet.horovod.basics").HorovodBasics()
            vars(module).update(vars(target) | {"_basics": basics, "__name__": name})
            return
        inside = any(n.startswith(f"{theirs}.") for n in ALIASES)
        if inside and (target.__name__ == "ringlet" or not hasattr(target, "__path__")):
            own = ("__name__", "__path__", "__spec__")  # so that it stays a package
            vars(module).update({k: v for k, v in vars(target).items() if k not in own})
            return
        sys.modules[name] = target
        parent, _, child = name.rpartition(".")
        if parent in sys.modules and not hasattr(sys.modules[parent], child):
            setattr(sys.modules[parent], child, target)
        if name + _OPERATIONS in ALIASES:
            importlib.import_module(name + _OPERATIONS)
        if name in _WITH_KERAS:
            importlib.import_module("ringlet.keras.keras2").install()


def _in_horovod(name: str) -> str:
    """Return what Horovod calls the module that is imported as ``name``, which may be ours."""
    return f"horovod.{inside}" if (inside := name.partition(".")[2]) else name


def _prepare_for_mxnet() -> None:
    """Give MXNet what it looks for in NumPy: Horovod's programs import it before their Horovod."""
    if PathFinder.find_spec("mxnet") is not None:
        importlib.import_module("ringlet.shared.removed_numpy_names").restore()
