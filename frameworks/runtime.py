"""The runtime: what ``init`` sets up and every adapter shares.

There is one per process, or one per thread for ranks that are threads of one process.
"""

from __future__ import annotations

import atexit
import importlib.util
import itertools
import json
import logging
import os
import socket
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, replace
from typing import Any, TypeVar

from ringlet.fusion import Engine, Limits
from ringlet.fusion.autotune.choice import ALL, names
from ringlet.fusion.devices.host import Place
from ringlet.fusion.limits import DIVISORS, UNKNOWN
from ringlet.network import MEASURE, hierarchical, measured_link, parse_link
from ringlet.ring.communicator import Communicator, Topology
from ringlet.ring.control.opening import open_control
from ringlet.ring.errors import LaunchError, RingError
from ringlet.ring.log import level_from, show
from ringlet.ring.rendezvous.connect import connect
from ringlet.ring.transports.gpu import GpuCommunicator
from ringlet.ring.transports.local import LocalCommunicator, this_thread
from ringlet.ring.variables import (
    OFF,
    ON,
    check,
    given,
    read_flag,
    read_number,
    read_whole,
    unknown,
)
from ringlet.ring.wire.keys import agreed_key

log = logging.getLogger("ringlet")
T = TypeVar("T")
ONE_HOST = 32  # of so many spans of large sums one is compared where no wire is between ranks


class NotInitialized(RingError, ValueError):
    """Something was asked for before ``init`` or after ``shutdown``."""


class Runtime:
    """A communicator, its topology, and the fusion engine on top of it.

    ``limits`` and ``wishes`` are rank 0's on every rank: "measure" asks for a measurement of the
    link between hosts, "hierarchical" for allreduces over two levels, "staged" for tensors on a GPU
    to go through host memory even over NCCL.
    """

    def __init__(
        self, comm: Communicator, limits: Limits, wishes: Collection[str] = frozenset()
    ) -> None:
        self.rank, self.size, self.transport = comm.rank, comm.size, comm.base.name
        hosts = [h.decode() for h in comm.allgather_bytes(socket.gethostname().encode())]
        self.topology = Topology.from_hosts(self.rank, hosts)
        # Everybody uses rank 0's limits: plans have to be the same on all ranks.
        told = comm.broadcast_bytes(json.dumps([asdict(limits), sorted(wishes)]).encode())
        agreed, wishes = json.loads(told)
        limits = Limits(**agreed)
        if "measure" in wishes:
            link = measured_link(comm, hosts)
            limits = replace(limits, latency=link.latency, bandwidth=link.bandwidth)
        if limits.verify_sums is None:
            limits = replace(limits, verify_sums=1 if len(set(hosts)) > 1 else ONE_HOST)
        if "hierarchical" in wishes:
            comm = hierarchical(comm, self.topology)
        self.secret = agreed_key(comm, "objects", os.environ)  # signs what is pickled
        places = [] if "staged" in wishes else places_of(comm.base)
        self.engine = Engine(comm, open_control, limits, places)
        self.pid = os.getpid()
        self._comm = comm
        self._counters: dict[tuple[str, int], itertools.count[int]] = {}
        self._joins = 0
        self.at_close: list[Callable[[], None]] = []
        self.extras: dict[str, Any] = {}  # what adapters keep for as long as this lives

    def unnamed(self, operation: str, process_set: int = 0) -> str:
        """Return a name for an operation without one.

        The ranks of a process set must call these in one order.
        """
        counter = self._counters.setdefault((operation, process_set), itertools.count())
        since = f"join{self._joins}." if self._joins else ""
        return f"{operation}.noname.{since}{next(counter)}"

    def title(self, name: str, label: str) -> str:
        """Return what timelines and reports call ``label``: a ``name``, numbered where it is taken.

        Ranks need not agree on it, and nothing that is saved depends on it.
        """
        titles: dict[str, str] = self.extras.setdefault("titles", {})
        numbered = (name if i == 1 else f"{name} {i}" for i in itertools.count(1))
        return next(title for title in numbered if titles.setdefault(title, label) == label)

    def join(self) -> int:
        """Take part with zeros until all ranks have joined; return who did so last."""
        last = self.engine.join()
        # Ranks that joined late have named more operations; from here on all count alike.
        self._joins += 1
        self._counters.clear()
        return last

    def close(self) -> None:
        """Shut the engine and the transport down. Idempotent."""
        self.engine.shutdown()
        while self.at_close:
            self.at_close.pop()()
        if self.pid == os.getpid():
            self._comm.close()


def places_of(comm: Communicator) -> list[Place]:
    """Return where tensors can lie for a transport, besides host memory: on its GPU."""
    if not isinstance(comm, GpuCommunicator):
        return []
    import cupy

    from ringlet.fusion.devices.cuda import CudaPlace

    return [CudaPlace(cupy, comm.device)]


