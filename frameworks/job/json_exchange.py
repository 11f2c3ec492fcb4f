"""What ranks tell each other about themselves: JSON and arrays, never pickles.

Nothing is run to read them, so that whoever writes into a connection between ranks can make an
exchange fail, and no more. Lengths travel with the requests, over the authenticated control plane,
and are checked before memory is taken for what they announce.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ringlet.fusion import Request
from ringlet.fusion.requests.handle import wait_all
from ringlet.job.process_sets import ProcessSet
from ringlet.job.session import current
from ringlet.ring.dtypes import Array
from ringlet.ring.errors import ProtocolError

LIMIT = 1 << 28  # bytes that one rank may tell
_SHOWN = 60  # characters of what was not expected


def gather(
    value: Any, name: str, process_set: ProcessSet, expected: str, fits: Callable[[Any], bool]
) -> list[Any]:
    """Return every rank's ``value``, by rank. Collective.

    ``value`` is what JSON holds; tuples arrive as lists. Raises ProtocolError, the same on every
    rank, that names the rank which sent something for which ``fits`` is false: no ``expected``.
    """
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    sizes = _sizes(data.size, name, process_set)
    request = Request(name, "allgather", "uint8", data.shape, process_set=process_set.number())
    handle = current().engine.submit(request, data)
    gathered: bytes = handle.wait().tobytes()
    ranks, values, start = _ranks(process_set), [], 0
    for rank, size in zip(ranks, sizes, strict=True):
        values.append(_read(gathered[start : start + size], rank, name, expected, fits))
        start += size
    return values


def broadcast(
    value: Any,
    root_rank: int,
    name: str,
    process_set: ProcessSet,
    expected: str,
    fits: Callable[[Any], bool],
) -> Any:
    """Return rank ``root_rank``'s ``value`` as it arrives, on the root too. See ``gather``."""
    is_root = current().rank == root_rank
    data = json.dumps(value).encode() if is_root else b""
    root = process_set.rank_of(root_rank, "root_rank")
    buffer = np.zeros(_sizes(len(data), name, process_set)[root], np.uint8)
    if is_root:
        buffer[:] = np.frombuffer(data, np.uint8)
    broadcast_arrays([buffer], [name], root_rank, process_set)
    return _read(buffer.tobytes(), root_rank, name, expected, fits)


def broadcast_arrays(
    arrays: Sequence[Array], names: Sequence[str], root_rank: int, process_set: ProcessSet
) -> None:
    """Overwrite flat arrays of bytes with those of ``root_rank``; ranks must agree on lengths."""
    root, number = process_set.rank_of(root_rank, "root_rank"), process_set.number()
    items = [
        (Request(n, "broadcast", "uint8", a.shape, root=root, process_set=number), a, None, None)
        for n, a in zip(names, arrays, strict=True)
    ]
    wait_all(current().engine.submit_all(items))


def _sizes(size: int, name: str, process_set: ProcessSet) -> tuple[int, ...]:
    """Return how many bytes each rank wants to tell; ProtocolError, on every rank, for too many."""
    # Rows without columns: they are announced to the coordinator, and nothing else travels.
    rows = Request(
        f"{name}.sizes", "allgather", "uint8", (size, 0), process_set=process_set.number()
    )
    handle = current().engine.submit(rows, np.empty(0, np.uint8))
    handle.wait()
    for rank, announced in zip(_ranks(process_set), handle.sizes, strict=True):
        if announced > LIMIT:
            raise ProtocolError(
                f"{name}: rank {rank} announces {announced} bytes, and at most {LIMIT} are "
                "expected; do all ranks run the same program and the same version of Ringlet?"
            )
    return handle.sizes


def _read(data: bytes, rank: int, name: str, expected: str, fits: Callable[[Any], bool]) -> Any:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        value = None
    else:
        if fits(value):
            return value
    shown = data[:_SHOWN].decode(errors="replace")
    raise ProtocolError(
        f"{name}: rank {rank} sent {shown!r} where {expected} is expected; do all ranks run the "
        "same program and the same version of Ringlet?"
    )


def _ranks(process_set: ProcessSet) -> Sequence[int]:
    return process_set.ranks or range(process_set.size())
