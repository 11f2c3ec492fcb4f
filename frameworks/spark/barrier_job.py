"""``ringlet.spark.run``: the tasks of a barrier stage are the ranks, and return what these do."""

from __future__ import annotations

import json
import os
import pickle
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pyspark
from pyspark.sql import SparkSession

from ringlet.job.placed_call import Account, account_of, called, packed, results
from ringlet.ring.callers import debugging, public
from ringlet.ring.errors import LaunchError
from ringlet.ring.functions import WorkerFailed
from ringlet.ring.hosts.interfaces import find_interface
from ringlet.ring.placed.ranking import standings
from ringlet.ring.placed.store_server import StoreServer
from ringlet.ring.placed.ticket import Ticket, tickets
from ringlet.ring.wire.addresses import address_towards, addresses_of
from ringlet.ring.wire.kv_client import Client
from ringlet.ring.wire.kv_store import Op

OLDEST = (4, 0)  # whose mapInArrow knows barriers, over Spark Connect too
TIMEOUT = 600.0  # seconds for all tasks to run at once, which Spark's own patience is too
_LOOK = 0.2  # seconds between two looks whether tasks have come


@dataclass(frozen=True)
class _Order:
    """What a task needs: the call, and a ticket whose standing is still to be found."""

    call: bytes
    ticket: Ticket


@public
def run(
    fn: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    start_timeout: float | None = None,
    use_mpi: bool | None = None,
    use_gloo: bool | None = None,
    extra_mpi_args: str | None = None,
    env: Mapping[str, str] | None = None,
    stdout: Any = None,
    stderr: Any = None,
    verbose: int = 1,
    nics: str | Sequence[str] | None = None,
    prefix_output_with_timestamp: bool = False,
    executable: str | None = None,
    *,
    restarts: int = 0,
    transport: str | None = None,
    spark: SparkSession | None = None,
) -> list[Any]:
    """Call ``fn(*args, **kwargs)`` on ``num_proc`` ranks; return the results by rank.

    Ranks are tasks that Spark runs at once (a barrier stage), in its executors' Python workers,
    which are as before afterwards. ``num_proc`` None: as many as Spark's default parallelism.
    ``env`` is set for every rank, ``nics`` are network interfaces in order of preference,
    ``transport`` is gloo (None) or nccl, ``spark`` the session (None: the active one). After a
    failure all is run anew, ``restarts`` times at most, because Spark does not repeat such stages.
    What ranks print is in the logs of their executors; ``verbose`` and ``use_gloo`` change nothing.

    Raises WorkerFailed, with the text of the traceback, when a rank raises; LaunchError when Spark
    ends the tasks, or the call cannot be sent; TimeoutError when ``start_timeout`` seconds (None:
    HOROVOD_SPARK_START_TIMEOUT, else 600) have passed and the tasks do not run.
    """
    _refuse(use_mpi, extra_mpi_args, stdout, stderr, prefix_output_with_timestamp, executable)
    _check_version()
    session = spark or SparkSession.getActiveSession()
    if session is None:
        raise LaunchError(
            "there is no Spark session: make one by SparkSession.builder.getOrCreate()"
        )
    size = _size(session, num_proc)
    timeout = _timeout(start_timeout)
    interfaces = tuple(nics.split(",")) if isinstance(nics, str) else tuple(nics or ())
    call = packed(fn, args, kwargs)
    for left in range(restarts, -1, -1):
        try:
            return _run_once(session, size, call, timeout, interfaces, transport, env)
        except (WorkerFailed, TasksEnded):
            if not left:
                raise
    raise LaunchError(f"restarts={restarts}: a number of at least 0 is needed")


