"""``ringlet.run``: call a function on every rank of a new job and collect what it returns."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from ringlet.ring.errors import LaunchError
from ringlet.ring.hosts.hosts import chosen_hosts
from ringlet.ring.hosts.remote import Reach
from ringlet.ring.launch.horovod import translated
from ringlet.ring.launch.job import Job
from ringlet.ring.launch.signed_pickle import error_name, pickler, result_name
from ringlet.ring.transports.local import run_local
from ringlet.ring.wire.framing import unseal

R = TypeVar("R")

# What the interpreter runs of a rank's task: install_as_horovod() puts its own runner in front.
runner: list[str] = []


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
    fn: Callable[..., R] | None = None,
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
    **horovods: Any,
) -> list[R]:
    """Call ``fn(*args, **kwargs)`` on ``np`` new ranks; return the results by rank.

    Every rank is a fresh process that can call ``ringlet.ring.rendezvous.connect.connect``; what it
    prints appears here with the rank in front. With ``transport="local"`` ranks are threads of this
    process instead, nothing is pickled, and an exception is raised as it is. Otherwise function,
    arguments and results are pickled, with cloudpickle if it is installed, and travel under the
    job's key.

    Ranks run here, or on ``hosts`` ("host1:4,host2:4") or those of ``hostfile``; all their slots
    unless ``np`` says how many. What says how to reach them is as for ``ringlet run``, and
    ``env`` is set for every rank. Arguments of ``horovod.run`` are understood as well:
    ``num_proc``, ``use_gloo``, ``use_mpi``, ``network_interfaces``, ``func``, and ``executable``,
    the Python of the ranks. Raises WorkerFailed when a rank raises or ends, LaunchError when the
    job cannot start or something cannot be pickled.
    """
    ours = {"np": np, "transport": transport, "network_interface": network_interface}
    meant = translated(horovods, ours)
    np, transport, network_interface = (meant.get(name, value) for name, value in ours.items())
    fn = meant.get("func", fn)
    if not callable(fn):
        raise TypeError(f"run() takes a function to call on every rank, not {fn!r}")
    places = chosen_hosts(hosts, hostfile)
    size = np if np is not None else sum(host.slots for host in places) or 1
    if transport == "local":
        if places:
            raise LaunchError("transport 'local' runs ranks as threads here, not on hosts")
        function = fn
        return run_local(lambda _: function(*args, **dict(kwargs or {})), size)
    interfaces = tuple(name for name in (network_interface or "").split(",") if name)
    job = Job(
        [
            str(meant.get("executable", sys.executable)),
            *("-P", *runner, "-m", "ringlet.ring.launch.function_worker"),
        ],
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
        sealed = job.kv_store.collect(result_name(rank))
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
    text = (job.kv_store.collect(error_name(rank)) or b"").decode(errors="replace")
    return WorkerFailed(f"rank {rank} raised\n{text}" if text else reason, rank, text)
