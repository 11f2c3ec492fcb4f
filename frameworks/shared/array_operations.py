"""Collectives on NumPy arrays that wait for their end: what adapters' operations are made of.

``base`` is the name of an operation; members of a group travel under names made of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ringlet.compressors.specs.edition import edition
from ringlet.fusion import Request
from ringlet.fusion.devices.host import Place
from ringlet.fusion.requests.handle import wait_all
from ringlet.job.process_sets import ProcessSet
from ringlet.job.session import current
from ringlet.ring.dtypes import Array
from ringlet.shared.arrays import flat, numpy_dtype, shaped
from ringlet.shared.reduction_arguments import Reduction
from ringlet.shared.requests import group_requests, member_names, rows_to_send


def name_of_type(array: Array) -> str:
    """Return the name of an array's dtype, as requests have it."""
    return str(array.dtype.name)


def allreduce_arrays(
    base: str, arrays: Sequence[Array], results: Sequence[Array], asked: Reduction
) -> None:
    """Write the combination of ``arrays`` over all ranks to ``results``, which are contiguous."""
    wires = asked.wires([name_of_type(array) for array in arrays])
    used = asked.summed()
    requests = _reductions(
        "allreduce", base, arrays, wires, asked, spec=str(used), edition=edition(used)
    )
    sources = _as_wired(arrays, wires)
    targets = [
        flat(result) if name_of_type(result) == wire else source
        for result, wire, source in zip(results, wires, sources, strict=True)
    ]
    each = zip(requests, sources, targets, strict=True)
    wait_all(current().engine.submit_all([(*item, used) for item in each], at_once=True))
    for result, wire, target in zip(results, wires, targets, strict=True):
        if name_of_type(result) != wire:
            result[...] = shaped(target, wire, result.shape)


def gather_arrays(
    base: str, arrays: Sequence[Array], process_set: ProcessSet, single: bool
) -> tuple[list[Array], Array]:
    """Return all ranks' rows of each array, and how many they are, by array and rank (int64)."""
    number = process_set.number()
    dtypes = [name_of_type(array) for array in arrays]
    # No group: rows may differ between ranks, so that some members are cached, others not.
    names = member_names(base, len(arrays), single)
    items = [
        (
            Request(name, "allgather", dtype, array.shape, process_set=number),
            flat(array),
            None,
            None,
        )
        for name, array, dtype in zip(names, arrays, dtypes, strict=True)
    ]
    handles = current().engine.submit_all(items, at_once=True)
    wait_all(handles)
    gathered = [
        shaped(handle.output, dtype, (sum(handle.sizes), *array.shape[1:]))
        for handle, array, dtype in zip(handles, arrays, dtypes, strict=True)
    ]
    return gathered, np.array([handle.sizes for handle in handles], np.int64)


def broadcast_flat(
    names: Sequence[str],
    dtypes: Sequence[str],
    shapes: Sequence[tuple[int, ...]],
    buffers: Sequence[Array],
    root_rank: int,
    process_set: ProcessSet,
    place: str = Place.name,
) -> None:
    """Overwrite flat ``buffers`` with those of ``root_rank``, a rank of the whole job."""
    root, number = process_set.rank_of(root_rank, "root_rank"), process_set.number()
    items = [
        (
            Request(name, "broadcast", dtype, shape, root=root, process_set=number, place=place),
            buffer,
            None,
            None,
        )
        for name, dtype, shape, buffer in zip(names, dtypes, shapes, buffers, strict=True)
    ]
    wait_all(current().engine.submit_all(items, at_once=True))


def alltoall_array(
    base: str, array: Array, splits: Iterable[int] | None, process_set: ProcessSet
) -> tuple[Array, Array]:
    """Return the rows that this rank receives, and how many come from each rank (int32)."""
    dtype, number = name_of_type(array), process_set.number()
    rows = rows_to_send(splits, array.shape, process_set.size())
    request = Request(base, "alltoall", dtype, array.shape, process_set=number, splits=rows)
    handle = current().engine.submit(request, flat(array), at_once=True)
    handle.wait()
    moved = shaped(handle.output, dtype, (sum(handle.sizes), *array.shape[1:]))
    return moved, np.array(handle.sizes, np.int32)


def scatter_arrays(base: str, arrays: Sequence[Array], asked: Reduction) -> list[Array]:
    """Return this rank's rows of each array's combination."""
    rank = asked.process_set.rank()
    wires = asked.scattered_wires([name_of_type(array) for array in arrays])
    requests = _reductions("reducescatter", base, arrays, wires, asked)
    items = [(r, s, None, None) for r, s in zip(requests, _as_wired(arrays, wires), strict=True)]
    handles = current().engine.submit_all(items, at_once=True)
    wait_all(handles)
    return [
        shaped(handle.output, each, (handle.sizes[rank], *array.shape[1:])).astype(
            array.dtype, copy=False
        )
        for handle, each, array in zip(handles, wires, arrays, strict=True)
    ]


def wait_at_barrier(base: str, process_set: ProcessSet) -> None:
    """Return once every rank of the process set has called it."""
    request = Request(base, "barrier", process_set=process_set.number())
    current().engine.submit(request, np.empty(0, np.float32), at_once=True).wait()


def _reductions(
    kind: str,
    base: str,
    arrays: Sequence[Array],
    wires: Sequence[str],
    asked: Reduction,
    **alike: str,
) -> list[Request]:
    shapes = [array.shape for array in arrays]
    return group_requests(kind, base, asked.single, wires, shapes, **asked.alike(), **alike)


def _as_wired(arrays: Sequence[Array], wires: Sequence[str]) -> list[Array]:
    both = zip(arrays, wires, strict=True)
    return [flat(array.astype(numpy_dtype(wire), copy=False)) for array, wire in both]
