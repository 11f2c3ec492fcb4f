"""``ringlet.run``: call a function on every rank of a new job and collect what it returns."""

from __future__ import annotations

import pickle
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ringlet.ring.errors import LaunchError
from ringlet.ring.launch.job import Job
from ringlet.ring.launch.parcel import error_file, pickler, result_file
from ringlet.ring.local import run_local

R = TypeVar("R")


class WorkerFailed(LaunchError):
    """The function did not return on a rank.

    ``rank`` is the rank that failed first; ``traceback`` is the text of the exception's traceback
    there, empty if the process ended without one.
    """

    def __init__(self, message: str, rank: int, traceback: str = "") -> None:
        super().__init__(message)
        self.rank = rank
        self.traceback = traceback

    def __reduce__(self) -> tuple[type[WorkerFailed], tuple[str, int, str]]:
        return type(self), (str(self), self.rank, self.traceback)


def run(
    fn: Callable[..., R],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    np: int = 1,
    transport: str | None = None,
) -> list[R]:
    """Call ``fn(*args, **kwargs)`` on ``np`` new ranks; return the results by rank.

    Every rank is a fresh process that can ``ringlet.ring.connect``; what it prints appears here
    with the rank in front. With ``transport="local"`` ranks are threads of this process instead,
    nothing is pickled, and an exception is raised as it is. Otherwise function, arguments and
    results are pickled, with cloudpickle if it is installed, into files that only this user can
    read. Raises WorkerFailed when a rank raises or
    ends, LaunchError when the job cannot start or something cannot be pickled.
    """
    if transport == "local":
        return run_local(lambda _: fn(*args, **dict(kwargs or {})), np)
    with tempfile.TemporaryDirectory(prefix="ringlet-run-") as name:
        directory = Path(name)
        (directory / "call").write_bytes(_pickled(fn, tuple(args), dict(kwargs or {})))
        command = [sys.executable, "-P", "-m", "ringlet.ring.launch.task", name]
        outcome = Job(command, np, transport).run()
        if outcome.interrupted:
            raise KeyboardInterrupt
        if outcome.rank is not None:
            raise _failure(directory, outcome.rank, outcome.reason)
        results: list[R] = []
        for rank in range(np):
            path = result_file(directory, rank)
            if not path.exists():
                raise _failure(directory, rank, f"rank {rank} ended without a result")
            try:
                results.append(pickle.loads(path.read_bytes()))
            except Exception as error:
                raise LaunchError(f"the result of rank {rank} cannot be read: {error}") from error
        return results


def _pickled(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    module = pickler()
    remedy = ""
    if module is pickle:
        remedy = "; pip install 'ringlet[run]' for lambdas, local functions and those of a script"
        if getattr(fn, "__module__", None) == "__main__":
            raise LaunchError(f"{fn!r} is defined in the main script{remedy}")
    try:
        call = module.dumps((fn, args, kwargs))
    except Exception as error:  # whatever an object's own reduction raises
        raise LaunchError(
            f"the function or its arguments cannot be sent: {error}{remedy}"
        ) from error
    return pickle.dumps(sys.path) + bytes(call)


def _failure(directory: Path, rank: int, reason: str) -> WorkerFailed:
    path = error_file(directory, rank)
    text = path.read_text() if path.exists() else ""
    return WorkerFailed(f"rank {rank} raised\n{text}" if text else reason, rank, text)
