"""What the environment switches on at ``init``."""

from __future__ import annotations

from collections.abc import Mapping

from ringlet.observe import start
from ringlet.runtime import Runtime

_YES = ("1", "true", "yes", "on")


def switch_on(runtime: Runtime, env: Mapping[str, str]) -> None:
    """Start the timeline and the metrics that ``env`` asks for; rank 0 alone, where not said.

    RINGLET_TIMELINE (or HOROVOD_TIMELINE) names a timeline's file, *_TIMELINE_MARK_CYCLES marks
    cycles; RINGLET_METRICS, RINGLET_METRICS_EVERY, RINGLET_PROMETHEUS and RINGLET_TENSORBOARD are
    the arguments of ``start_metrics``. Prometheus is for every rank, as are a RINGLET_METRICS with
    "{rank}" in it and a RINGLET_TENSORBOARD. Raises ValueError naming the variable that is wrong.
    """
    timeline = env.get("RINGLET_TIMELINE", env.get("HOROVOD_TIMELINE", ""))
    if timeline and timeline.upper() != "DYNAMIC" and runtime.rank == 0:
        marks = "TIMELINE_MARK_CYCLES"
        marked = env.get(f"RINGLET_{marks}", env.get(f"HOROVOD_{marks}", ""))
        runtime.engine.timelines.start(timeline, marked.strip().lower() in _YES)
    path = env.get("RINGLET_METRICS") or None
    if path is not None and runtime.rank != 0 and "{rank}" not in path:
        path = None
    prometheus = env.get("RINGLET_PROMETHEUS") or None
    tensorboard = env.get("RINGLET_TENSORBOARD") or None
    every = env.get("RINGLET_METRICS_EVERY") or "0"
    if not every.isdecimal():
        raise ValueError(f"RINGLET_METRICS_EVERY={every!r} is not a number of steps")
    if path or prometheus or tensorboard:
        start(runtime, path, (), prometheus, tensorboard, int(every), network=True)
