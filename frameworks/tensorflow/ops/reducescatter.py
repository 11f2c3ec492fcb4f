"""Reduce-scatter: combine over all ranks, and keep this rank's share of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ringlet.compressors import BF16, FP16, NoCompression
from ringlet.compressors.routes import Spec
from ringlet.fusion import Request
from ringlet.job.process_sets import InvalidArgument, ProcessSet, global_process_set
from ringlet.job.session import current
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import FLOATS, Array
from ringlet.shared.arrays import flat, numpy_dtype, shaped
from ringlet.shared.compression import as_compressor, legacy
from ringlet.tensorflow.ops.autodiff import differentiable, no_gradient
from ringlet.tensorflow.ops.bridge import as_written, operation_name, run
from ringlet.tensorflow.ops.movements import grouped_allgather
from ringlet.tensorflow.ops.reductions import wait_all
from ringlet.tensorflow.ops.tensors import check_defined, dense, dtype_of


@as_written
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Spec = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Return this rank's rows of the combination over all ranks. Differentiable.

    The first dimension is divided as equally as it can be, earlier ranks having the longer shares.
    ``op`` is Average, Sum, Min, Max or Product; ``compression`` "none", "fp16" or "bf16".
    """
    factors = prescale_factor, postscale_factor
    return _scatter([tensor], name, op, process_set, factors, compression, single=True)[0]


@as_written
def grouped_reducescatter(
    tensors: Sequence[Any],
    device_dense: str = "",
    compression: Spec = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
) -> list[Any]:
    """Reduce-scatter several tensors, all of them together or none, in one graph node."""
    if not tensors:
        raise InvalidArgument("a grouped reducescatter needs at least one tensor")
    factors = prescale_factor, postscale_factor
    return _scatter(list(tensors), name, op, process_set, factors, compression)


def _scatter(
    tensors: Sequence[Any],
    name: str | None,
    op: ReduceOp,
    process_set: ProcessSet,
    factors: tuple[float, float],
    compression: Any,
    single: bool = False,
) -> list[Any]:
    op, given = ReduceOp(op), [dense(tensor) for tensor in tensors]
    if op is ReduceOp.ADASUM:
        raise InvalidArgument("reducescatter takes op Average, Sum, Min, Max or Product")
    if any(tensor.shape.rank == 0 for tensor in given):
        raise InvalidArgument("reducescatter needs a tensor with at least one dimension")
    cast = legacy(compression)
    if cast is not None:
        pairs = [cast.compress(tensor) for tensor in given]
        small = [pair[0] for pair in pairs]
        shares = _scatter(small, name, op, process_set, factors, None, single)
        return [cast.decompress(t, pair[1]) for t, pair in zip(shares, pairs, strict=True)]
    wire = _wire(as_compressor(compression))

    def forward(inputs: list[Any]) -> tuple[list[Any], Any]:
        return _run(inputs, name, op, process_set, factors, single, wire), None

    def backward(grads: list[Any], _: Any) -> list[Any]:
        if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            no_gradient(f"reducescatter with op={op.name.title()}")
        factor = factors[0] * factors[1] * (process_set.size() if op is ReduceOp.SUM else 1)
        scaled = [grad * tf.cast(factor, grad.dtype) for grad in grads]
        again = None if name is None else f"{name}.grad"
        return grouped_allgather(scaled, again, process_set=process_set)

    return differentiable(given, forward, backward)


def _run(
    tensors: Sequence[Any],
    name: str | None,
    op: ReduceOp,
    process_set: ProcessSet,
    factors: tuple[float, float],
    single: bool,
    wire: str | None,
) -> list[Any]:
    number, count, rank = process_set.number(), len(tensors), process_set.rank()
    dtypes = [dtype_of(tensor) for tensor in tensors]
    wires = [wire if wire and dtype in FLOATS else dtype for dtype in dtypes]
    check_defined("reducescatter", name, wires, op, factors)
    kind = "reducescatter" if single else "grouped_reducescatter"
    named = operation_name(kind, name, tensors[0], number)

    def combine(arrays: list[Array]) -> list[Array]:
        base, items = named(), []
        for i, (array, each) in enumerate(zip(arrays, wires, strict=True)):
            request = Request(
                base if single else f"{base}_{i + 1}of{count}",
                "reducescatter",
                each,
                array.shape,
                op,
                prescale=factors[0],
                postscale=factors[1],
                process_set=number,
                group="" if single else base,
                group_size=0 if single else count,
            )
            source = array.astype(numpy_dtype(each), copy=False)
            items.append((request, flat(source), None, None))
        handles = current().engine.submit_all(items)
        wait_all(handles)
        return [
            shaped(handle.output, each, (handle.sizes[rank], *array.shape[1:])).astype(
                array.dtype, copy=False
            )
            for handle, each, array in zip(handles, wires, arrays, strict=True)
        ]

    outputs: list[tuple[str, Any]] = [
        (dtype, None if t.shape.rank is None else (None, *t.shape[1:]))
        for dtype, t in zip(dtypes, tensors, strict=True)
    ]
    return run(combine, tensors, outputs)


def _wire(compressor: Any) -> str | None:
    if isinstance(compressor, NoCompression):
        return None
    if isinstance(compressor, FP16 | BF16):
        return "float16" if isinstance(compressor, FP16) else "bfloat16"
    raise InvalidArgument(
        f"reducescatter takes compression 'none', 'fp16' or 'bf16', not {str(compressor)!r}: "
        "others are decoded on every rank, so use allreduce"
    )
