"""The call of ``ringlet.run`` as bytes, and from bytes what its ranks returned, or raised."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Callable
from typing import Any

from ringlet.ring.errors import LaunchError
from ringlet.ring.launch.signed_pickle import error_name, pickler, result_name
from ringlet.ring.wire.framing import unseal
from ringlet.ring.wire.kv_store import KvStore

# What the interpreter runs of a rank's task: install_as_horovod() puts its own runner in front.
runner: list[str] = []


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


def worker_command(python: str) -> list[str]:
    """Return what a rank runs to call a function."""
    return [python, "-P", *runner, "-m", "ringlet.ring.functions.function_worker"]


def packed_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bytes:
    """Return the call as bytes, with the search path that its modules need. Raises LaunchError."""
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
        ) from None
    return pickle.dumps(sys.path) + bytes(call)


def result(store: KvStore, key: bytes, who: int, rank: int) -> Any:
    """Return what ``rank`` has left in the ``store`` as ``who``. Raises WorkerFailed."""
    sealed = store.collect(result_name(who))
    if sealed is None:
        raise failure(store, who, rank, f"rank {rank} ended without a result")
    try:
        return pickle.loads(unseal(key, result_name(who), sealed))
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # an object's own reduction may raise SystemExit, too
        raise LaunchError(f"the result of rank {rank} cannot be read: {error!r}") from error


def failure(store: KvStore, who: int, rank: int, reason: str) -> WorkerFailed:
    """Return what tells of the end of ``rank``, with the traceback that it has left as ``who``."""
    text = (store.collect(error_name(who)) or b"").decode(errors="replace")
    return WorkerFailed(f"rank {rank} raised\n{text}" if text else reason, rank, text)