@public
def run_elastic(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
    """Horovod's elastic form, which Spark's tasks cannot have: raises LaunchError with the way.

    Spark ends all tasks of a barrier stage when one is lost, and starts none later.
    """
    raise LaunchError(
        "run_elastic: Spark ends all ranks when one is lost, and adds none later, because they are"
        " the tasks of a barrier stage; use ringlet.spark.run(fn, restarts=N), with a checkpoint"
        " that fn goes on from, or an elastic job of `ringlet run --min-np`"
    )


class TasksEnded(LaunchError):
    """Spark has ended the tasks before they could say what had come of them."""


def _refuse(
    use_mpi: bool | None,
    extra_mpi_args: str | None,
    stdout: Any,
    stderr: Any,
    timestamps: bool,
    executable: str | None,
) -> None:
    if use_mpi or extra_mpi_args:
        raise LaunchError(
            "use_mpi, extra_mpi_args: MPI cannot start in Spark's tasks; leave it out"
        )
    if stdout is not None or stderr is not None or timestamps:
        raise LaunchError(
            "stdout, stderr, prefix_output_with_timestamp: what ranks print is in the logs of"
            " Spark's executors; return what is needed"
        )
    if executable is not None:
        raise LaunchError("executable: set PYSPARK_PYTHON, or spark.pyspark.python")


def _check_version() -> None:
    numbers = tuple(int(word) for word in pyspark.__version__.split(".")[:2] if word.isdecimal())
    if numbers < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise LaunchError(
            f"Spark {pyspark.__version__} is too old for ringlet.spark, which needs {oldest} or"
            " newer: pip install -U 'ringlet[spark]'"
        )


def _timeout(given: float | None) -> float:
    name = "HOROVOD_SPARK_START_TIMEOUT"
    text = os.environ.get(name, str(TIMEOUT)) if given is None else str(given)
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < float("inf"):
        raise LaunchError(f"{name if given is None else 'start_timeout'}={text!r} is no time in s")
    return seconds


def _connected(session: Any) -> bool:
    """Whether this is Spark Connect's session, whose driver is elsewhere."""
    return type(session).__module__.startswith("pyspark.sql.connect")


def _size(session: Any, num_proc: int | None) -> int:
    if num_proc is not None and num_proc < 1:
        raise LaunchError(f"num_proc={num_proc}: there has to be at least one rank")
    slots: int | None = None
    if not _connected(session):
        context = session.sparkContext
        if local := re.fullmatch(r"local(?:\[(\d+|\*).*\])?", context.master):
            named = local[1] or "1"
            slots = context.defaultParallelism if named == "*" else int(named)
        if num_proc is None:
            num_proc = int(context.defaultParallelism)
    if num_proc is None:
        raise LaunchError("num_proc: over Spark Connect it has to be said how many ranks there are")
    if slots is not None and num_proc > slots:
        raise LaunchError(
            f"num_proc={num_proc} ranks have to run at once, but Spark's master"
            f" {session.sparkContext.master} runs {slots} tasks"
        )
    return num_proc


def _host(session: Any, interfaces: Sequence[str]) -> str:
    """Return the address of this process as executors reach it."""
    if interfaces:
        return find_interface(interfaces)[1]
    if not _connected(session):
        name = session.conf.get("spark.driver.host")
        addresses = addresses_of(name)
        if not addresses:
            raise LaunchError(f"spark.driver.host={name} is not known here")
        return addresses[0]
    name = str(session.client.host)
    own = address_towards(name)
    if own is None:
        raise LaunchError(f"the host of Spark Connect, {name}, is not known here")
    return own


def _run_once(
    session: Any,
    size: int,
    call: bytes,
    timeout: float,
    interfaces: tuple[str, ...],
    transport: str | None,
    env: Mapping[str, str] | None,
) -> list[Any]:
    with StoreServer(size, _host(session, interfaces)) as server:
        template = tickets(server, ["anywhere"] * size, transport, interfaces, env)[0]
        rows: list[Any] = []
        failed: list[Exception] = []
        tag = f"ringlet-{server.address}"
        work = partial(_task, _Order(call, template))

        def collect() -> None:
            session.addTag(tag)
            try:
                frame = session.range(0, size, 1, size)
                schema = "rank long, data binary"
                rows.extend(frame.mapInArrow(work, schema, barrier=True).collect())
            except Exception as error:
                failed.append(error)
            finally:
                session.removeTag(tag)

        thread = threading.Thread(target=collect, name="ringlet-spark", daemon=True)
        thread.start()
        _await_tasks(server, size, timeout, thread, partial(session.interruptTag, tag))
        thread.join()
        if failed:
            text = f"Spark has ended the tasks of the ranks: {_said(failed[0])}"
            raise TasksEnded(text) from (failed[0] if debugging() else None)  # stacks of Java's
        accounts: list[Account] = [pickle.loads(row["data"]) for row in rows]
        return results(accounts)


def _await_tasks(
    server: StoreServer, size: int, timeout: float, thread: threading.Thread, stop: Any
) -> None:
    """Wait until all tasks have come; have Spark stop them when the time is up."""
    limit = time.monotonic() + timeout
    names = [_node_name(task) for task in range(size)]
    while thread.is_alive() and not server.has(names):
        if time.monotonic() >= limit:
            stop()
            thread.join()
            raise TimeoutError(
                f"{size} tasks did not run at once within {timeout:g} s (start_timeout): has Spark"
                f" so many slots free, and can its executors reach {server.address}?"
            )
        thread.join(_LOOK)


def _said(error: Exception) -> str:
    """Return the cause, in one line, of an error that holds stacks of Python's and Java's."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    causes = [line for line in lines if re.match(r"(?:[A-Za-z]+\.)*\w*(?:Error|Exception): ", line)]
    return (causes or lines or [type(error).__name__])[-1 if causes else 0][:400]


# In the tasks


def _node_name(task: int) -> str:
    return f"placed/task/{task}"


def _task(order: _Order, batches: Iterable[Any]) -> Iterator[Any]:
    """Be a rank of the job; yield one row with what came of it."""
    import pyarrow
    from pyspark import BarrierTaskContext

    for _ in batches:
        pass
    context = BarrierTaskContext.get()
    ticket = _ticket(order.ticket, context)
    account = account_of(ticket, called, (order.call,), {})
    columns = {"rank": [account.rank], "data": [pickle.dumps(account)]}
    yield pyarrow.RecordBatch.from_pydict(columns)


def _ticket(template: Ticket, context: Any) -> Ticket:
    """Find out by the job's store where all tasks are, and so which rank this one is."""
    own, infos = context.partitionId(), context.getTaskInfos()
    host = infos[own].address.rpartition(":")[0]
    gpu = context.resources().get("gpu")
    said = json.dumps([host, list(gpu.addresses) if gpu else []]).encode()
    with closing(Client(template.address, bytes.fromhex(template.key), own)) as store:
        store.ask(Op.SET, _node_name(own).encode(), said)
        places = [
            json.loads(store.ask(Op.GET, _node_name(task).encode())) for task in range(len(infos))
        ]
    gpus = [gpu for node, own_gpus in places if node == host for gpu in own_gpus]
    placed = replace(template, standing=standings([node for node, _ in places])[own])
    return placed.with_gpus(gpus)
