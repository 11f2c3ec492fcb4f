"""Joining and leaving a job, as every adapter offers it."""

from __future__ import annotations

import multiprocessing
import os
import sys
import warnings
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from ringlet.job import json_exchange
from ringlet.job.process_sets import (
    InvalidArgument,
    ProcessSet,
    add_process_set,
    find_process_set,
    global_process_set,
)
from ringlet.job.session import Runtime, is_initialized
from ringlet.job.session import init as start
from ringlet.ring.callers import outside, public
from ringlet.ring.communicator import Communicator
from ringlet.ring.rendezvous.environment import detect


@public
def init(
    comm: Any = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    transport: str | None = None,
    autotune: bool | str | None = None,
    join_divisor: str | None = None,
) -> Runtime:
    """Join the job that a launcher started; a second call changes nothing. Collective.

    - ``comm``: an mpi4py communicator whose ranks the job consists of, or a list of them, which
      over other transports than MPI names all; or a torch.distributed process group, among whose
      ranks connections of our own are made, over torch's NCCL if that is what it uses. Usually
      None.
    - ``process_sets``: sets that there shall be, added where they are not there yet. A rank whose
      communicators are not those of others lists its own; all are added on every rank. ("dynamic",
      which Horovod needs before sets can be added later, is accepted: they always can.)
    - ``transport``: "mpi" or "gloo", where the environment should not decide.
    - ``autotune``: True to tune the engine while training goes on, or what of it, as in
      "fusion_threshold,streams"; rank 0's counts. None leaves it to RINGLET_AUTOTUNE.
    - ``join_divisor``: what averages are divided by while ranks have joined: "all" ranks, as in
      Horovod, or the "contributors", those whose own values an average is of; rank 0's counts. None
      leaves it to RINGLET_JOIN_DIVISOR, and that to "all".

    Raises LaunchError when launcher and transport disagree on the size, TransportUnavailable when
    something is not installed, TypeError for a ``comm`` that is no communicator or something in
    ``process_sets`` that is no ProcessSet, ValueError for an ``autotune`` that names what cannot be
    tuned here, or another divisor.
    """
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise ValueError(f"process_sets is a list of ProcessSet or 'dynamic', not {process_sets!r}")
    if process_sets is not None and not isinstance(process_sets, str):
        strange = [each for each in process_sets if not isinstance(each, ProcessSet)]
        if strange:
            raise TypeError(
                f"init: process_sets holds {strange[0]!r}, which is no ProcessSet: write "
                "hvd.ProcessSet([0, 1]), and keep it to pass to operations"
            )
    runtime = start(transport, _communicator(comm, transport), autotune, join_divisor)
    if comm is None and runtime.size == 1:
        _warn_of_torch()
    if comm is not None and hasattr(comm, "Get_group"):
        global_process_set.mpi_comm = comm
    if process_sets is not None and not isinstance(process_sets, str):
        _establish(process_sets)
    return runtime


def _warn_of_torch() -> None:
    """Warn where torch connects several processes that are a job of one rank each."""
    if _is_spawned_beside_others():
        warnings.warn(
            "torch.multiprocessing.spawn has started several processes, and this is a job of one "
            "rank, for spawn sets no variables: call torch.distributed.init_process_group first, "
            "then hvd.init(torch.distributed.group.WORLD), or start the program with ringlet run",
            stacklevel=outside(),
        )
        return
    dist: Any = sys.modules.get("torch.distributed")
    if dist is None or not (dist.is_available() and dist.is_initialized()):
        return
    ranks = dist.get_world_size()
    if ranks > 1:
        warnings.warn(
            f"torch.distributed connects {ranks} ranks, and this is a job of one, for no launcher "
            "has said otherwise (torch.multiprocessing.spawn sets no variables): call "
            "hvd.init(torch.distributed.group.WORLD), or start the program with ringlet run",
            stacklevel=outside(),
        )


def _is_spawned_beside_others() -> bool:
    """Whether torch.multiprocessing.spawn has started this process, and others before it."""
    process: Any = multiprocessing.current_process()
    module = getattr(getattr(process, "_target", None), "__module__", None)
    number = next(iter(getattr(process, "_args", ())[1:2]), 0)  # behind the function
    return module == "torch.multiprocessing.spawn" and number > 0


def _establish(process_sets: Sequence[ProcessSet]) -> None:
    own = [process_set.find_ranks() for process_set in process_sets]
    expected = "a list of lists of ranks"
    everyone = json_exchange.gather(
        own, "init.process_sets", global_process_set, expected, _are_lists_of_ranks
    )
    for ranks in (ranks for row in zip_longest(*everyone) for ranks in row if ranks is not None):
        if find_process_set(ranks) is None:
            add_process_set(ranks)
    for i, (process_set, ranks) in enumerate(zip(process_sets, own, strict=True)):
        known = find_process_set(ranks)
        if known is None or known is global_process_set or ranks in own[:i]:
            raise InvalidArgument(f"init: process_sets lists the ranks {ranks} a second time")
        if known is not process_set and known.process_set_id is not None:
            process_set.adopt(known.process_set_id)


def _are_lists_of_ranks(value: Any) -> bool:
    return isinstance(value, list) and all(
        isinstance(ranks, list) and all(type(rank) is int for rank in ranks) for ranks in value
    )


def _communicator(comm: Any, transport: str | None) -> Communicator | None:
    if isinstance(comm, str):
        raise _no_communicator(comm)  # also in a job that runs, over whatever transport
    if comm is None or comm == [] or is_initialized():
        return None
    if isinstance(comm, Communicator):
        return comm
    if isinstance(comm, getattr(sys.modules.get("torch.distributed"), "ProcessGroup", ())):
        from ringlet.ring.rendezvous.torch_jobs import connect_group

        return connect_group(comm)
    if isinstance(comm, list | tuple | range) and all(isinstance(rank, int) for rank in comm):
        launched = detect(os.environ)
        if sorted(comm) == list(range(launched.size)):
            return None
        if (transport or launched.transport) != "mpi":
            raise ValueError(
                f"init(comm={list(comm)}): over {transport or launched.transport} a job has all "
                f"{launched.size} ranks; for some of them use process_sets"
            )
        from mpi4py import MPI

        comm = MPI.COMM_WORLD.Create_group(MPI.COMM_WORLD.group.Incl(sorted(comm)))
    if hasattr(comm, "Get_group"):
        from ringlet.ring.transports.mpi import MpiCommunicator

        return MpiCommunicator(comm)
    raise _no_communicator(comm)


def _no_communicator(comm: Any) -> TypeError:
    named = comm if comm in ("mpi", "gloo") else "gloo"
    return TypeError(
        "comm is an mpi4py communicator, a torch.distributed process group, a list of ranks or "
        f"None, not {comm!r}; for a transport use transport={named!r}"
    )
