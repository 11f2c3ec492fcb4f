"""What the environment switches on when a job begins."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from ringlet.fusion import Engine
from ringlet.metrics.destinations import go_on, start
from ringlet.ring.communicator import Topology
from ringlet.ring.rendezvous.epochs import present
from ringlet.ring.variables import given, read_flag, read_whole

log = logging.getLogger("ringlet")


def metrics_wanted(env: Mapping[str, str]) -> bool:
    """Whether ``env`` asks for metrics on its rank, rank 0's at least."""
    return any(env.get(f"RINGLET_{name}") for name in ("METRICS", "PROMETHEUS", "TENSORBOARD"))


def switch_on(engine: Engine, topology: Topology, env: Mapping[str, str]) -> None:
    """Start the timeline and the metrics that ``env`` asks for; rank 0 alone, where not said.

    RINGLET_TIMELINE (or HOROVOD_TIMELINE) names a timeline's file, *_TIMELINE_MARK_CYCLES marks
    cycles; RINGLET_METRICS, RINGLET_METRICS_EVERY, RINGLET_PROMETHEUS and RINGLET_TENSORBOARD are
    the arguments of ``start_metrics``. Prometheus is for every rank, as are a RINGLET_METRICS with
    "{rank}" in it and a RINGLET_TENSORBOARD. In a later epoch of an elastic job records go on where
    they are, and the timeline is a file of its own; what cannot be written there any more is left
    out, with a warning. Raises ValueError and OSError that name the variable.
    """
    (variable, timeline), epoch = given(env, "TIMELINE") or ("", ""), present()
    path = env.get("RINGLET_METRICS") or None
    if path is not None and engine.rank != 0 and "{rank}" not in path:
        path = None
    path = path and path.replace("{rank}", str(engine.rank))
    folder = Path(path).absolute().parent if path is not None else None
    if folder is not None and not folder.is_dir() and epoch <= 1:
        raise FileNotFoundError(f"RINGLET_METRICS={path!r}: the directory {folder} does not exist")
    if path and timeline and Path(path).absolute() == Path(timeline).absolute():
        raise ValueError(f"RINGLET_METRICS={path!r} is the file of {variable} too; name two files")
    if timeline and timeline.upper() != "DYNAMIC" and engine.rank == 0:
        marks = given(env, "TIMELINE_MARK_CYCLES")
        if epoch > 1:
            whole = Path(timeline)
            timeline = str(whole.with_name(f"{whole.stem}.epoch{epoch}{whole.suffix}"))
        try:
            engine.timelines.start(timeline, marks is not None and read_flag(*marks))
        except OSError as error:
            told = f"{variable}={timeline!r}: {error}"
            if epoch <= 1:
                raise OSError(told) from error
            log.warning("rank 0 trains on without a timeline: %s", told)
    prometheus = env.get("RINGLET_PROMETHEUS") or None
    tensorboard = env.get("RINGLET_TENSORBOARD") or None
    every = read_whole("RINGLET_METRICS_EVERY", env.get("RINGLET_METRICS_EVERY") or "0")
    if not (path or prometheus or tensorboard):
        return
    if epoch > 1:
        go_on(engine, topology, path, prometheus, tensorboard, every)
    else:
        start(engine, topology, path, (), prometheus, tensorboard, every, network=True)
