"""Collectives that move tensors without combining them, under Horovod's names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringlet.fusion.devices.host import Place
from ringlet.job.process_sets import InvalidArgument, ProcessSet, global_process_set
from ringlet.job.session import current
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.shared.array_operations import (
    alltoall_array,
    broadcast_flat,
    gather_arrays,
    wait_at_barrier,
)
from ringlet.shared.arrays import allocate, flat
from ringlet.shared.requests import check_some, check_splits
from ringlet.tensorflow.ops.autodiff import differentiable
from ringlet.tensorflow.ops.bridge import Name, as_written, operation_name, run
from ringlet.tensorflow.ops.placement import direct
from ringlet.tensorflow.ops.reductions import grouped_allreduce
from ringlet.tensorflow.ops.tensors import LEAVES, dense, dtype_of, signed, unsigned
from ringlet.tensorflow.ops.topology_ops import rank_in, ranks_stay


@as_written
def allgather(
    tensor: Any,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return every rank's ``tensor`` behind one another along the first dimension. Differentiable.

    First dimensions may differ between ranks; the others, and the dtype, may not (Mismatch). The
    gradient is averaged over the ranks, as in Horovod.
    """
    return _allgather([tensor], name, process_set, single=True)[0]


@as_written
def grouped_allgather(
    tensors: Sequence[Any],
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Gather several tensors, all together or none, in one graph node. See ``allgather``."""
    check_some(tensors, "allgather", LEAVES)
    return _allgather(list(tensors), name, process_set)


@as_written
def broadcast(
    tensor: Any,
    root_rank: int,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return rank ``root_rank``'s ``tensor``; shapes and dtypes must agree (Mismatch).

    ``root_rank`` is a rank of the whole job. Differentiable: the root's gradient is the average
    over the ranks, as in Horovod, the others' zero.
    """

    def forward(given: list[Any]) -> tuple[list[Any], Any]:
        return broadcast_all(given, root_rank, [name], process_set), None

    def backward(grads: list[Any], _: Any) -> list[Any]:
        again = None if name is None else f"{name}.grad"
        total = _averaged(grads, again, process_set)[0]
        is_root = tf.equal(rank_in(global_process_set), root_rank)
        # Selected on all ranks: others wait for this node, and for that of its own gradient.
        return [tf.where(is_root, total, tf.zeros_like(total))]

    return differentiable([dense(tensor, moves=True)], forward, backward)[0]


@as_written
def broadcast_(
    variables: Sequence[Any],
    root_rank: int,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Overwrite ``variables`` with rank ``root_rank``'s, in one graph node; return the values.

    In a ``tf.compat.v1`` graph it is the values returned that overwrite them, when evaluated.
    """
    listed = list(variables)
    if not listed:
        return listed
    base = name or "broadcast_"
    names: list[str | None] = [f"{base}.{i}" for i in range(len(listed))]
    values = broadcast_all([dense(v, moves=True) for v in listed], root_rank, names, process_set)
    assigned = [variable.assign(value) for variable, value in zip(listed, values, strict=True)]
    if tf.executing_eagerly():
        return values
    with tf.control_dependencies([each for each in assigned if each is not None]):
        return [tf.identity(value) for value in values]


def broadcast_all(
    tensors: Sequence[Any],
    root_rank: int,
    names: Sequence[Name],
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return rank ``root_rank``'s tensors under ``names``, all in one graph node."""
    process_set.rank_of(root_rank, "root_rank")  # an error where the graph is built
    number = process_set.number()
    given = [signed(tensor) for tensor in tensors]
    dtypes = [dtype_of(tensor) for tensor in given]
    named = [
        operation_name("broadcast", name, tensor, number)
        for name, tensor in zip(names, tensors, strict=True)
    ]

    def submit(shapes: list[tuple[int, ...]], buffers: list[Array], place: str) -> None:
        told = [tell() for tell in named]
        broadcast_flat(told, dtypes, shapes, buffers, root_rank, process_set, place)

    def move(arrays: list[Array]) -> list[Array]:
        shapes = [array.shape for array in arrays]
        outputs = allocate(dtypes, shapes)
        for out, array in zip(outputs, arrays, strict=True):
            out[...] = array
        submit(shapes, [flat(out) for out in outputs], Place.name)
        return outputs

    way = direct(given, None)
    if way is not None:
        way.copy()
        shapes = [tuple(tensor.shape) for tensor in given]
        moved = way.run(lambda _, targets, place: submit(shapes, targets, place))
    else:
        moved = run(move, given, [(d, t.shape) for d, t in zip(dtypes, given, strict=True)])
    return [unsigned(result, like) for result, like in zip(moved, tensors, strict=True)]


@as_written
def alltoall(
    tensor: Any,
    splits: Any = None,
    name: str | None = None,
    ignore_name_scope: bool = False,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Send consecutive rows to ranks 0, 1, ... and return those received, in rank order.

    ``splits`` says how many rows go to each rank (whole numbers, known at run time); None divides
    them equally. With ``splits`` the result is a pair: the tensor, and how many rows came from each
    rank (int32). Differentiable.
    """
    equal = splits is None
    rows = tf.constant([], tf.int64) if equal else tf.convert_to_tensor(splits)
    fits = rows.dtype.is_integer and rows.shape.rank in (None, 1)
    check_splits(rows.dtype.name, rows.shape, fits)
    rows = tf.stop_gradient(tf.cast(rows, tf.int64))

    moved, received = _turned(dense(tensor, moves=True), rows, equal, name, process_set)
    return moved if equal else (moved, received)


@as_written
def barrier(process_set: ProcessSet = global_process_set) -> None:
    """Return once every rank of the process set has called it."""
    number = process_set.number()
    named = operation_name("barrier", None, None, number)

    def wait(_: list[Array]) -> list[Array]:
        wait_at_barrier(named(), process_set)
        return []

    run(wait, [], [])


@as_written
def join() -> Any:
    """Go on without this rank's data until all ranks have joined; return who did so last (int32).

    For ranks with fewer batches than others: until the last one joins, this rank contributes zeros
    to every allreduce, and other collectives raise Mismatch. It takes no steps meanwhile: broadcast
    the model and the optimizer's state afterwards, from the rank that is returned. Averages divide
    by all ranks, as in Horovod, or by those that contribute: ``init(join_divisor="contributors")``.
    """

    def wait(_: list[Array]) -> list[Array]:
        return [np.array(current().join(), np.int32)]

    return run(wait, [], [("int32", ())])[0]


def _allgather(
    tensors: Sequence[Any], name: str | None, process_set: ProcessSet, single: bool = False
) -> list[Any]:
    given = [dense(tensor, moves=True) for tensor in tensors]
    for tensor in given:
        if tensor.shape.rank == 0:
            raise InvalidArgument("a tensor without dimensions cannot be gathered; reshape it")

    def forward(inputs: list[Any]) -> tuple[list[Any], Any]:
        results = _gather(inputs, name, process_set, single)
        return results[:-1], results[-1]

    def backward(grads: list[Any], sizes: Any) -> list[Any]:
        again = None if name is None else f"{name}.grad"
        wanted = [i for i, grad in enumerate(grads) if grad.dtype.is_floating]
        averaged = list(grads)  # of integers and booleans, which have no gradient, they are zeros
        means = _averaged([grads[i] for i in wanted], again, process_set)
        for i, mean in zip(wanted, means, strict=True):
            averaged[i] = mean
        rank = rank_in(process_set)
        firsts, counts = tf.reduce_sum(sizes[:, :rank], axis=1), sizes[:, rank]
        return [g[firsts[i] : firsts[i] + counts[i]] for i, g in enumerate(averaged)]

    return differentiable(given, forward, backward)


def _gather(
    tensors: Sequence[Any], name: str | None, process_set: ProcessSet, single: bool
) -> list[Any]:
    """Return the gathered tensors, and behind them the rows by tensor and rank (int64)."""
    number, count = process_set.number(), len(tensors)
    given = [signed(tensor) for tensor in tensors]
    dtypes = [dtype_of(tensor) for tensor in given]
    kind = "allgather" if single else "grouped_allgather"
    named = operation_name(kind, name, tensors[0], number)

    def move(arrays: list[Array]) -> list[Array]:
        gathered, sizes = gather_arrays(named(), arrays, process_set, single)
        return [*gathered, sizes]

    outputs: list[tuple[str, Any]] = [
        (dtype, None if t.shape.rank is None else (None, *t.shape[1:]))
        for dtype, t in zip(dtypes, given, strict=True)
    ]
    *moved, sizes = run(move, given, [*outputs, ("int64", (count, _size(process_set)))])
    return [*[unsigned(each, like) for each, like in zip(moved, tensors, strict=True)], sizes]


def _turned(
    tensor: Any, rows: Any, equal: bool, name: str | None, process_set: ProcessSet
) -> list[Any]:
    def forward(given: list[Any]) -> tuple[list[Any], Any]:
        results = _alltoall(given[0], rows, equal, name, process_set)
        return results, results[1]

    def backward(grads: list[Any], received: Any) -> list[Any]:
        again = None if name is None else f"{name}.grad"
        return _turned(grads[0], tf.cast(received, tf.int64), False, again, process_set)[:1]

    return differentiable([tensor], forward, backward)


def _alltoall(
    tensor: Any, splits: Any, equal: bool, name: str | None, process_set: ProcessSet
) -> list[Any]:
    number, size = process_set.number(), _size(process_set)
    given = signed(tensor)
    dtype = dtype_of(given)
    named = operation_name("alltoall", name, tensor, number)

    def move(arrays: list[Array]) -> list[Array]:
        array, shares = arrays
        return list(alltoall_array(named(), array, None if equal else shares, process_set))

    shape = None if tensor.shape.rank is None else (None, *tensor.shape[1:])
    moved, received = run(move, [given, splits], [(dtype, shape), ("int32", (size,))])
    return [unsigned(moved, tensor), received]


def _size(process_set: ProcessSet) -> int | None:
    """Return the size of a dimension in which there is an entry for each rank, where it stays."""
    return process_set.size() if ranks_stay() else None


def _averaged(grads: Sequence[Any], name: str | None, process_set: ProcessSet) -> list[Any]:
    return grouped_allreduce(grads, op=ReduceOp.AVERAGE, process_set=process_set, name=name)
