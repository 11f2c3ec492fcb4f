"""Which transport a job uses, what its ranks find in their environment, and starting wrappers."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ringlet.ring.descriptors import limit_as_before
from ringlet.ring.errors import LaunchError, unavailable
from ringlet.ring.hosts.hosts import Seat
from ringlet.ring.processes import torchrun
from ringlet.ring.rendezvous.environment import check_transport
from ringlet.ring.rendezvous.epochs import EPOCH
from ringlet.ring.rendezvous.place import place_variables
from ringlet.ring.wire.keys import MEMBER
from ringlet.ring.wire.launch_link import ADDRESS, SECRET
from ringlet.ring.wire.listener import Listener

LONGEST = 3600.0  # seconds for mpiexec to answer: what is to wait takes no more than 24 days
WRAPPER = [sys.executable, "-P", "-m", "ringlet.ring.processes.rank_wrapper"]

# An outer launcher's variables would be taken for this job's.
_OUTER = ("PMI_", "PMIX_", "OMPI_", "PRTE_", "HYDRA_", "HYDI_", "MPI_LOCAL", "TORCHELASTIC_")

# Those of a job that a program of its starts another job in.
_INNER = (MEMBER, EPOCH, "RINGLET_NODE")

# Those that come from MPICH: this host, by fork, whatever a batch system's variables suggest.
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


def is_mpich(seconds: float) -> bool:
    """Whether mpiexec is MPICH's, whose ranks the launcher can start itself.

    It may take ``seconds`` to say so, an hour at most. Raises LaunchError when it does not answer.
    """
    program, seconds = mpiexec(), min(seconds, LONGEST)
    try:
        said = subprocess.run(
            [_mpiexec(), "--version"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
        ).stdout
    except subprocess.TimeoutExpired:
        raise LaunchError(
            f"`{program} --version` did not answer within {seconds:g} s (see --start-timeout)"
        ) from None
    except OSError as error:
        raise LaunchError(f"cannot start {program}: {error.strerror}") from error
    return b"HYDRA build details" in said


def asked_transport(given: str | None, env: Mapping[str, str]) -> str | None:
    """Return the transport ``given``, or what RINGLET_TRANSPORT says; None if nothing is asked for.

    ``env`` holds the job's own variables. In a rank of another job this process's environment says
    what that one's launcher chose. Raises LaunchError for an unknown name in the variable.
    """
    if given is not None:
        return given
    around = {} if "RINGLET_RANK" in os.environ else os.environ
    said = env.get("RINGLET_TRANSPORT") or around.get("RINGLET_TRANSPORT")
    return check_transport(said, "RINGLET_TRANSPORT") if said else None


def choose_transport(asked: str | None) -> tuple[str, str | None]:
    """Return the transport for a job, and a remark if it is not the one people expect.

    Raises TransportUnavailable when ``asked`` cannot work here, LaunchError for an unknown name or
    when nothing works.
    """
    if asked is not None and check_transport(asked) == "local":
        raise LaunchError("transport 'local' joins threads of one process; use mpi, gloo or nccl")
    why = lacking()
    remedy = {"mpi": "pip install 'ringlet[mpi]'", "gloo": "pip install 'ringlet[torch]'"}
    if asked == "nccl":
        return _with_nccl(why["gloo"])
    if asked is not None:
        if missing := why[asked]:
            raise unavailable(asked, missing, remedy[asked])
        return asked, None
    if why["mpi"] is None:
        return "mpi", None
    if why["gloo"] is None:
        return "gloo", f"using gloo, because {why['mpi']} ({remedy['mpi']} for MPI)"
    raise LaunchError(
        f"no transport can be used: {why['mpi']} and {why['gloo']}."
        f" {remedy['mpi']} or {remedy['gloo']}"
    )


def _with_nccl(gloo: str | None) -> tuple[str, str | None]:
    """Return the transport "nccl", whose ranks meet over gloo."""
    from ringlet.ring.transports.nccl_library import lacking

    if gloo is not None:
        raise unavailable("nccl", f"{gloo}, over which ranks meet", "pip install 'ringlet[torch]'")
    if missing := lacking(gpu=False):  # other hosts may have one
        raise unavailable("nccl", missing.why, missing.remedy)
    return "nccl", None


def lacking() -> dict[str, str | None]:
    """Return what each transport between processes lacks here, None if nothing."""
    return {
        "mpi": _missing("mpi4py") or ("no mpiexec was found" if mpiexec() is None else None),
        "gloo": _missing("torch"),
    }


def _missing(module: str) -> str | None:
    return None if importlib.util.find_spec(module) else f"{module} is not installed"


def rank_environment(
    base: Mapping[str, str],
    rank: int,
    size: int,
    transport: str,
    address: str,
    seat: Seat,
    users: Mapping[str, str],
) -> dict[str, str]:
    """Return what rank ``rank`` finds in its environment; ``base`` wins where it is the user's.

    ``address`` is where the launcher, and so the job's store, is found; ``users`` are those of
    torchrun's variables that stay.
    """
    kept = {
        name: value
        for name, value in base.items()
        if not name.startswith(_OUTER) and name not in (*torchrun.NAMES, *_INNER)
    }
    return (
        {"PYTHONUNBUFFERED": "1"}
        | kept
        | torchrun.torch_environment(rank, size, seat, users)
        | place_variables(
            RANK=rank, SIZE=size, LOCAL_RANK=seat.local_rank, LOCAL_SIZE=seat.local_size
        )
        | {"RINGLET_TRANSPORT": transport, "RINGLET_RENDEZVOUS": f"ringlet://{address}"}
    )


def cross_environment(host: str, rank: int, peers: Sequence[int]) -> dict[str, str]:
    """Return what a rank finds of its host's name and place; ``peers`` have its local rank."""
    return place_variables(
        HOSTNAME=host.partition("/")[0],
        CROSS_RANK=sum(peer < rank for peer in peers),
        CROSS_SIZE=len(peers),
    )


