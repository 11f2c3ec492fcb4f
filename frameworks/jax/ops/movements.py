"""Collectives that move arrays without combining them, under Horovod's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from ringlet.jax.ops.cotangents import differentiable
from ringlet.jax.ops.operands import GROUP, dtype_of, name_when_run, operand
from ringlet.jax.ops.ordered_calls import call, has_values, refuse_trace, to_array, to_jax
from ringlet.jax.ops.reductions import grouped_allreduce
from ringlet.job.process_sets import InvalidArgument, ProcessSet, global_process_set
from ringlet.job.session import current
from ringlet.ring.callers import public
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.shared.array_operations import (
    alltoall_array,
    broadcast_flat,
    gather_arrays,
    wait_at_barrier,
)
from ringlet.shared.arrays import flat
from ringlet.shared.requests import check_some, check_splits, rows_to_send


@public
def allgather(
    tensor: Any, name: str | None = None, process_set: ProcessSet = global_process_set
) -> Any:
    """Return every rank's ``tensor`` behind one another along the first dimension. Differentiable.

    First dimensions may differ between ranks outside of programs. In ``jax.jit``, where shapes are
    known beforehand, they may not: InvalidArgument, the same on every rank. The gradient is
    averaged over the ranks, as in Horovod.
    """
    return _allgather([tensor], name, process_set, single=True)[0]


@public
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Gather several arrays, all together or none. See ``allgather``."""
    check_some(tensors, "allgather", *GROUP)
    return _allgather(list(tensors), name, process_set)


@public
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return rank ``root_rank``'s ``tensor``; shapes and dtypes must agree (Mismatch).

    ``root_rank`` is a rank of the whole job. Differentiable: the root's gradient is the average
    over the ranks, as in Horovod, the others' zero.
    """

    def forward(given: list[Any]) -> list[Any]:
        return broadcast_all(given, root_rank, [name], process_set)

    def backward(grads: list[Any]) -> list[Any]:
        again = None if name is None else f"{name}.grad"
        (total,) = _averaged(grads, again, process_set)
        # Selected on all ranks, which its own gradient then needs as well.
        return [jnp.where(current().rank == root_rank, total, jnp.zeros_like(total))]

    return differentiable([operand(tensor)], forward, backward)[0]


def broadcast_all(
    tensors: Sequence[Any],
    root_rank: int,
    names: Sequence[str | None],
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return rank ``root_rank``'s arrays under ``names``, all in one exchange."""
    process_set.rank_of(root_rank, "root_rank")  # an error where the program is traced
    number = process_set.number()
    named = [name_when_run("broadcast", name, number) for name in names]
    dtypes = [dtype_of(tensor) for tensor in tensors]

    def move(arrays: Sequence[Array], results: Sequence[Array]) -> None:
        for result, array in zip(results, arrays, strict=True):
            result[...] = array
        told, shapes = [tell() for tell in named], [array.shape for array in arrays]
        buffers = [flat(result) for result in results]
        broadcast_flat(told, dtypes, shapes, buffers, root_rank, process_set)

    shapes = [tuple(tensor.shape) for tensor in tensors]
    return call(move, tensors, list(zip(dtypes, shapes, strict=True)))


@public
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send consecutive rows to ranks 0, 1, ... and return those received, in rank order.

    ``splits`` says how many rows go to each rank; None divides them equally. With ``splits`` the
    result is a pair: the array, and how many rows came from each rank (int32). That is for calls
    outside of ``jax.jit``, which has to know shapes beforehand (RuntimeError). Differentiable
    without ``splits``.
    """
    given = operand(tensor)
    if splits is not None:
        refuse_trace("alltoall with splits")
        shares = np.asarray(splits)
        check_splits(shares.dtype, shares.shape, shares.dtype.kind in "iu" and shares.ndim == 1)
        named = name_when_run("alltoall", name, process_set.number())
        moved, received = alltoall_array(named(), to_array(given), shares, process_set)
        return to_jax(moved), to_jax(received)

    return _turned(given, name, process_set)


@public
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every rank of the process set has called it. Not inside ``jax.jit``."""
    refuse_trace("barrier")
    wait_at_barrier(name_when_run("barrier", None, process_set.number())(), process_set)


