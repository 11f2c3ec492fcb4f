"""Collectives that move torch tensors without combining them, under Horovod's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ringlet.fusion import Request
from ringlet.job.process_sets import ProcessSet, global_process_set
from ringlet.job.session import current
from ringlet.ring.communicator import ReduceOp
from ringlet.shared.requests import (
    check_some,
    check_splits,
    group_requests,
    refuse_one,
    rows_to_send,
)
from ringlet.torch.ops.entry_points import public
from ringlet.torch.ops.handles import Tensors, TorchHandle, differentiable
from ringlet.torch.ops.reductions import grouped_allreduce
from ringlet.torch.tensors.placement import Room, flat_at, packed, place_of
from ringlet.torch.tensors.views import check, dtype_of, flat, unstage


@public
def allgather_async(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> TorchHandle:
    """Start an ``allgather``."""
    return _gather([tensor], name, process_set, single=True)


@public
def allgather(
    tensor: torch.Tensor, name: str | None = None, process_set: ProcessSet = global_process_set
) -> torch.Tensor:
    """Return every rank's ``tensor`` behind one another along the first dimension. Differentiable.

    First dimensions may differ between ranks; the others, and the dtype, may not (Mismatch). The
    gradient is averaged over the ranks, as in Horovod.
    """

    def backward(grads: Tensors, handle: TorchHandle) -> Tensors:
        return _own_rows(grads, [handle.sizes], f"{handle.name}.grad", process_set)

    start = [tensor], lambda given: allgather_async(given[0], name, process_set), backward
    result: torch.Tensor = differentiable(*start)
    return result


@public
def grouped_allgather_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> TorchHandle:
    """Start a ``grouped_allgather``."""
    return _gather(tensors, name, process_set)


@public
def grouped_allgather(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Gather several tensors, all of them together or none. See ``allgather``."""
    refuse_one(tensors, "allgather")

    def backward(grads: Tensors, handle: TorchHandle) -> Tensors:
        return _own_rows(grads, handle.all_sizes, f"{handle.name}.grad", process_set)

    start = list(tensors), lambda given: _gather(given, name, process_set), backward
    result: list[torch.Tensor] = differentiable(*start)
    return result


@public
def broadcast_async_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> TorchHandle:
    """Start a ``broadcast_``."""
    check(tensor)
    runtime, number, place = current(), process_set.number(), place_of(tensor, None)
    request = Request(
        name or runtime.unnamed("broadcast", number),
        "broadcast",
        dtype_of(tensor),
        tuple(tensor.shape),
        root=process_set.rank_of(root_rank, "root_rank"),
        process_set=number,
        place=place,
    )
    staged = packed(tensor, place)
    operation = runtime.engine.submit(request, flat_at(staged, place))
    return TorchHandle([operation], lambda _: unstage(staged, tensor))


