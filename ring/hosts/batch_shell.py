"""A remote shell inside a batch system's allocation: SYSTEM HOST COMMAND.

``python -m ringlet.ring.hosts.batch_shell slurm n2 'cd /work && exec ...'`` has the system itself
start the command, where it may do so without ssh. Standard input and output go through.
"""

from __future__ import annotations

import os
import shlex
import sys

# Slurm: a step beside all others, with all that the job has of the node.
_SYSTEMS = {
    "slurm": ["srun", "--overlap", "--mpi=none", "--cpu-bind=none", "-N1", "-n1", "-w"],
    "lsf": ["blaunch"],
    "sge": ["qrsh", "-inherit", "-noshell"],
}


def command_for(system: str, host: str, line: str) -> list[str]:
    """Return what has ``system`` run ``line`` in a shell on ``host``."""
    words = [*_SYSTEMS[system], host]
    if system == "lsf":  # joins its arguments to a line for a shell there
        return [*words, f"bash -c {shlex.quote(line)}"]
    return [*words, "/bin/bash", "-c", line]


def main() -> int:
    """Become the command that reaches the host."""
    system, host, line = sys.argv[1:]
    # A step of its own, not a part of the one that this process may belong to.
    kept = ("SLURM_JOB_ID", "SLURM_JOBID", "SLURM_CONF")
    env = {n: v for n, v in os.environ.items() if not n.startswith("SLURM_") or n in kept}
    command = command_for(system, host, line)
    try:
        os.execvpe(command[0], command, env)
    except OSError as error:
        print(f"cannot start {command[0]}: {error.strerror}", file=sys.stderr)
        return 127


if __name__ == "__main__":
    sys.exit(main())