@public
def join() -> int:
    """Go on without this rank's data until all ranks have joined; return who did so last.

    For ranks with fewer batches than others: until the last one joins, this rank contributes zeros
    to every allreduce, and other collectives raise Mismatch. It takes no steps meanwhile: broadcast
    the model and the optimizer's state afterwards, from the rank that is returned. Averages divide
    by all ranks, as in Horovod, or by those that contribute: ``init(join_divisor="contributors")``.
    Not inside ``jax.jit``.
    """
    refuse_trace("join")
    return current().join()


def _allgather(
    tensors: Sequence[Any], name: str | None, process_set: ProcessSet, single: bool = False
) -> list[Any]:
    given = [operand(tensor) for tensor in tensors]
    for tensor in given:
        if tensor.ndim == 0:
            raise InvalidArgument("an array without dimensions cannot be gathered; reshape it")
    kind = "allgather" if single else "grouped_allgather"
    named = name_when_run(kind, name, process_set.number())
    rows: list[Array] = []  # by array and rank, where they differ between ranks

    def forward(inputs: list[Any]) -> list[Any]:
        if not has_values(inputs):
            return _gathered_alike(inputs, named, process_set, single)
        arrays = [to_array(each) for each in inputs]
        gathered, sizes = gather_arrays(named(), arrays, process_set, single)
        rows[:] = list(sizes)
        return [to_jax(each) for each in gathered]

    def backward(grads: list[Any]) -> list[Any]:
        again = None if name is None else f"{name}.grad"
        averaged = _averaged(grads, again, process_set)
        rank, size = process_set.rank(), process_set.size()
        shares = rows or [np.full(size, each.shape[0], np.int64) for each in given]
        firsts = [int(share[:rank].sum()) for share in shares]
        return [
            grad[first : first + int(share[rank])]
            for grad, first, share in zip(averaged, firsts, shares, strict=True)
        ]

    return differentiable(given, forward, backward)


def _gathered_alike(
    tensors: Sequence[Any], named: Any, process_set: ProcessSet, single: bool
) -> list[Any]:
    size = process_set.size()

    def move(arrays: Sequence[Array], results: Sequence[Array]) -> None:
        gathered, sizes = gather_arrays(named(), arrays, process_set, single)
        for array, result, shares in zip(gathered, results, sizes, strict=True):
            if len(set(shares.tolist())) > 1:
                raise InvalidArgument(
                    f"allgather in jax.jit needs as many rows of every rank, not {shares.tolist()}:"
                    " shapes are known beforehand there. Pad them, or call it outside"
                )
            result[...] = array

    outputs = [(dtype_of(t), (size * t.shape[0], *t.shape[1:])) for t in tensors]
    return call(move, tensors, outputs)


def _turned(tensor: Any, name: str | None, process_set: ProcessSet) -> Any:
    def forward(inputs: list[Any]) -> list[Any]:
        return [_moved(inputs[0], name, process_set)]

    def backward(grads: list[Any]) -> list[Any]:
        return [_turned(grads[0], None if name is None else f"{name}.grad", process_set)]

    return differentiable([tensor], forward, backward)[0]


def _moved(tensor: Any, name: str | None, process_set: ProcessSet) -> Any:
    named = name_when_run("alltoall", name, process_set.number())
    rows_to_send(None, tensor.shape, process_set.size())  # an error where the program is traced

    def move(arrays: Sequence[Array], results: Sequence[Array]) -> None:
        moved, received = alltoall_array(named(), arrays[0], None, process_set)
        if moved.shape != results[0].shape:
            raise InvalidArgument(
                "alltoall without splits needs as many rows of every rank: this one received "
                f"{received.tolist()}. Pass splits"
            )
        results[0][...] = moved

    return call(move, [tensor], [(dtype_of(tensor), tuple(tensor.shape))])[0]


def _averaged(grads: Sequence[Any], name: str | None, process_set: ProcessSet) -> list[Any]:
    return grouped_allreduce(grads, op=ReduceOp.AVERAGE, process_set=process_set, name=name)
