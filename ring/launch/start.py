"""Which transport a job uses, what its ranks find in their environment, and starting wrappers."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from ringlet.ring.environment import check_transport
from ringlet.ring.errors import LaunchError, unavailable
from ringlet.ring.launch.wire import ADDRESS, SECRET

WRAPPER = [sys.executable, "-P", "-m", "ringlet.ring.launch.worker"]

# An outer launcher's variables would be taken for this job's.
_OUTER = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDRA_", "HYDI_", "MPI_LOCAL")

# Hydra: this host, by fork, whatever a batch system's variables suggest; control by loopback.
# Open MPI: root and more ranks than cores are the user's decision.
_PROCESS_MANAGER = {
    "HYDRA_LAUNCHER": "fork",
    "HYDRA_RMK": "user",
    "HYDRA_IFACE": "lo",
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
_WRAPPER_ONLY = {"OPENBLAS_NUM_THREADS": "1"}  # a wrapper forks, so it should have one thread


def mpiexec() -> str | None:
    """Return the mpiexec beside this interpreter, else the one on PATH, else None."""
    beside = Path(sys.executable).parent / "mpiexec"
    return str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")


def choose_transport(asked: str | None) -> tuple[str, str | None]:
    """Return the transport for a job, and a remark if it is not the one people expect.

    Raises TransportUnavailable when ``asked`` cannot work here, LaunchError for an unknown name or
    when nothing works.
    """
    if asked is not None and check_transport(asked) == "local":
        raise LaunchError("transport 'local' joins threads of one process; use mpi or gloo")
    lacking = {
        "mpi": _missing("mpi4py") or ("no mpiexec was found" if mpiexec() is None else None),
        "gloo": _missing("torch"),
    }
    remedy = {"mpi": "pip install 'ringlet[mpi]'", "gloo": "pip install 'ringlet[torch]'"}
    if asked is not None:
        if why := lacking[asked]:
            raise unavailable(asked, why, remedy[asked])
        return asked, None
    if lacking["mpi"] is None:
        return "mpi", None
    if lacking["gloo"] is None:
        return "gloo", f"using gloo, because {lacking['mpi']} ({remedy['mpi']} for MPI)"
    raise LaunchError(
        f"no transport can be used: {lacking['mpi']} and {lacking['gloo']}."
        f" {remedy['mpi']} or {remedy['gloo']}"
    )


def _missing(module: str) -> str | None:
    return None if importlib.util.find_spec(module) else f"{module} is not installed"


def rank_environment(
    base: Mapping[str, str], rank: int, size: int, transport: str, scratch: str
) -> dict[str, str]:
    """Return what rank ``rank`` finds in its environment; ``base`` wins where it is the user's."""
    cores = len(os.sched_getaffinity(0))
    kept = {name: value for name, value in base.items() if not name.startswith(_OUTER)}
    defaults = {"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": str(max(1, cores // size))}
    return (
        defaults
        | kept
        | {
            "RINGLET_TRANSPORT": transport,
            "RINGLET_RANK": str(rank),
            "RINGLET_SIZE": str(size),
            "RINGLET_LOCAL_RANK": str(rank),
            "RINGLET_LOCAL_SIZE": str(size),
            # A file, not a port: it needs no free port, and nobody else can open it.
            "RINGLET_RENDEZVOUS": f"file://{scratch}/store",
        }
    )


def dropped() -> list[str]:
    """Names that only wrappers and the process manager should see."""
    return [ADDRESS, SECRET, *_PROCESS_MANAGER, *_WRAPPER_ONLY, "RINGLET_RANK"]


def start_wrappers(
    size: int, transport: str, address: str, secret: bytes, noise: int
) -> list[subprocess.Popen[bytes]]:
    """Start one wrapper per rank; what they or mpiexec say themselves goes to ``noise``.

    Returns the processes this one is the parent of. Raises LaunchError if one cannot be started.
    """
    outer = (*_OUTER, "RINGLET_RANK")
    env = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    env |= _WRAPPER_ONLY | {ADDRESS: address, SECRET: secret.hex()}
    if transport == "mpi":
        program = mpiexec()
        assert program is not None
        return [_start([program, "-n", str(size), *WRAPPER], env | _PROCESS_MANAGER, noise)]
    started: list[subprocess.Popen[bytes]] = []
    try:
        started.extend(
            _start(WRAPPER, env | {"RINGLET_RANK": str(rank)}, noise) for rank in range(size)
        )
    except LaunchError:
        for process in started:
            process.kill()
            process.wait()
        raise
    return started


def _start(command: list[str], env: Mapping[str, str], noise: int) -> subprocess.Popen[bytes]:
    try:
        # In a session of their own, so that the terminal's Ctrl-C reaches the launcher alone.
        return subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=noise,
            stderr=noise,
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(f"cannot start {command[0]}: {error.strerror}") from error
