"""What ``ringlet.run`` and its ranks hand each other: pickles in a directory of one user."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import ModuleType


def pickler() -> ModuleType:
    """Return cloudpickle if it is installed, else pickle."""
    try:
        import cloudpickle
    except ModuleNotFoundError:
        return pickle
    return cloudpickle  # type: ignore[no-any-return]


def result_file(directory: Path, rank: int) -> Path:
    """Where rank ``rank`` leaves what the function returned, pickled."""
    return directory / f"result-{rank}"


def error_file(directory: Path, rank: int) -> Path:
    """Where rank ``rank`` leaves the traceback of what the function raised, as text."""
    return directory / f"error-{rank}"
