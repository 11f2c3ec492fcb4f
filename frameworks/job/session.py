"""The runtime: what ``init`` sets up and every adapter shares.

There is one per process, or one per thread for ranks that are threads of one process.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

from ringlet.compressors.core.payload import WIRE_VERSION
from ringlet.fusion import Engine, Limits
from ringlet.fusion.devices.host import Place
from ringlet.fusion.observe.probe import measure
from ringlet.fusion.requests.series import Series
from ringlet.job.kernel_cache import refuse_strangers_kernels
from ringlet.job.link_settings import hierarchical, measured_link
from ringlet.job.rank_mark import mark_rank, refuse_children, unmark_rank
from ringlet.job.settings import limits_from, wishes_from
from ringlet.job.warm_up import warm_up
from ringlet.metrics.switches import switch_on
from ringlet.ring.communicator import Communicator, Topology
from ringlet.ring.control.opening import open_control
from ringlet.ring.errors import MORE_THREADS, LaunchError, PeerLost, RingError, lacks_threads
from ringlet.ring.log import level_from, show
from ringlet.ring.rendezvous.connect import connect
from ringlet.ring.rendezvous.epochs import is_elastic, note_lost, tell_met, told_specs
from ringlet.ring.rendezvous.exit_hooks import tell_exit
from ringlet.ring.rendezvous.unread_variables import passed_over
from ringlet.ring.transports.gpu import GpuCommunicator
from ringlet.ring.transports.local import LocalCommunicator, this_thread
from ringlet.ring.variables import check, unknown
from ringlet.ring.wire.keys import agreed_key, fresh_key

log = logging.getLogger("ringlet")
ONE_HOST = 32  # of so many spans of large sums one is compared where no wire is between ranks


class NotInitialized(RingError, ValueError):
    """Something was asked for before ``init`` or after ``shutdown``."""


class Terms(NamedTuple):
    """What ranks have agreed on before they make an engine over ``comm``."""

    comm: Communicator  # over two levels where rank 0 wishes that
    topology: Topology
    limits: Limits
    wishes: frozenset[str]
    identity: str  # the same on these ranks alone
    states: tuple[Any, ...]  # what each rank holds; unchecked

    def places(self) -> list[Place]:
        """Return where tensors can lie, besides host memory."""
        return [] if "staged" in self.wishes else places_of(self.comm.base)


def agreed_terms(
    comm: Communicator,
    limits: Limits,
    wishes: Collection[str] = frozenset(),
    holds: Sequence[str] = (),
) -> Terms:
    """Agree on rank 0's ``limits`` and ``wishes``, and do what these ask for. Collective.

    Raises LaunchError where ranks make other bytes of a tensor, and RingError where the link cannot
    be measured, both the same on every rank.
    """
    own = [socket.gethostname(), os.environ.get("RINGLET_NODE"), WIRE_VERSION, list(holds)]
    told_by_all = [json.loads(told) for told in comm.allgather_bytes(json.dumps(own).encode())]
    check_wire_versions([told[2] for told in told_by_all])  # others may tell less, or more
    names, nodes, _, states = zip(*told_by_all, strict=True)
    places = zip(names, nodes, strict=True)
    hosts = [name if node is None else f"{name}/{node}" for name, node in places]
    topology = Topology.from_hosts(comm.rank, hosts, names)
    # Everybody uses rank 0's limits: plans have to be the same on all ranks.
    mine = [asdict(limits), sorted(wishes), secrets.token_hex(8)]
    told = comm.broadcast_bytes(json.dumps(mine).encode())
    agreed, wishes, identity = json.loads(told)
    limits = Limits(**agreed)
    if "measure" in wishes:
        link = measured_link(comm, hosts)
        limits = replace(limits, latency=link.latency, bandwidth=link.bandwidth)
    if limits.verify_sums is None:
        limits = replace(limits, verify_sums=1 if len(set(hosts)) > 1 else ONE_HOST)
    if "hierarchical" in wishes:
        comm = hierarchical(comm, topology)
    return Terms(comm, topology, limits, frozenset(wishes), identity, states)


class Runtime:
    """A communicator, its topology, and the fusion engine on top of it.

    ``limits`` and ``wishes`` are rank 0's on every rank: "measure" asks for a measurement of the
    link between hosts, "hierarchical" for allreduces over two levels, "staged" for tensors on a GPU
    to go through host memory even over NCCL, "network" for a look at the network, for metrics.
    ``holds`` names the state of training that this rank brings to an elastic job's next epoch.
    """

    def __init__(
        self,
        comm: Communicator,
        limits: Limits,
        wishes: Collection[str] = frozenset(),
        holds: Sequence[str] = (),
    ) -> None:
        self.rank, self.size, self.transport = comm.rank, comm.size, comm.base.name
        terms = agreed_terms(comm, limits, wishes, holds)
        comm, self.topology, self.identity = terms.comm, terms.topology, terms.identity
        self.states = terms.states  # what each rank ``holds``; unchecked
        key = agreed_key(comm, "objects", os.environ)
        self.secret = fresh_key(comm, key)  # signs what is pickled
        # Before any rank goes on: what its program does would be taken for the network.
        network = measure(comm) if "network" in terms.wishes else None
        self.engine = Engine(comm, open_control, terms.limits, terms.places(), network)
        self.pid = os.getpid()
        self._comm = comm
        self._series: dict[tuple[str, int], Series] = {}
        self.joins = 0  # how often all ranks have met in one
        self.at_close: list[Callable[[], None]] = []
        self.extras: dict[str, Any] = {}  # what adapters keep for as long as this lives
        self.lasting: dict[str, Any] = {}  # and among the ranks of an elastic job's later epochs

    def unnamed(self, operation: str, process_set: int = 0) -> str:
        """Return a name for an operation without one.

        The ranks of a process set must call these in one order.
        """
        return self.series(operation, process_set).name()

    def series(self, operation: str, process_set: int = 0) -> Series:
        """Return what numbers operations without names: another one after each ``join``."""
        found = self._series.get((operation, process_set))
        if found is None:
            since = f"join{self.joins}." if self.joins else ""
            found = self._series.setdefault((operation, process_set), Series(operation, since))
        return found

    def title(self, name: str) -> str:
        """Return a new title for timelines and reports: ``name``, numbered from the second one on.

        Ranks need not agree on it, and nothing that is saved depends on it.
        """
        counts: dict[str, int] = self.extras.setdefault("titles", {})
        count = counts[name] = counts.get(name, 0) + 1
        return name if count == 1 else f"{name} {count}"

    def join(self) -> int:
        """Take part with zeros until all ranks have joined; return who did so last."""
        last = self.engine.join()
        # Ranks that joined late have named more operations; from here on all count alike.
        self.joins += 1
        self._series.clear()
        return last

    def close(self) -> None:
        """Shut the engine and the transport down. Idempotent."""
        self.engine.shutdown()
        while self.at_close:
            self.at_close.pop()()
        if self.pid == os.getpid():
            self._comm.close()


def check_wire_versions(versions: Sequence[int]) -> None:
    """Raise LaunchError, the same on every rank, unless all make the same bytes of a tensor."""
    if len(set(versions)) > 1:
        told = "; ".join(
            f"version {version} on rank(s) "
            + ", ".join(str(rank) for rank, each in enumerate(versions) if each == version)
            for version in sorted(set(versions))
        )
        raise LaunchError(
            f"ranks compress in different wire formats ({told}): install one Ringlet everywhere"
        )


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


def agreed_seed(comm: Communicator) -> int:
    """Return rank 0's seed of compressors' random numbers. Collective."""
    return int(comm.broadcast_bytes(str(limits_from(os.environ).seed).encode()))


_process: Runtime | None = None
_left = False  # whether a rank of this process has left
# What ``init`` was asked for last: transport, autotune, join_divisor.
_asked: tuple[str | None, bool | str | None, str | None] = (None, None, None)
_joined = False  # whether this process has been a rank


class _Thread(threading.local):
    """The runtime of a rank that is a thread."""

    runtime: Runtime | None = None


_thread = _Thread()


def init(
    transport: str | None = None,
    comm: Communicator | None = None,
    autotune: bool | str | None = None,
    join_divisor: str | None = None,
    holds: Sequence[str] = (),
) -> Runtime:
    """Connect with the other ranks and start the engine; a second call changes nothing.

    The environment says how: ``ringlet run``, torchrun, mpiexec and Slurm are understood, and
    without a launcher there is one rank. ``transport`` ("mpi", "gloo") overrides, or a ``comm``
    that exists. ``autotune`` and ``join_divisor`` stand for RINGLET_AUTOTUNE and
    RINGLET_JOIN_DIVISOR. RINGLET_LOG_LEVEL, or HOROVOD_LOG_LEVEL, sets the level of logger
    "ringlet". Rank 0 warns of Horovod's variables that nothing reads. ``holds`` is for the Runtime.

    Raises LaunchError when launcher and transport disagree on the size, or in a process that was
    started from one that had called this; TransportUnavailable when something is not installed;
    ValueError when this was called before with another transport, what was asked for cannot be, or
    variables of the environment are misspelt or wrong.
    """
    global _process, _asked, _joined
    existing = _current()
    if existing is not None and existing.pid == os.getpid():
        _refuse_another_transport(existing, transport, comm)
        return existing
    if existing is not None and existing.size > 1:
        raise LaunchError(
            f"this process was forked from rank {existing.rank} after init(); it cannot be a rank "
            "itself. Start worker processes with the 'spawn' method, or before init()"
        )
    if comm is None:
        refuse_children()
    options = {"RINGLET_AUTOTUNE": autotune, "RINGLET_JOIN_DIVISOR": join_divisor}
    asked = {name: str(value) for name, value in options.items() if value is not None}
    check(os.environ)
    refuse_strangers_kernels(os.environ)
    limits, wishes = limits_from({**os.environ, **asked}), wishes_from(os.environ)
    level = level_from(os.environ)
    if comm is None and is_elastic() and not _joined and (specs := told_specs()) is not None:
        warm_up(specs)
    runtime, in_thread = _connected(transport, comm, limits, wishes, level, holds)
    if comm is None:
        _asked = transport, autotune, join_divisor
        _joined = True
        if is_elastic():
            tell_met()
    if runtime.rank == 0 and (strangers := unknown(os.environ)):
        log.warning("%s: no variable of Ringlet's, and not read", ", ".join(strangers))
    if runtime.rank == 0 and runtime.size > 1:
        for said in passed_over(os.environ, runtime.transport):
            log.warning("%s", said)
    if in_thread:
        _thread.runtime = runtime
    else:
        _process = runtime
        atexit.register(runtime.close)
        atexit.register(tell_exit)  # which runs before
        if comm is None and runtime.size > 1:
            mark_rank()
    try:
        switch_on(runtime.engine, runtime.topology, os.environ)
    except BaseException:
        shutdown()
        raise
    return runtime


def _refuse_another_transport(
    existing: Runtime, transport: str | None, comm: Communicator | None
) -> None:
    """Raise ValueError where ``init`` is called again for another transport."""
    wanted = transport or (comm.base.name if comm is not None else existing.transport)
    if wanted != existing.transport:
        raise ValueError(
            f"already initialised with transport {existing.transport!r}; call shutdown() "
            f"before init(transport={wanted!r})"
        )


def _connected(
    transport: str | None,
    given: Communicator | None,
    limits: Limits,
    wishes: Collection[str],
    level: int | None,
    holds: Sequence[str],
) -> tuple[Runtime, bool]:
    """Connect, unless a communicator is ``given``, and meet the other ranks.

    Returns the runtime, and whether this rank is a thread of a process that holds several. In an
    elastic job a rank may be lost before all have met: the others meet again in the next epoch.
    """
    while True:
        comm = connect(transport) if given is None else given
        in_thread = isinstance(comm, LocalCommunicator) and comm is this_thread()
        show(level, None if in_thread else comm.rank)
        try:
            runtime = Runtime(comm, limits, wishes, holds)
        except BaseException as error:
            if not in_thread:
                comm.close()  # others wait for this rank
            if lacks_threads(error) and not isinstance(error, RingError):
                raise LaunchError(f"rank {comm.rank} cannot start: {MORE_THREADS}") from error
            if given is not None or not is_elastic() or not isinstance(error, PeerLost):
                raise
            note_lost(error.ranks)
            continue
        if in_thread:
            comm.before_close = runtime.engine.shutdown
        return runtime, in_thread


def init_again(holds: Sequence[str] = ()) -> Runtime:
    """Leave, and join anew as ``init`` was called last: in an elastic job, with another rank.

    All ranks learn what each ``holds`` as they meet, before their programs can do anything.
    """
    before = _current()
    shutdown()
    transport, autotune, join_divisor = _asked
    runtime = init(transport, None, autotune, join_divisor, holds)
    if before is not None:
        runtime.lasting = before.lasting
    return runtime


def shutdown() -> None:
    """Leave: what is in flight fails on the ranks that wait for it. Idempotent."""
    global _process, _left
    runtime = _current()
    if runtime is None:
        return
    _left = True
    runtime.close()
    if _thread.runtime is runtime:
        _thread.runtime = None
    else:
        atexit.unregister(runtime.close)
        atexit.unregister(tell_exit)
        _process = None
        unmark_rank()


def is_initialized() -> bool:
    """Whether ``init`` was called, and ``shutdown`` was not."""
    return _current() is not None


def current() -> Runtime:
    """Return the runtime of this thread or process; NotInitialized when there is none."""
    runtime = _current()
    if runtime is None:
        if _left:
            raise NotInitialized("ringlet was shut down; call init() first, to begin anew")
        raise NotInitialized("ringlet has not been initialised; call init() first")
    return runtime


def _current() -> Runtime | None:
    runtime = _thread.runtime
    return runtime if runtime is not None else _process
