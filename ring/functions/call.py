"""``ringlet.run``: call a function on every rank of a new job and collect what it returns."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ringlet.ring.callers import public
from ringlet.ring.descriptors import more_descriptors
from ringlet.ring.elastic.discovery import Discovery
from ringlet.ring.elastic.driver import Driver
from ringlet.ring.elastic.rules import Rules
from ringlet.ring.errors import LaunchError
from ringlet.ring.functions.call_checks import check_arguments
from ringlet.ring.functions.elastic_run import elastic_plan, elastic_results
from ringlet.ring.functions.horovod import translated
from ringlet.ring.functions.parcels import failure, packed_call, result, worker_command
from ringlet.ring.hosts.hosts import Host, chosen_hosts
from ringlet.ring.hosts.remote import Reach
from ringlet.ring.launch.job import Job
from ringlet.ring.launch.time_limits import time_limit
from ringlet.ring.processes.output import Printer
from ringlet.ring.transports.local import run_local

R = TypeVar("R")


@public
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
    start_timeout: float | None = None,
    output_filename: str | None = None,
    verbose: bool = False,
    min_np: int | None = None,
    max_np: int | None = None,
    host_discovery_script: str | None = None,
    slots: int | None = None,
    reset_limit: int | None = None,
    elastic_timeout: float | None = None,
    cooldown_range: Sequence[float] | None = None,
    **horovods: Any,
) -> list[R]:
    """Call ``fn(*args, **kwargs)`` on ``np`` new ranks; return the results by rank.

    Every rank is a fresh process that can call ``ringlet.ring.rendezvous.connect.connect``; what it
    prints appears here with the rank in front. With ``transport="local"`` ranks are threads of this
    process instead, nothing is pickled, and an exception is raised as it is. Hosts are refused
    then, and so is what lets ranks come and go; ``env``, ``output_filename``, ``verbose``,
    ``executable``, ``start_timeout`` and what says how to reach hosts do nothing. Otherwise
    function, arguments and results are pickled, with cloudpickle if it is installed, and travel
    under the job's key.

    Ranks run here, or on ``hosts`` ("host1:4,host2:4") or those of ``hostfile``; all their slots
    unless ``np`` says how many. What says how to reach them is as for ``ringlet run``, and
    ``env`` is set for every rank. Arguments of ``horovod.run`` are understood as well:
    ``num_proc``, ``use_gloo``, ``use_mpi``, ``network_interfaces``, ``func``, and ``executable``,
    the Python of the ranks. Raises WorkerFailed when a rank raises or ends, LaunchError when the
    job cannot start, something cannot be pickled or an argument is of the wrong form; TypeError for
    ``args`` or ``kwargs`` that are none.

    With ``min_np``, ``max_np`` or a ``host_discovery_script`` ranks come and go, as the flags of
    ``ringlet run`` with these names say (``cooldown_range``: --blacklist-cooldown-range). Then
    ``fn`` is what calls a function of ``elastic.run``, and the results are those of the last ranks.
    """
    arguments = [name for name in locals() if name != "horovods"]
    ours = {
        "np": np, "min_np": min_np, "max_np": max_np, "transport": transport,
        "network_interface": network_interface,
    }  # fmt: skip
    meant = ours | translated(horovods, ours, arguments)
    np, min_np, max_np, transport, network_interface = (meant[name] for name in ours)
    fn = meant.get("func", fn)
    if not callable(fn):
        raise TypeError(f"run() takes a function to call on every rank, not {fn!r}")
    check_arguments(args, kwargs, np, hosts, hostfile, env, start_timeout)
    places = chosen_hosts(hosts, hostfile)
    plan = elastic_plan(
        np,
        places,
        min_np=min_np,
        max_np=max_np,
        host_discovery_script=host_discovery_script,
        slots=slots,
        reset_limit=reset_limit,
        elastic_timeout=elastic_timeout,
        cooldown_range=cooldown_range,
    )
    size = np if np is not None else sum(host.slots for host in places) or 1
    if transport == "local":
        if plan is not None:
            raise LaunchError("transport 'local' runs ranks as threads, which do not come and go")
        if places:
            raise LaunchError("transport 'local' runs ranks as threads here, not on hosts")
        return _in_threads(fn, args, dict(kwargs or {}), size)
    interfaces = tuple(name for name in (network_interface or "").split(",") if name)
    if start_timeout is None:
        start_timeout = time_limit("start_timeout", Reach.start_timeout)
    program = _Program(
        worker_command(str(meant.get("executable", sys.executable))),
        packed_call(fn, tuple(args), dict(kwargs or {})),
        transport,
        env or {},
        Reach(rsh, ssh_port, ssh_identity_file, interfaces, start_timeout, tuple(env or ())),
        output_filename,
        verbose,
    )
    return _fixed_job(program, size, places) if plan is None else _elastic_job(program, *plan)


@dataclass(frozen=True)
class _Program:
    """What the ranks of a job run, and how they are reached and heard.

    ``command`` calls the function of ``call``; the others are arguments of ``run``.
    """

    command: list[str]
    call: bytes
    transport: str | None
    env: Mapping[str, str]
    reach: Reach
    output_filename: str | None
    verbose: bool


def _in_threads(
    fn: Callable[..., R], args: Sequence[Any], kwargs: Mapping[str, Any], size: int
) -> list[R]:
    return run_local(lambda _: fn(*args, **kwargs), size)


def _elastic_job(program: _Program, rules: Rules, discovery: Discovery) -> list[Any]:
    with more_descriptors():
        driver = Driver(
            program.command, rules, discovery, program.transport, program.env, program.reach
        )
        printer = Printer(rules.np, True, program.output_filename, come=True)
        return elastic_results(driver, printer, program.call, program.verbose)


def _fixed_job(program: _Program, size: int, hosts: Sequence[Host]) -> list[Any]:
    with more_descriptors():
        job = Job(
            program.command,
            size,
            program.transport,
            program.env,
            hosts=hosts,
            reach=program.reach,
            output=program.output_filename,
            verbose=program.verbose,
        )
        outcome = job.run({"call": program.call})
    if outcome.interrupted:
        raise KeyboardInterrupt
    if outcome.rank is not None:
        raise failure(job.kv_store, outcome.rank, outcome.rank, outcome.reason)
    return [result(job.kv_store, job.key, rank, rank) for rank in range(size)]
