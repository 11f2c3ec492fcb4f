"""Where metrics go: a file, callbacks, Prometheus, TensorBoard."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from typing import Any

from ringlet import __version__
from ringlet.fusion import Engine
from ringlet.fusion.observe.metrics_control import Recording
from ringlet.fusion.observe.sinks import Callback, JsonLines, Sink
from ringlet.ring.communicator import Topology


def start(
    engine: Engine,
    topology: Topology,
    path: str | os.PathLike[str] | None,
    callbacks: Sequence[Callable[[dict[str, Any]], object]],
    prometheus: str | int | None,
    tensorboard: str | os.PathLike[str] | None,
    sample_every: int,
    network: bool,
    append: bool = False,
) -> Recording:
    """Record what ``engine`` does; see ``ringlet.job.observation.start_metrics``.

    ``append`` keeps the records that ``path`` has.
    """
    sinks: list[Sink] = [Callback(function) for function in callbacks]
    with ExitStack() as opened:  # closed where one of them, or the start, fails
        _open(sinks, opened, engine, topology, path, prometheus, tensorboard, append)
        if not sinks:
            raise ValueError("say where metrics go: a path, callbacks, prometheus or tensorboard")
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
    append: bool,
) -> None:
    """Append where metrics go to ``sinks``; each one is closed with ``opened``."""

    def add(sink: Sink) -> None:
        opened.callback(sink.close)
        sinks.append(sink)

    if path is not None:
        path = os.fspath(path).replace("{rank}", str(engine.rank))
        with _told_of(path, "RINGLET_METRICS"):
            add(JsonLines(path, append))
    if prometheus is not None:
        from ringlet.metrics.prometheus import serve

        add(serve(prometheus, engine.rank, topology.machine_rank))
    if tensorboard is not None:
        from ringlet.metrics.tensorboard import TensorBoard

        folder = os.path.join(tensorboard, f"rank{engine.rank}")
        with _told_of(folder, "RINGLET_TENSORBOARD"):
            add(TensorBoard(folder))


@contextmanager
def _told_of(path: str, variable: str) -> Iterator[None]:
    """Let an OSError say what cannot be written where, and what to do."""
    try:
        yield
    except OSError as error:
        exists = isinstance(error, FileExistsError)
        cure = "another one" if exists else "a place where this user may write"
        raise type(error)(
            f"metrics cannot be written to {path}: {error.strerror or error}; let {variable} name "
            f"{cure}"
        ) from None


def _versions() -> dict[str, str]:
    """Return the versions of what this process has imported, by name."""
    found = {"ringlet": __version__, "python": platform.python_version()}
    for name in ("torch", "tensorflow", "keras"):
        if version := getattr(sys.modules.get(name), "__version__", None):
            found[name] = str(version)
    return found
