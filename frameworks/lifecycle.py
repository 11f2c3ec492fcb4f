"""Joining and leaving a job, as every adapter offers it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringlet.process_sets import ProcessSet, add_process_set
from ringlet.ring.communicator import Communicator
from ringlet.runtime import Runtime
from ringlet.runtime import init as start


def init(
    comm: Any = None,
    process_sets: Sequence[ProcessSet] | str | None = None,
    transport: str | None = None,
    autotune: bool | str | None = None,
) -> Runtime:
    """Join the job that a launcher started; a second call changes nothing. Collective.

    - ``comm``: an mpi4py communicator whose ranks the job consists of; usually None.
    - ``process_sets``: sets to add at once, the same on every rank. ("dynamic", which Horovod
      needs before sets can be added later, is accepted: they always can.)
    - ``transport``: "mpi" or "gloo", where the environment should not decide.
    - ``autotune``: True to tune the engine while training goes on, or what of it, as in
      "fusion_threshold,streams"; rank 0's counts. None leaves it to RINGLET_AUTOTUNE.

    Raises LaunchError when launcher and transport disagree on the size, TransportUnavailable when
    something is not installed, TypeError for a ``comm`` that is no communicator,
    ValueError for an ``autotune`` that names what cannot be tuned here.
    """
    if isinstance(process_sets, str) and process_sets.lower() != "dynamic":
        raise ValueError(f"process_sets is a list of ProcessSet or 'dynamic', not {process_sets!r}")
    runtime = start(transport, _communicator(comm), autotune)
    if process_sets is not None and not isinstance(process_sets, str):
        for process_set in process_sets:
            if process_set.process_set_id is None:
                add_process_set(process_set)
    return runtime


def _communicator(comm: Any) -> Communicator | None:
    if comm is None or comm == []:
        return None
    if isinstance(comm, Communicator):
        return comm
    if hasattr(comm, "Get_group"):
        from ringlet.ring.mpi import MpiCommunicator

        return MpiCommunicator(comm)
    raise TypeError(
        f"comm is an mpi4py communicator or None, not {comm!r}; for some of the ranks use "
        "process_sets, for a transport transport='gloo'"
    )
