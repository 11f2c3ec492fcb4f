"""``ringlet.run``: call a function on every rank of a new job and collect what it returns."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ringlet.ring.errors import LaunchError
from ringlet.ring.launch.hosts import chosen_hosts
from ringlet.ring.launch.job import Job
from ringlet.ring.launch.parcel import error_name, pickler, result_name
from ringlet.ring.launch.remote import Reach
from ringlet.ring.local import run_local
from ringlet.ring.wire.sealed import unseal

R = TypeVar("R")


class WorkerFailed(LaunchError):
    """The function did not return on a rank.

    ``rank`` is the rank that failed first; ``traceback`` is the text of the exception's traceback
    there, empty if the process ended without one.
    """

    def __init__(self, message: str, rank: int, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback

    def __reduce__(self) -> tuple[type[WorkerFailed], tuple[str, int, str]]:
        return type(self), (str(self), self.rank, self.traceback)


def run(
    fn: Callable[..., R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int | None = None,
    transport: str | None = None,
    *,
    hosts: str | None = None,
    hostfile: str | None = None,
    env: Mapping[str, str] | None = None,
    rsh: str | None = None,
    ssh_port: int | None = None,
    ssh_identity_file: str | None = None,
    network_interface: str | None = None,
    start_timeout: float = 120.0,
    output_filename: str | None = None,
    verbose: bool = False,
) -> list[R]:
    """Call ``fn(*args, **kwargs)`` on ``np`` new ranks; return the results by rank.

    Every rank is a fresh process that can ``ringlet.ring.connect``; what it prints appears here
    with the rank in front. With ``transport="local"`` ranks are threads of this process instead,
    nothing is pickled, and an exception is raised as it is. Otherwise function, arguments and
    results are pickled, with cloudpickle if it is installed, and travel under the job's key.

    Ranks run here, or on ``hosts`` ("host1:4,host2:4") or those of ``hostfile``; all their slots
    unless ``np`` says how many. What says how to reach them is as for ``ringlet run``, and
    ``env`` is set for every rank. Raises WorkerFailed when a rank raises or ends, LaunchError when
    the job cannot start or something cannot be pickled.
    """
    places = chosen_hosts(hosts, hostfile)
    size = np if np is not None else sum(host.slots for host in places) or 1
    if transport == "local":
        if places:
            raise LaunchError("transport 'local' runs ranks as threads here, not on hosts")
        return run_local(lambda _: fn(*args, **dict(kwargs or {})), size)
    interfaces = tuple(name for name in (network_interface or "").split(",") if name)
    job = Job(
        [sys.executable, "-P", "-m", "ringlet.ring.launch.task"],
        size,
        transport,
        env,
        hosts=places,
        reach=Reach(rsh, ssh_port, ssh_identity_file, interfaces, start_timeout, tuple(env or ())),
        output=output_filename,
        verbose=verbose,
    )
    calls = {"call": _pickled(fn, tuple(args), dict(kwargs or {}))}
    outcome = job.run(calls)
    if outcome.interrupted:
        raise KeyboardInterrupt
    if outcome.rank is not None:
        raise _failure(job, outcome.rank, outcome.reason)
    results: list[R] = []
    for rank in range(size):
        sealed = job.shelf.collect(result_name(rank))
        if sealed is None:
            raise _failure(job, rank, f"rank {rank} ended without a result")
        try:
            results.append(pickle.loads(unseal(job.key, result_name(rank), sealed)))
        except Exception as error:
            raise LaunchError(f"the result of rank {rank} cannot be read: {error}") from error
    return results


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    module = pickler()
    remedy = ""
    if module is pickle:
        remedy = "; pip install 'ringlet[run]' for lambdas, local functions and those of a script"
        if getattr(fn, "__module__", None) == "__main__":
            raise LaunchError(f"{fn!r} is defined in the main script{remedy}")
    try:
        call = module.dumps((fn, args, kwargs))
    except Exception as error:  # whatever an object's own reduction raises
        raise LaunchError(
            f"the function or its arguments cannot be sent: {error}{remedy}"
        ) from error
    return pickle.dumps(sys.path) + bytes(call)


def _failure(job: Job, rank: int, reason: str) -> WorkerFailed:
    text = (job.shelf.collect(error_name(rank)) or b"").decode(errors="replace")
    return WorkerFailed(f"rank {rank} raised\n{text}" if text else reason, rank, text)