@public
def broadcast_async(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> TorchHandle:
    """Start a ``broadcast``."""
    check(tensor)
    return broadcast_async_(tensor.detach().clone(), root_rank, name, process_set)


@public
def broadcast(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return rank ``root_rank``'s ``tensor``; shapes and dtypes must agree (Mismatch).

    ``root_rank`` is a rank of the whole job. Differentiable: the root's gradient is the average
    over the ranks, as in Horovod, the others' zero.
    """

    def backward(grads: Tensors, handle: TorchHandle) -> Tensors:
        (total,) = _averaged(grads, f"{handle.name}.grad", process_set)
        if current().rank == root_rank:
            return [total]
        # Not plain zeros: where gradients are differentiated again, all ranks have to meet again.
        return [torch.where(torch.zeros_like(total, dtype=torch.bool), total, 0)]

    start = lambda given: broadcast_async(given[0], root_rank, name, process_set)  # noqa: E731
    result: torch.Tensor = differentiable([tensor], start, backward)
    return result


@public
def broadcast_(
    tensor: torch.Tensor,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Overwrite ``tensor`` with rank ``root_rank``'s, and return it."""
    result: torch.Tensor = broadcast_async_(tensor, root_rank, name, process_set).wait()
    return result


@public
def alltoall_async(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> TorchHandle:
    """Start an ``alltoall``; the handle returns the tensor and the received splits."""
    check(tensor)
    runtime, number = current(), process_set.number()
    shape, place = tuple(tensor.shape), place_of(tensor, None)
    if isinstance(splits, torch.Tensor):
        whole = not (splits.is_floating_point() or splits.dtype is torch.bool)
        check_splits(splits.dtype, list(splits.shape), whole and splits.dim() == 1)
        splits = splits.tolist()
    rows = rows_to_send(splits, shape, process_set.size())
    source = packed(tensor, place)
    room = Room(source, place)
    request = Request(
        name or runtime.unnamed("alltoall", number),
        "alltoall",
        dtype_of(tensor),
        shape,
        process_set=number,
        splits=rows,
        place=place,
    )
    operation = runtime.engine.submit(request, flat_at(source, place), room.output)

    def result(done: Any) -> tuple[torch.Tensor, torch.Tensor]:
        received = torch.tensor(done[0].sizes, dtype=torch.int32)
        moved = room.filled(done[0].output, sum(done[0].sizes))
        return moved.to(tensor.device), received

    return TorchHandle([operation], result)


@public
def alltoall(
    tensor: torch.Tensor,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send consecutive rows to ranks 0, 1, ... and return those received, in rank order.

    ``splits`` says how many rows go to each rank; None divides them equally. With ``splits`` the
    result is a pair: the tensor, and how many rows came from each rank (int32). Differentiable.
    """

    def start(given: Tensors) -> TorchHandle:
        return alltoall_async(given[0], splits, name, process_set)

    def backward(grads: Tensors, handle: TorchHandle) -> Tensors:
        back = grads[0].contiguous()
        again, _ = alltoall(back, handle.sizes, f"{handle.name}.grad", process_set)
        return [again]

    moved, received = differentiable([tensor], start, backward)
    return moved if splits is None else (moved, received)


@public
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every rank of the process set has called it."""
    runtime, number = current(), process_set.number()
    request = Request(runtime.unnamed("barrier", number), "barrier", process_set=number)
    runtime.engine.submit(request, flat(torch.empty(0)), at_once=True).wait()


@public
def join(device: int = -1) -> int:
    """Go on without this rank's data until all ranks have joined; return who did so last.

    For ranks with fewer batches than others: until the last one joins, this rank contributes zeros
    to every allreduce, and other collectives raise Mismatch. It takes no steps meanwhile: broadcast
    the model and the optimizer's state afterwards, from the rank that is returned. Averages divide
    by all ranks, as in Horovod, or by those that contribute: ``init(join_divisor="contributors")``.
    ``device`` is accepted for Horovod's sake.
    """
    return current().join()


def _gather(
    tensors: Tensors, name: str | None, process_set: ProcessSet, single: bool = False
) -> TorchHandle:
    check_some(tensors, "allgather")
    for tensor in tensors:
        check(tensor)
    runtime, number = current(), process_set.number()
    base = name or runtime.unnamed("allgather" if single else "grouped_allgather", number)
    places = [place_of(tensor, None) for tensor in tensors]
    devices = [tensor.device for tensor in tensors]
    sources = [packed(tensor, place) for tensor, place in zip(tensors, places, strict=True)]
    rooms = [Room(source, place) for source, place in zip(sources, places, strict=True)]
    dtypes, shapes = [dtype_of(s) for s in sources], [s.shape for s in sources]
    requests = group_requests("allgather", base, single, dtypes, shapes, places, process_set=number)
    items = [
        (request, flat_at(source, request.place), room.output, None)
        for request, source, room in zip(requests, sources, rooms, strict=True)
    ]

    def result(done: Any) -> Any:
        gathered = [
            room.filled(operation.output, sum(operation.sizes)).to(device)
            for operation, room, device in zip(done, rooms, devices, strict=True)
        ]
        return gathered[0] if single else gathered

    return TorchHandle(runtime.engine.submit_all(items), result)


def _averaged(grads: Tensors, name: str, process_set: ProcessSet) -> list[torch.Tensor]:
    given = [grad.contiguous() for grad in grads]
    return grouped_allreduce(given, name=name, op=ReduceOp.AVERAGE, process_set=process_set)


def _own_rows(
    grads: Tensors, sizes: Sequence[Sequence[int]], name: str, process_set: ProcessSet
) -> list[torch.Tensor]:
    rank = process_set.rank()
    wanted = [i for i, grad in enumerate(grads) if grad.is_floating_point()]
    averaged = list(grads)  # of integers and booleans, which have no gradient, they are zeros
    means = _averaged([grads[i] for i in wanted], name, process_set)
    for i, mean in zip(wanted, means, strict=True):
        averaged[i] = mean
    firsts = [sum(rows[:rank]) for rows in sizes]
    both = zip(averaged, firsts, sizes, strict=True)
    return [grad[first : first + rows[rank]] for grad, first, rows in both]
