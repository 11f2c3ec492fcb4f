"""Python objects between ranks: pickled, signed, and read only if the signature is the job's.

Whoever can write into a connection between ranks, but does not know the job's key, cannot make a
rank unpickle what he sends, nor take what one rank has signed for another's.
"""

from __future__ import annotations

import pickle
from typing import Any, NamedTuple

import numpy as np

from ringlet.fusion import Request
from ringlet.fusion.errors import in_words
from ringlet.job.process_sets import InvalidArgument, ProcessSet, global_process_set
from ringlet.job.session import current
from ringlet.ring.callers import public
from ringlet.ring.dtypes import Array
from ringlet.ring.wire.framing import seal, unseal


class _Unpicklable(NamedTuple):
    """Travels in place of an object that cannot be pickled, or the others would wait for it."""

    why: str


@public
def broadcast_object(
    obj: Any = None,
    root_rank: int = 0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return rank ``root_rank``'s ``obj`` on every rank of the process set.

    Raises ProtocolError for bytes that no rank of this job has signed, and InvalidArgument, the
    same on every rank, for an object that cannot be pickled.
    """
    runtime, number = current(), process_set.number()
    root = process_set.rank_of(root_rank, "root_rank")
    name = name or runtime.unnamed("broadcast_object", number)
    label = _label(name, number)
    data, failed = _sealed(obj, label, root) if runtime.rank == root_rank else (b"", None)
    length = np.array([len(data)], np.int64)

    def send(what: str, array: Array) -> None:
        request = Request(
            f"{name}.{what}",
            "broadcast",
            array.dtype.name,
            array.shape,
            root=root,
            process_set=number,
        )
        runtime.engine.submit(request, array, at_once=True).wait()

    send("size", length)
    size = int(length[0])
    buffer = np.frombuffer(data, np.uint8).copy() if data else np.zeros(size, np.uint8)
    send("data", buffer)
    if runtime.rank == root_rank and failed is None:
        return obj
    return _opened(buffer.tobytes(), label, root, failed)


@public
def allgather_object(
    obj: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> list[Any]:
    """Return every rank's ``obj``, in rank order. See ``broadcast_object``."""
    runtime, number = current(), process_set.number()
    name = name or runtime.unnamed("allgather_object", number)
    label = _label(name, number)
    sealed, failed = _sealed(obj, label, process_set.rank())
    data = np.frombuffer(sealed, np.uint8)
    request = Request(name, "allgather", "uint8", (data.size,), process_set=number)
    handle = runtime.engine.submit(request, data)
    gathered: bytes = handle.wait().tobytes()
    objects, start = [], 0
    for rank, size in enumerate(handle.sizes):
        objects.append(_opened(gathered[start : start + size], label, rank, failed))
        start += size
    return objects


def dumps(obj: Any) -> bytes:
    """Return ``obj`` pickled, by cloudpickle where that is installed."""
    try:
        from cloudpickle import dumps
    except ImportError:
        from pickle import dumps
    data: bytes = dumps(obj)
    return data


def _label(name: str, process_set: int) -> str:
    """Return what an object is sealed as: process sets count calls without names for themselves."""
    return f"{name} of process set {process_set}"


def _sealed(obj: Any, name: str, sender: int) -> tuple[bytes, Exception | None]:
    """Return the pickled ``obj`` signed, or word of the error that there was, and that error."""
    failed = None
    try:
        data = dumps(obj)
    except Exception as error:
        failed = error
        why = f"rank {current().rank}'s object cannot be pickled, so not sent: {in_words(error)}"
        data = dumps(_Unpicklable(why))
    return seal(current().secret, name, data, sender), failed


def _opened(sealed: bytes, name: str, sender: int, own: Exception | None) -> Any:
    """Return the object; raise what its sender has told, from this rank's ``own`` error if any."""
    found = pickle.loads(unseal(current().secret, name, sealed, sender))
    if isinstance(found, _Unpicklable):
        raise InvalidArgument(found.why) from own
    return found
