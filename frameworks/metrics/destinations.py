"""Where metrics go: a file, callbacks, Prometheus, TensorBoard."""

from __future__ import annotations

import logging
import os
import platform
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from ringlet import __version__
from ringlet.fusion import Engine
from ringlet.fusion.observe.metrics_control import Recording
from ringlet.fusion.observe.sinks import Callback, JsonLines, Sink
from ringlet.ring.communicator import Topology

log = logging.getLogger("ringlet")


def start(
    engine: Engine,
    topology: Topology,
    path: str | os.PathLike[str] | None,
    callbacks: Sequence[Callable[[dict[str, Any]], object]],
    prometheus: str | int | None,
    tensorboard: str | os.PathLike[str] | None,
    sample_every: int,
    network: bool,
) -> Recording:
    """Record what ``engine`` does; see ``ringlet.job.observation.start_metrics``."""
    sinks: list[Sink] = [Callback(function) for function in callbacks]
    with ExitStack() as opened:  # closed where one of them, or the start, fails
        _open(sinks, opened, engine, topology, path, prometheus, tensorboard, later=False)
        if not sinks:
            raise ValueError("say where metrics go: a path, callbacks, prometheus or tensorboard")
        return _record(engine, topology, sinks, opened, sample_every, network)


def go_on(
    engine: Engine,
    topology: Topology,
    path: str | None,
    prometheus: str | None,
    tensorboard: str | None,
    sample_every: int,
) -> None:
    """Record in a later epoch of a job, behind what ``path`` has.

    What cannot be opened any more is left out, with a warning.
    """
    sinks: list[Sink] = []
    with ExitStack() as opened:
        _open(sinks, opened, engine, topology, path, prometheus, tensorboard, later=True)
        if sinks:
            _record(engine, topology, sinks, opened, sample_every, network=True)


def _record(
    engine: Engine,
    topology: Topology,
    sinks: Sequence[Sink],
    opened: ExitStack,
    sample_every: int,
    network: bool,
) -> Recording:
    """Start to record; what is ``opened`` stays so."""
    hosts = list(dict.fromkeys(topology.hosts))
    facts = {"hosts": hosts, "limits": asdict(engine.limits), "versions": _versions()}
    recording = engine.metrics.start(sinks, sample_every, facts, network)
    opened.pop_all()
    return recording


def _open(
    sinks: list[Sink],
    opened: ExitStack,
    engine: Engine,
    topology: Topology,
    path: str | os.PathLike[str] | None,
    prometheus: str | int | None,
    tensorboard: str | os.PathLike[str] | None,
    later: bool,
) -> None:
    """Append where metrics go to ``sinks``; each one is closed with ``opened``."""

    def add(make: Callable[[], Sink]) -> None:
        try:
            sink = make()
        except Exception as error:
            if not later:
                raise
            log.warning("rank %d trains on without some of its metrics: %s", engine.rank, error)
            return
        opened.callback(sink.close)
        sinks.append(sink)

    if path is not None:
        file = os.fspath(path).replace("{rank}", str(engine.rank))
        add(_told_of(file, "RINGLET_METRICS", lambda: JsonLines(file, later)))
    if prometheus is not None:
        from ringlet.metrics.prometheus import serve

        add(lambda: serve(prometheus, engine.rank, topology.machine_rank))
    if tensorboard is not None:
        from ringlet.metrics.tensorboard import TensorBoard

        folder = os.path.join(tensorboard, f"rank{engine.rank}")
        add(_told_of(folder, "RINGLET_TENSORBOARD", lambda: TensorBoard(folder)))


def _told_of(path: str, variable: str, make: Callable[[], Sink]) -> Callable[[], Sink]:
    """Return ``make``, with an OSError that says what cannot be written where, and what to do."""

    def told() -> Sink:
        try:
            return make()
        except OSError as error:
            exists = isinstance(error, FileExistsError)
            cure = "another one" if exists else "a place where this user may write"
            raise type(error)(
                f"metrics cannot be written to {path}: {error.strerror or error}; let {variable} "
                f"name {cure}"
            ) from None

    return told


def _versions() -> dict[str, str]:
    """Return the versions of what this process has imported, by name."""
    found = {"ringlet": __version__, "python": platform.python_version()}
    for name in ("torch", "tensorflow", "keras"):
        if version := getattr(sys.modules.get(name), "__version__", None):
            found[name] = str(version)
    return found
