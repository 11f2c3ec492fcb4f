"""Metrics of a run: to a file, to callbacks, to Prometheus, to TensorBoard."""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from ringlet import __version__
from ringlet.fusion.observe.metrics_control import Recording
from ringlet.fusion.observe.sinks import Callback, JsonLines, Sink
from ringlet.runtime import Runtime, current

__all__ = ["Recording", "start_metrics", "step_skipped"]


def start_metrics(
    path: str | os.PathLike[str] | None = None,
    callbacks: Sequence[Callable[[dict[str, Any]], object]] = (),
    prometheus: str | int | None = None,
    tensorboard: str | os.PathLike[str] | None = None,
    sample_every: int = 0,
    network: bool = True,
) -> Recording:
    """Record what travels and what it takes from now on, on this rank; ``stop`` ends it.

    - ``path``: a file of JSON lines, which ``ringlet report`` renders; "{rank}" in it is replaced.
    - ``callbacks``: called with each record, a dict, on a thread of their own.
    - ``prometheus``: "[host:]port" to be scraped at; the local rank is added to the port. The host
      is 127.0.0.1 unless given.
    - ``tensorboard``: a directory for ``torch.utils.tensorboard``.
    - ``sample_every``: steps between measurements of what compression loses, by layer, each of
      which compresses twice; 0 for never.
    - ``network``: measure it first, if no rank has, so that records can say what a step would have
      taken uncompressed. All ranks take part without being asked.

    Raises ImportError saying what to install, OSError when a file or port cannot be had, and
    ValueError for arguments that make no sense.
    """
    if sample_every < 0:
        raise ValueError(f"sample_every is a number of steps, or 0, not {sample_every}")
    return start(current(), path, callbacks, prometheus, tensorboard, sample_every, network)


def step_skipped(step: int, why: str = "overflow") -> None:
    """Count a step that was reduced and then not taken on any rank."""
    current().engine.extensions.skipped(step, why)


def _versions() -> dict[str, str]:
    """Return the versions of what this process has imported, by name."""
    found = {"ringlet": __version__, "python": platform.python_version()}
    for name in ("torch", "tensorflow", "keras"):
        if version := getattr(sys.modules.get(name), "__version__", None):
            found[name] = str(version)
    return found


def start(
    runtime: Runtime,
    path: str | os.PathLike[str] | None,
    callbacks: Sequence[Callable[[dict[str, Any]], object]],
    prometheus: str | int | None,
    tensorboard: str | os.PathLike[str] | None,
    sample_every: int,
    network: bool,
) -> Recording:
    """See ``start_metrics``."""
    sinks: list[Sink] = [Callback(function) for function in callbacks]
    if path is not None:
        sinks.append(JsonLines(os.fspath(path).replace("{rank}", str(runtime.rank))))
    if prometheus is not None:
        from ringlet.observe.prometheus import serve

        sinks.append(serve(prometheus, runtime.rank, runtime.topology.local_rank))
    if tensorboard is not None:
        from ringlet.observe.tensorboard import TensorBoard

        sinks.append(TensorBoard(os.path.join(tensorboard, f"rank{runtime.rank}")))
    if not sinks:
        raise ValueError("say where metrics go: a path, callbacks, prometheus or tensorboard")
    hosts = list(dict.fromkeys(runtime.topology.hosts))
    facts = {"hosts": hosts, "limits": asdict(runtime.engine.limits), "versions": _versions()}
    return runtime.engine.metrics.start(sinks, sample_every, facts, network)
