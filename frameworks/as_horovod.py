"""Running Horovod's scripts unchanged: ``import horovod.torch as hvd`` imports Ringlet.

python -m ringlet.as_horovod train.py --epochs 3
ringlet run -np 4 python -m ringlet.as_horovod train.py --epochs 3
"""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path

from ringlet.horovod import children
from ringlet.horovod.aliases import Aliases
from ringlet.job import placed_call
from ringlet.ring.functions import parcels


def install_as_horovod() -> None:
    """Let ``import horovod`` and its submodules mean Ringlet, in this process. Idempotent.

    It does so in children of multiprocessing as well, in the ranks of ``horovod.run`` and in the
    workers of Ray, Spark and Dask that this process calls functions in, and in no other program
    that is started. Raises ImportError when Horovod itself is imported already.
    """
    if not any(isinstance(finder, Aliases) for finder in sys.meta_path):
        if "horovod" in sys.modules:
            raise ImportError("horovod is imported already; call install_as_horovod() before that")
        sys.meta_path.insert(0, Aliases())
        children.inherit()
        parcels.runner[:] = ["-m", "ringlet.as_horovod"]
        placed_call.beforehand[:] = [("ringlet.as_horovod", "install_as_horovod")]


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
