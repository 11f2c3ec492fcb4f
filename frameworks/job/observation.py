"""Timelines and metrics of this process's job, while it runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from ringlet.fusion.observe.metrics_control import Recording
from ringlet.job.session import current
from ringlet.metrics import destinations
from ringlet.ring.callers import public


@public
def start_timeline(file_path: str | os.PathLike[str], mark_cycles: bool = False) -> None:
    """Write what all ranks do from now on to ``file_path``, on rank 0's machine.

    Any rank may call this, or all: then rank 0's path counts. ``mark_cycles`` marks when the engine
    asks for what was submitted. Raises OSError when the file cannot be written, and ValueError
    while this rank has another timeline.
    """
    current().engine.timelines.start(file_path, mark_cycles)


@public
def stop_timeline() -> None:
    """End the timeline on all ranks; on return, rank 0 finds it merged. ``shutdown`` does so too.

    Does nothing when none is being written. Raises OSError when it cannot be.
    """
    current().engine.timelines.stop()


def timeline_span(name: str) -> AbstractContextManager[None]:
    """Show a with-block of the program, such as "backward", in the timeline, if one is written."""
    return current().engine.timelines.stretch(name)


@public
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
    runtime, to = current(), (path, callbacks, prometheus, tensorboard)
    return destinations.start(runtime.engine, runtime.topology, *to, sample_every, network)


def step_skipped(step: int, why: str = "overflow") -> None:
    """Count a step that was reduced and then not taken on any rank."""
    current().engine.extensions.skipped(step, why)
