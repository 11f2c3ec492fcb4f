"""Reduce-scatter: combine over all ranks, and keep this rank's share of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ringlet.compressors.specs.routes import Spec
from ringlet.job.process_sets import ProcessSet, global_process_set
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.shared.array_operations import scatter_arrays, scattered_types
from ringlet.shared.compression import around, as_compressor, legacy
from ringlet.shared.requests import (
    check_scatter,
    check_some,
    scatter_gradient,
    scattered_as,
)
from ringlet.tensorflow.ops.autodiff import differentiable, no_gradient
from ringlet.tensorflow.ops.bridge import as_written, operation_name, run
from ringlet.tensorflow.ops.movements import grouped_allgather
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
    check_some(tensors, "reducescatter")
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
    check_scatter(op, [tensor.shape.rank for tensor in given])
    cast = legacy(compression)
    if cast is not None:
        return around(
            cast,
            given,
            lambda small: _scatter(small, name, op, process_set, factors, None, single),
        )
    wire = scattered_as(as_compressor(compression))

    def forward(inputs: list[Any]) -> tuple[list[Any], Any]:
        return _run(inputs, name, op, process_set, factors, single, wire), None

    def backward(grads: list[Any], _: Any) -> list[Any]:
        factor = scatter_gradient(op, factors, process_set)
        if factor is None:
            no_gradient(f"reducescatter with op={op.name.title()}")
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
    number = process_set.number()
    dtypes = [dtype_of(tensor) for tensor in tensors]
    check_defined("reducescatter", name, scattered_types(dtypes, wire), op, factors)
    kind = "reducescatter" if single else "grouped_reducescatter"
    named = operation_name(kind, name, tensors[0], number)

    def combine(arrays: list[Array]) -> list[Array]:
        return scatter_arrays(named(), arrays, wire, op, factors, process_set, single)

    outputs: list[tuple[str, Any]] = [
        (dtype, None if t.shape.rank is None else (None, *t.shape[1:]))
        for dtype, t in zip(dtypes, tensors, strict=True)
    ]
    return run(combine, tensors, outputs)
