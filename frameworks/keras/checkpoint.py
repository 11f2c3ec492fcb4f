"""Saving what compressors remember beside a model: each rank its own."""

from __future__ import annotations

import errno
import glob
import os
import re
from pathlib import Path
from typing import Any

from ringlet.compressors.core.context import State
from ringlet.job.session import current
from ringlet.ring.callers import public
from ringlet.ring.safe_files import replacing
from ringlet.shared import residual_store
from ringlet.shared.gradients.gradient_reducer import GradientReducer
from ringlet.shared.gradients.pending_passes import Pending, read_pending


@public
def compressor_state(optimizer: Any) -> bytes:
    """Return what this rank's compressors remember for ``optimizer``, a DistributedOptimizer.

    So it does what ``backward_passes_per_step`` has added up since the last step.
    """
    return dumped(reducer_of(optimizer))


@public
def set_compressor_state(optimizer: Any, data: bytes) -> None:
    """Go on with what ``compressor_state`` returned on this rank; every rank calls this.

    Warns, and starts without residuals, and with the first of a step's passes, where it was another
    rank's. Raises ValueError for bytes that are something else.
    """
    reducer = reducer_of(optimizer)
    reducer.load(*read(reducer, data))


@public
def save_compressor_state(optimizer: Any, filepath: Any) -> str:
    """Write this rank's compressor state beside a checkpoint; return the file's path.

    Files of other numbers of ranks are removed: they belong to what the checkpoint was before.
    """
    path = Path(state_path(filepath))
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:  # a run that is killed leaves the last file whole
        file.write(compressor_state(optimizer))
    for whose, older in _saved(filepath).items():
        if not whose.endswith(f"of{current().size}"):
            older.unlink(missing_ok=True)  # another rank may have done it
    return str(path)


@public
def load_compressor_state(optimizer: Any, filepath: Any) -> None:
    """Read this rank's compressor state; every rank calls this.

    Raises FileNotFoundError, telling whose files there are, where this rank has none; ValueError,
    naming the file, where it is damaged.
    """
    path, reducer = state_path(filepath), reducer_of(optimizer)
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        runtime = current()
        others = residual_store.listed([*_saved(filepath)])
        text = f"the compressor state of rank {runtime.rank} of {runtime.size} is missing; " + (
            f"there is that of {others}: load it on as many ranks as saved it, or go on without"
            if others
            else "there is no other rank's: call save_compressor_state on every rank first"
        )
        raise FileNotFoundError(errno.ENOENT, text, path) from None
    try:
        found = read(reducer, data)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    reducer.load(*found)


def saved_beside(filepath: Any) -> tuple[str, list[str]] | None:
    """Return a file of compressor state beside a checkpoint, and what it was compressed with.

    None where there is none, or nothing was compressed.
    """
    for found in _saved(filepath).values():
        if specs := residual_store.specs_in(found.read_bytes()):
            return str(found), specs
    return None


def residuals_beside(filepath: Any) -> list[str]:
    """Return whose residuals, such as "rank0of2", this rank finds beside a checkpoint."""
    found = _saved(filepath).items()
    return [whose for whose, path in found if residual_store.holds_residuals(path)]


def dumped(reducer: GradientReducer) -> bytes:
    """Return what this rank's compressors remember for ``reducer``, and its passes since a step."""
    runtime, settings = current(), reducer.settings
    return residual_store.dumps(
        reducer.memory.states,
        runtime.rank,
        runtime.size,
        reducer.step,
        settings.router,
        settings.predivide,
        settings.op.name.title(),
        [each.pending().record() for each in reducer.accumulators],
    )


def read(
    reducer: GradientReducer, data: bytes
) -> tuple[dict[str, State], int, list[Pending] | None]:
    """Return the states, the step and the passes since it in what was ``dumped`` on some rank."""
    runtime, settings = current(), reducer.settings
    states, step = residual_store.loads(
        data,
        runtime.rank,
        runtime.size,
        settings.router,
        settings.averages,
        settings.predivide,
        settings.process_set.size(),
        settings.op.name.title(),
    )
    return states, step, read_pending(data, runtime.rank, runtime.size)


def _saved(filepath: Any) -> dict[str, Path]:
    """Return the files beside a checkpoint, of any number of ranks, by whose they are."""
    start = Path(f"{os.fspath(filepath)}.rank")
    found = {}
    for path in start.parent.glob(f"{glob.escape(start.name)}*of*"):
        if numbers := re.fullmatch(r"(\d+)of(\d+)", path.name.removeprefix(start.name)):
            found[int(numbers[2]), int(numbers[1])] = path
    return {f"rank{rank}of{size}": found[size, rank] for size, rank in sorted(found)}


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