def agreed_places(comm: Communicator) -> list[Place]:
    """Return ``places_of`` a communicator; none if rank 0 wants all staged. Collective."""
    staged = comm.broadcast_bytes(b"staged" if "staged" in wishes_from(os.environ) else b"")
    return [] if staged else places_of(comm.base)


_process: Runtime | None = None
# What ``init`` was asked for last: transport, autotune, join_divisor.
_asked: tuple[str | None, bool | str | None, str | None] = (None, None, None)
_thread = threading.local()


def limits_from(env: Mapping[str, str]) -> Limits:
    """Read the engine's limits from RINGLET_* variables, or Horovod's names for them.

    The link between hosts stays unknown where RINGLET_LINK is not set: a measurement decides how
    results are rounded, and they shall be reproducible by default. Raises ValueError naming the
    variable when a value is not a number, or negative, or no link, and ImportError when autotuning
    is not installed.
    """
    default = Limits()
    named = env.get("RINGLET_LINK", "")
    link = UNKNOWN if named in ("", MEASURE) else parse_link(named)
    autotune = _tuned(env)
    if autotune and importlib.util.find_spec("bayes_opt") is None:
        raise ImportError("autotuning needs more: pip install 'ringlet[tune]'")
    streams = _read(env, "NUM_NCCL_STREAMS", read_whole, default.streams)
    warning = _read(env, "STALL_CHECK_TIME_SECONDS", read_number, default.stall_warning)
    shutdown = _read(env, "STALL_SHUTDOWN_TIME_SECONDS", read_number, default.stall_shutdown)
    samples = default.autotune_samples
    return Limits(
        fusion_threshold=_read(env, "FUSION_THRESHOLD", read_whole, default.fusion_threshold),
        cycle_time=_read(env, "CYCLE_TIME", read_number, default.cycle_time * 1e3) / 1e3,
        seed=_read(env, "SEED", read_whole, default.seed),
        cache_capacity=_read(env, "CACHE_CAPACITY", read_whole, default.cache_capacity),
        streams=_read(env, "STREAMS", read_whole, streams),
        stall_warning=0.0 if _read(env, "STALL_CHECK_DISABLE", read_flag, False) else warning,
        stall_shutdown=shutdown,
        verify_sums=_read(env, "VERIFY_SUMS", read_whole, None),
        latency=link.latency,
        bandwidth=link.bandwidth,
        collective=_collective(env),
        join_divisor=_divisor(env),
        autotune=autotune,
        autotune_log=_read(env, "AUTOTUNE_LOG", _text, default.autotune_log),
        autotune_warmup=_read(env, "AUTOTUNE_WARMUP_SAMPLES", read_whole, default.autotune_warmup),
        autotune_steps=_read(env, "AUTOTUNE_STEPS_PER_SAMPLE", read_whole, default.autotune_steps),
        autotune_samples=_read(env, "AUTOTUNE_BAYES_OPT_MAX_SAMPLES", read_whole, samples),
    )


_FIXED_BY = {  # what is set stays, unless autotuning names it
    "fusion_threshold": ("FUSION_THRESHOLD",),
    "cycle_time": ("CYCLE_TIME",),
    "streams": ("STREAMS", "NUM_NCCL_STREAMS"),
    "cache": ("CACHE_CAPACITY",),
}


def _tuned(env: Mapping[str, str]) -> str:
    """Return what is to be tuned, by the names of ``Limits``: nothing, all, or a list."""
    text = _read(env, "AUTOTUNE", _text, "").strip()
    if text.lower() in ("", *OFF):
        return ""
    asked = [ALL] if text.lower() in ON else [name.strip() for name in text.split(",")]
    if ALL in asked:
        fixed = (n for n, variables in _FIXED_BY.items() if any(given(env, v) for v in variables))
        asked += [f"-{name}" for name in fixed if name not in asked]
    chosen = ",".join(asked)
    try:
        names(chosen)  # a misspelt one is an error on every rank, before they connect
    except ValueError as error:
        raise ValueError(f"RINGLET_AUTOTUNE={text!r}: {error}, nor yes or no") from None
    return chosen


def _collective(env: Mapping[str, str]) -> str:
    named = env.get("RINGLET_COLLECTIVE", "auto")
    known = ("auto", "allgather", "scatter_reduce")
    if named not in known:
        raise ValueError(f"RINGLET_COLLECTIVE={named!r} is not one of {', '.join(known)}")
    return named


def _divisor(env: Mapping[str, str]) -> str:
    named = env.get("RINGLET_JOIN_DIVISOR", "all")
    if named not in DIVISORS:
        raise ValueError(f"RINGLET_JOIN_DIVISOR={named!r} is not one of {', '.join(DIVISORS)}")
    return named


