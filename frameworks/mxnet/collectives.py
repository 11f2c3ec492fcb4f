"""Collectives on NDArrays, under Horovod's names and arguments.

Operations without a name get one from a counter, so ranks must call those in the same order.
``priority`` is accepted for Horovod's sake: calls return when they are done.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ringlet.compressors.specs.routes import Spec
from ringlet.job.process_sets import InvalidArgument, ProcessSet, global_process_set
from ringlet.job.session import current
from ringlet.mxnet.nd_views import check, like, taken, view
from ringlet.ring.callers import public
from ringlet.ring.communicator import ReduceOp
from ringlet.shared.array_operations import (
    allreduce_arrays,
    alltoall_array,
    broadcast_flat,
    gather_arrays,
    scatter_arrays,
    wait_at_barrier,
)
from ringlet.shared.arrays import flat
from ringlet.shared.reduction_arguments import Reduction
from ringlet.shared.requests import (
    check_scatter,
    check_splits,
    refuse_one,
)


@public
def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | None = None,
    compression: Spec = None,
) -> Any:
    """Return ``tensor`` combined over all ranks, as a new NDArray: averaged, or by ``op``.

    ``compression`` is a spec; one that remembers (``ef``) needs a ``name``. Raises Mismatch, the
    same on every rank, when ranks pass different shapes, dtypes or arguments.
    """
    return _reduced([tensor], Reduction.among(locals()))[0]


@public
def allreduce_(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | None = None,
    compression: Spec = None,
) -> Any:
    """Combine ``tensor`` over all ranks in place, and return it. See ``allreduce``."""
    return _reduced_in_place([tensor], Reduction.among(locals()))[0]


@public
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | None = None,
    compression: Spec = None,
) -> list[Any]:
    """Return ``tensors`` combined over all ranks: all of them together, or none.

    No tensors give an empty list at once, as in Horovod's module for MXNet, here and in the others.
    """
    refuse_one(tensors, "allreduce")
    return _reduced(list(tensors), Reduction.among(locals())) if tensors else []


@public
def grouped_allreduce_(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    priority: int = 0,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    op: ReduceOp | None = None,
    compression: Spec = None,
) -> list[Any]:
    """Combine tensors over all ranks together, in place, and return them."""
    refuse_one(tensors, "allreduce")
    return _reduced_in_place(list(tensors), Reduction.among(locals())) if tensors else []


@public
def allgather(
    tensor: Any,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return every rank's ``tensor`` behind one another along the first dimension."""
    return _gathered([tensor], name, process_set, True)[0]


@public
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Gather several tensors, all together or none."""
    refuse_one(tensors, "allgather")
    return _gathered(list(tensors), name, process_set) if tensors else []


@public
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return rank ``root_rank``'s ``tensor``; shapes and dtypes must agree (Mismatch)."""
    return broadcast_(tensor.copy(), root_rank, name, priority, process_set)


@public
def broadcast_(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Overwrite ``tensor`` with rank ``root_rank``'s, and return it."""
    array = view(tensor)
    named = _named("broadcast", name, process_set)
    kinds = [array.dtype.name], [array.shape]
    broadcast_flat([named], *kinds, [flat(array)], root_rank, process_set)
    return tensor


@public
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send consecutive rows to ranks 0, 1, ... and return those received, in rank order.

    ``splits`` says how many rows go to each rank; None divides them equally. With ``splits`` the
    result is a pair: the tensor, and how many rows came from each rank (int32).
    """
    array, shares = view(tensor), None
    if splits is not None:
        shares = np.asarray(splits.asnumpy() if hasattr(splits, "asnumpy") else splits)
        if shares.dtype.kind == "f" and bool((shares == np.rint(shares)).all()):
            shares = shares.astype(np.int64)  # NDArrays are of floats unless one says otherwise
        check_splits(shares.dtype, shares.shape, shares.dtype.kind in "iu" and shares.ndim == 1)
    named = _named("alltoall", name, process_set)
    moved, received = alltoall_array(named, array, shares, process_set)
    return taken(moved) if splits is None else (taken(moved), taken(received))


@public
def reducescatter(
    tensor: Any,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Spec = None,
) -> Any:
    """Return this rank's rows of the combination over all ranks.

    ``op`` is Average, Sum, Min, Max or Product; ``compression`` "none" or "fp16".
    """
    return _scattered([tensor], Reduction.among(locals()))[0]


@public
def grouped_reducescatter(
    tensors: Sequence[Any],
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    priority: int = 0,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    compression: Spec = None,
) -> list[Any]:
    """Reduce-scatter several tensors, all of them together or none."""
    refuse_one(tensors, "reducescatter")
    return _scattered(list(tensors), Reduction.among(locals())) if tensors else []


@public
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every rank of the process set has called it."""
    wait_at_barrier(_named("barrier", None, process_set), process_set)


@public
def join() -> int:
    """Go on without this rank's data until all ranks have joined; return who did so last.

    This rank takes no steps meanwhile: broadcast the model afterwards, from the rank returned.
    """
    return current().join()


def _named(kind: str, name: str | None, process_set: ProcessSet) -> str:
    number = process_set.number()
    return name or current().unnamed(f"mxnet.{kind}" + (f".{number}" if number else ""))


def _reduced(tensors: list[Any], asked: Reduction) -> list[Any]:
    for tensor in tensors:
        check(tensor)

    def into_new(given: Sequence[Any], plain: Reduction) -> list[Any]:
        made = like(given)
        _reduce(given, made, plain)
        return made

    return asked.run(tensors, into_new)


def _reduced_in_place(tensors: list[Any], asked: Reduction) -> list[Any]:
    if asked.cast is None:
        _reduce(tensors, tensors, asked)
    else:
        for tensor, made in zip(tensors, _reduced(tensors, asked), strict=True):
            tensor[:] = made
    return tensors


def _reduce(tensors: Sequence[Any], outputs: Sequence[Any], asked: Reduction) -> None:
    asked.check_name()
    arrays, targets = [view(each) for each in tensors], [view(each) for each in outputs]
    named = _named(asked.kind("allreduce"), asked.name, asked.process_set)
    allreduce_arrays(named, arrays, targets, asked)


def _gathered(
    tensors: list[Any], name: str | None, process_set: ProcessSet, single: bool = False
) -> list[Any]:
    arrays = [view(tensor) for tensor in tensors]
    if any(array.ndim == 0 for array in arrays):
        raise InvalidArgument("a tensor without dimensions cannot be gathered; reshape it")
    kind = "allgather" if single else "grouped_allgather"
    gathered, _ = gather_arrays(_named(kind, name, process_set), arrays, process_set, single)
    return [taken(array) for array in gathered]


def _scattered(tensors: list[Any], asked: Reduction) -> list[Any]:
    for tensor in tensors:
        check(tensor)

    def scatter(given: Sequence[Any], plain: Reduction) -> list[Any]:
        arrays = [view(tensor) for tensor in given]
        check_scatter(plain.op, [array.ndim for array in arrays])
        named = _named(plain.kind("reducescatter"), plain.name, plain.process_set)
        return [taken(array) for array in scatter_arrays(named, arrays, plain)]

    return asked.run(tensors, scatter)
