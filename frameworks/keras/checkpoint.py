"""Saving what compressors remember beside a model: each rank its own."""

from __future__ import annotations

import glob
import os
from pathlib import Path
from typing import Any

from ringlet.job.session import current
from ringlet.ring.safe_files import replacing
from ringlet.shared import residual_store
from ringlet.shared.gradients import GradientReducer


def compressor_state(optimizer: Any) -> bytes:
    """Return what this rank's compressors remember for ``optimizer``, a DistributedOptimizer."""
    runtime, reducer = current(), reducer_of(optimizer)
    where = runtime.rank, runtime.size, reducer.step
    return residual_store.dumps(reducer.memory.states, *where, reducer.settings.router)


def set_compressor_state(optimizer: Any, data: bytes) -> None:
    """Go on with what ``compressor_state`` returned on this rank; every rank calls this.

    Warns, and starts without residuals, where it was another rank's.
    """
    runtime, reducer = current(), reducer_of(optimizer)
    where = runtime.rank, runtime.size, reducer.settings.router, reducer.settings.averages
    states, step = residual_store.loads(data, *where)
    residual_store.replace(reducer.memory.states, states, step)
    reducer.restart(step)


def save_compressor_state(optimizer: Any, filepath: Any) -> str:
    """Write this rank's compressor state beside a checkpoint; return the file's path."""
    path = Path(state_path(filepath))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:  # a run that is killed leaves the last file whole
        file.write(compressor_state(optimizer))
    return str(path)


def load_compressor_state(optimizer: Any, filepath: Any) -> None:
    """Read this rank's compressor state; every rank calls this."""
    set_compressor_state(optimizer, Path(state_path(filepath)).read_bytes())


def saved_beside(filepath: Any) -> tuple[str, list[str]] | None:
    """Return a file of compressor state beside a checkpoint, and what it was compressed with.

    None where there is none, or nothing was compressed.
    """
    path = Path(os.fspath(filepath))
    for found in sorted(path.parent.glob(f"{glob.escape(path.name)}.rank*of*")):
        if specs := residual_store.specs_in(found.read_bytes()):
            return str(found), specs
    return None


def state_path(filepath: Any) -> str:
    """Return where this rank keeps the compressor state of the checkpoint ``filepath``."""
    runtime = current()
    return f"{os.fspath(filepath)}.rank{runtime.rank}of{runtime.size}"


def reducer_of(owner: Any) -> GradientReducer:
    """Return the reducer of a DistributedOptimizer; TypeError for anything else."""
    found = getattr(owner, "_ringlet", None)
    if not isinstance(found, GradientReducer):
        raise TypeError(f"{type(owner).__name__} is no DistributedOptimizer of Ringlet's")
    return found
