"""MPICH's process manager with a launcher of our own: what it wants to be started on each host."""

from __future__ import annotations

import os
import select
import shlex
import subprocess
import time
from typing import BinaryIO

from ringlet.ring.errors import LaunchError

_LINE, _END = "HYDRA_LAUNCH: ", "HYDRA_LAUNCH_END"
_LONGEST = 1 << 22  # bytes that it may print until then


def commands(output: BinaryIO, process: subprocess.Popen[bytes], limit: float) -> list[list[str]]:
    """Return the command of every host, in the order they were given to mpiexec.

    ``output`` is what mpiexec, ``process``, prints, read without blocking; ``limit`` is a moment of
    the monotonic clock. Raises LaunchError when it ends before, or is no MPICH.
    """
    text = b""
    while f"{_END}\n".encode() not in text:
        ended = process.poll() is not None
        if select.select([output], [], [], 0.1)[0]:
            text += os.read(output.fileno(), 1 << 16)
        elif ended or time.monotonic() > limit or len(text) > _LONGEST:
            said = text.decode(errors="replace").strip() or "nothing"
            raise LaunchError(
                "mpiexec did not say what to start on other hosts; over several hosts MPI needs"
                f" MPICH 4 or newer (pip install 'ringlet[mpi]'), or use --transport gloo. It"
                f" said:\n{said}"
            )
    lines = text.decode().splitlines()
    return [shlex.split(line.removeprefix(_LINE)) for line in lines if line.startswith(_LINE)]