def wishes_from(env: Mapping[str, str]) -> set[str]:
    """Read what a ``Runtime`` shall do besides: "measure" the link, be "hierarchical", "staged"."""
    asked = {
        "measure": env.get("RINGLET_LINK") == MEASURE,
        "hierarchical": _read(env, "HIERARCHICAL_ALLREDUCE", read_flag, False),
        "staged": read_flag("RINGLET_STAGED", env.get("RINGLET_STAGED", "")),
    }
    return {wish for wish, is_asked in asked.items() if is_asked}


def _read(env: Mapping[str, str], name: str, reader: Callable[[str, str], T], default: T) -> T:
    """Read RINGLET_``name``, or else HOROVOD_``name``, if there is one."""
    found = given(env, name)
    return default if found is None else reader(*found)


def _text(variable: str, text: str) -> str:
    return text


def init(
    transport: str | None = None,
    comm: Communicator | None = None,
    autotune: bool | str | None = None,
    join_divisor: str | None = None,
) -> Runtime:
    """Connect with the other ranks and start the engine; a second call changes nothing.

    The environment says how: ``ringlet run``, torchrun, mpiexec and Slurm are understood, and
    without a launcher there is one rank. ``transport`` ("mpi", "gloo") overrides, or a ``comm``
    that exists. ``autotune`` and ``join_divisor`` stand for RINGLET_AUTOTUNE and
    RINGLET_JOIN_DIVISOR. RINGLET_LOG_LEVEL, or HOROVOD_LOG_LEVEL,
    sets the level of logger "ringlet". Raises LaunchError when launcher and transport disagree on
    the size, or in a process that was forked from one that had called this; TransportUnavailable
    when something is not installed; ValueError when this was called before with another transport,
    what was asked for cannot be, or variables of the environment are misspelt or wrong.
    """
    global _process, _asked
    existing = _current()
    if existing is not None and existing.pid == os.getpid():
        wanted = transport or (comm.base.name if comm is not None else existing.transport)
        if wanted != existing.transport:
            raise ValueError(
                f"already initialised with transport {existing.transport!r}; call shutdown() "
                f"before init(transport={wanted!r})"
            )
        return existing
    if existing is not None and existing.size > 1:
        raise LaunchError(
            f"this process was forked from rank {existing.rank} after init(); it cannot be a rank "
            "itself. Start worker processes with the 'spawn' method, or before init()"
        )
    options = {"RINGLET_AUTOTUNE": autotune, "RINGLET_JOIN_DIVISOR": join_divisor}
    asked = {name: str(value) for name, value in options.items() if value is not None}
    check(os.environ)
    limits, wishes = limits_from({**os.environ, **asked}), wishes_from(os.environ)
    level = level_from(os.environ)
    if comm is None:
        comm, _asked = connect(transport), (transport, autotune, join_divisor)
    threads = isinstance(comm, LocalCommunicator) and comm is this_thread()
    show(level, None if threads else comm.rank)
    if comm.rank == 0 and (strangers := unknown(os.environ)):
        log.warning("%s: no variable of Ringlet's, and not read", ", ".join(strangers))
    try:
        runtime = Runtime(comm, limits, wishes)
    except BaseException:
        if not threads:
            comm.close()  # others wait for this rank
        raise
    if isinstance(comm, LocalCommunicator) and threads:
        _thread.runtime = runtime
        comm.before_close = runtime.engine.shutdown
    else:
        _process = runtime
        atexit.register(runtime.close)
    from ringlet.observe.environment import switch_on  # which needs this module

    try:
        switch_on(runtime, os.environ)
    except BaseException:
        shutdown()
        raise
    return runtime


def init_again() -> Runtime:
    """Leave, and join anew as ``init`` was called last: in an elastic job, with another rank."""
    shutdown()
    transport, autotune, join_divisor = _asked
    return init(transport, None, autotune, join_divisor)


def shutdown() -> None:
    """Leave: what is in flight fails on the ranks that wait for it. Idempotent."""
    global _process
    runtime = _current()
    if runtime is None:
        return
    runtime.close()
    if getattr(_thread, "runtime", None) is runtime:
        _thread.runtime = None
    else:
        atexit.unregister(runtime.close)
        _process = None


def is_initialized() -> bool:
    """Whether ``init`` was called, and ``shutdown`` was not."""
    return _current() is not None


def current() -> Runtime:
    """Return the runtime of this thread or process; NotInitialized when there is none."""
    runtime = _current()
    if runtime is None:
        raise NotInitialized("ringlet has not been initialised; call init() first")
    return runtime


def _current() -> Runtime | None:
    runtime: Runtime | None = getattr(_thread, "runtime", None)
    return runtime if runtime is not None else _process
