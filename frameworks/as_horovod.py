"""Running Horovod's scripts unchanged: ``import horovod.torch as hvd`` imports Ringlet.

python -m ringlet.as_horovod train.py --epochs 3
ringlet run -np 4 python -m ringlet.as_horovod train.py --epochs 3
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import MutableMapping
from importlib.util import find_spec
from pathlib import Path

from ringlet.horovod import children
from ringlet.horovod.aliases import Aliases
from ringlet.job import placed_call
from ringlet.ring.functions import parcels

_PLACE = ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE", "CROSS_RANK", "CROSS_SIZE", "HOSTNAME")


def _tell_place(env: MutableMapping[str, str]) -> None:
    """Say what horovodrun says to ranks that talk gloo, and to those only."""
    for name in _PLACE:
        if env.get("RINGLET_TRANSPORT") == "gloo" and f"RINGLET_{name}" in env:
            env[f"HOROVOD_{name}"] = env[f"RINGLET_{name}"]
        elif "RINGLET_MEMBER" not in env:  # an elastic job's launcher has set what it promises
            env.pop(f"HOROVOD_{name}", None)


def install_as_horovod() -> None:
    """Let ``import horovod`` and its submodules mean Ringlet, in this process. Idempotent.

    It does so in children of multiprocessing as well, in the ranks of ``horovod.run`` and in the
    workers of Ray, Spark and Dask that this process calls functions in, and in no other program
    that is started. HOROVOD_RANK and its likes are set, for programs that read them. Raises
    ImportError when Horovod itself is imported already.
    """
    if not any(isinstance(finder, Aliases) for finder in sys.meta_path):
        if "horovod" in sys.modules:
            raise ImportError("horovod is imported already; call install_as_horovod() before that")
        sys.meta_path.insert(0, Aliases())
        children.inherit()
        parcels.runner[:] = ["-m", "ringlet.as_horovod"]
        placed_call.beforehand[:] = [("ringlet.as_horovod", "install_as_horovod")]
    _tell_place(os.environ)  # a worker of Ray's may be another rank by now


def main(arguments: list[str]) -> None:
    """Run a script, or with -m a module, in which ``import horovod`` imports Ringlet."""
    if not arguments or arguments[0] in ("-h", "--help"):
        sys.exit("usage: python -m ringlet.as_horovod script.py [arguments]")
    install_as_horovod()
    if arguments[0] == "-m":
        sys.argv = arguments[1:]
        if len(arguments) < 2 or not _is_there(arguments[1]):
            sys.exit(f"ringlet.as_horovod: there is no module {' '.join(arguments[1:2])!r}")
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        return
    script = Path(arguments[0])
    if not script.is_file():
        sys.exit(f"ringlet.as_horovod: there is no script {arguments[0]!r}")
    sys.argv = arguments
    sys.path[0] = str(script.parent.resolve())
    runpy.run_path(str(script), run_name="__main__")


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ImportError:  # of the package that it would be in
        return False


if __name__ == "__main__":
    main(sys.argv[1:])