def other_python(name: str, path: str | None) -> str | None:
    """Return what to do if ``name`` is a Python on ``path``, but not the one of Ringlet."""
    found = shutil.which(name, path=path)
    if not found or not re.fullmatch(r"python[\d.]*", os.path.basename(name)):
        return None
    there, here = (os.path.realpath(os.path.dirname(each)) for each in (found, sys.executable))
    if there == here:
        return None
    return (
        f"{name} is {found}, and Ringlet is installed for {sys.executable}: activate the "
        "environment of that one, or give it in the command"
    )


def dropped() -> list[str]:
    """Names that programs do not see as wrappers and the process manager have them."""
    own = [ADDRESS, SECRET, *_PROCESS_MANAGER, *_WRAPPER_ONLY, *_INNER, "RINGLET_RANK"]
    return own + list(torchrun.NAMES)


def wrapper_environment(address: str, secret: bytes) -> dict[str, str]:
    """Return the environment of wrappers on this host, and of whatever starts them."""
    outer = (*_OUTER, "RINGLET_RANK")
    env = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    return env | _WRAPPER_ONLY | {ADDRESS: address, SECRET: secret.hex()}


@dataclass(frozen=True)
class Started:
    """A process that the launcher is the parent of, and the ranks that it brings up."""

    process: subprocess.Popen[bytes]
    who: str
    ranks: frozenset[int]


def listen_for_wrappers(size: int, address: str, secret: bytes | None) -> Listener:
    """Listen at ``address`` for the wrappers of ``size`` ranks. Raises LaunchError."""
    try:
        return Listener(size, address, secret=secret)
    except OSError as error:
        raise LaunchError(
            f"cannot listen on {address}: {error.strerror}; name this host's --network-interface"
        ) from error


def start_wrappers(ranks: Iterable[int], env: Mapping[str, str], noise: Any) -> Iterator[Started]:
    """Start the wrappers of ``ranks`` on this host; what they say themselves goes to ``noise``.

    Raises LaunchError if one cannot be started.
    """
    given = _launcher_lost_notice()
    command = [*WRAPPER, *map(str, given)]
    for rank in ranks:
        process = start_process(command, {**env, "RINGLET_RANK": str(rank)}, noise, given)
        yield Started(process, "its process", frozenset({rank}))


def start_mpiexec(size: int, env: Mapping[str, str], noise: Any) -> Started:
    """Have mpiexec start ``size`` wrappers on this host. Raises LaunchError."""
    command = [_mpiexec(), "-n", str(size), *WRAPPER]
    process = start_process(command, {**env, **_PROCESS_MANAGER}, noise)
    return Started(process, "mpiexec", frozenset(range(size)))


@functools.cache
def _launcher_lost_notice() -> tuple[int, ...]:
    """Return descriptors for the wrapper that first finds this process gone: it says so, once.

    They are where this process says what is wrong, and a pipe with one byte. None where that is
    closed.
    """
    try:
        said = os.dup(2)
    except OSError:
        return ()
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.write(writer, b"!")
    os.close(writer)
    return said, reader


def start_process(
    command: list[str], env: Mapping[str, str], noise: Any, given: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start ``command`` with nothing to read, and the descriptors ``given``. Raises LaunchError."""
    try:
        # In a session of their own, so that the terminal's Ctrl-C reaches the launcher alone.
        process = subprocess.Popen(
            command,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=noise,
            stderr=noise,
            pass_fds=given,
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(f"cannot start {command[0]}: {error.strerror}") from error
    limit_as_before(process.pid)
    return process


def _mpiexec() -> str:
    program = mpiexec()
    assert program is not None  # or mpi would not have been chosen
    return program
