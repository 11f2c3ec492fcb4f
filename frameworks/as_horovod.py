"""Running Horovod's scripts unchanged: ``import horovod.torch as hvd`` imports Ringlet.

python -m ringlet.as_horovod train.py --epochs 3
ringlet run -np 4 python -m ringlet.as_horovod train.py --epochs 3
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import MutableMapping
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, spec_from_loader
from pathlib import Path
from types import ModuleType
from typing import Any

from ringlet.horovod.basics import HorovodBasics
from ringlet.ring.launch import api

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
    "horovod.common": "",  # a package with nothing of its own
    "horovod.common.process_sets": "ringlet.job.process_sets",
    "horovod.common.elastic": "ringlet.job.elastic",
    "horovod.common.basics": "ringlet.horovod.basics",
    "horovod.common.exceptions": "ringlet.horovod.basics",
    "horovod.common.util": "ringlet.horovod.basics",
    "horovod.runner": "ringlet",
    "horovod.runner.util": "",
    "horovod.runner.util.threads": "ringlet.horovod.basics",
    "horovod.runner.common": "",
    "horovod.runner.common.util": "",
    "horovod.runner.common.util.env": "ringlet.horovod.basics",
}
# Here Horovod keeps the operations, and an object that programs reach for.
_OPERATIONS = ".mpi_ops"
_WITH_KERAS = ("horovod.keras", "horovod.tensorflow", "horovod.tensorflow.keras")
_PLACE = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")


class _Aliases(MetaPathFinder, Loader):
    """Finds ``horovod.*`` in Ringlet."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if name != "horovod" and not name.startswith("horovod."):
            return None
        if name not in ALIASES:
            raise ModuleNotFoundError(
                f"Ringlet has nothing that stands for {name}; see its README for what it covers",
                name=name,
            )
        return spec_from_loader(name, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        if not ALIASES[name]:
            return
        target = importlib.import_module(ALIASES[name])
        if name.endswith(_OPERATIONS):
            vars(module).update(vars(target) | {"_basics": HorovodBasics(), "__name__": name})
            return
        sys.modules[name] = target
        parent, _, child = name.rpartition(".")
        if parent in sys.modules and not hasattr(sys.modules[parent], child):
            setattr(sys.modules[parent], child, target)
        if name + _OPERATIONS in ALIASES:
            importlib.import_module(name + _OPERATIONS)
        if name in _WITH_KERAS:
            importlib.import_module("ringlet.keras.keras2").install()


def _tell_place(env: MutableMapping[str, str]) -> None:
    """Say what horovodrun says to ranks that talk gloo, and to those only."""
    for name in _PLACE:
        env.pop(f"HOROVOD_{name}", None)
        if env.get("RINGLET_TRANSPORT") == "gloo" and f"RINGLET_{name}" in env:
            env[f"HOROVOD_{name}"] = env[f"RINGLET_{name}"]


def install_as_horovod() -> None:
    """Let ``import horovod`` and its submodules mean Ringlet, in this process. Idempotent.

    HOROVOD_RANK and its likes are set as well, for programs that read them. Raises ImportError
    when Horovod itself is imported already.
    """
    if any(isinstance(finder, _Aliases) for finder in sys.meta_path):
        return
    if "horovod" in sys.modules:
        raise ImportError("horovod is imported already; call install_as_horovod() before that")
    sys.meta_path.insert(0, _Aliases())
    _tell_place(os.environ)
    api.runner[:] = ["-m", "ringlet.as_horovod"]  # ranks of horovod.run() import it as well


def main(arguments: list[str]) -> None:
    """Run a script, or with -m a module, in which ``import horovod`` imports Ringlet."""
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.exit("usage: python -m ringlet.as_horovod script.py [arguments]")
    install_as_horovod()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        if len(arguments) < 2 or find_spec(arguments[1]) is None:
            sys.exit(f"ringlet.as_horovod: there is no module {' '.join(arguments[1:2])!r}")
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    script = Path(arguments[0])
    if not script.is_file():
        sys.exit(f"ringlet.as_horovod: there is no script {arguments[0]!r}")
    sys.argv = arguments
    sys.path[0] = str(script.parent.resolve())
    runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
