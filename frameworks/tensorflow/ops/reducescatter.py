"""Reduce-scatter: combine over all ranks, and keep this rank's share of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ringlet.compressors.specs.routes import Spec
from ringlet.job.process_sets import ProcessSet, global_process_set
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.shared.array_operations import scatter_arrays
from ringlet.shared.reduction_arguments import Reduction
from ringlet.shared.requests import (
    check_scatter,
    refuse_one,
)
from ringlet.tensorflow.ops.autodiff import STOP, differentiable
from ringlet.tensorflow.ops.bridge import as_written, operation_name, run
from ringlet.tensorflow.ops.movements import grouped_allgather
from ringlet.tensorflow.ops.tensors import LEAVES, dense, dtype_of


@as_written
def reducescatter(
    tensor: Any,
    device_dense: str = "",
    compression: Spec = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Return this rank's rows of the combination over all ranks. Differentiable.

    The first dimension is divided as equally as it can be, earlier ranks having the longer shares.
    ``op`` is Average, Sum, Min, Max or Product; ``compression`` "none", "fp16" or "bf16".
    ``ignore_name_scope`` is accepted for Horovod's sake.
    """
    return _scatter([tensor], Reduction.among(locals()))[0]


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
    refuse_one(tensors, "reducescatter", LEAVES)
    return _scatter(list(tensors), Reduction.among(locals())) if tensors else []


def _scatter(tensors: Sequence[Any], asked: Reduction) -> list[Any]:
    given = [dense(tensor) for tensor in tensors]
    check_scatter(asked.op, [tensor.shape.rank for tensor in given])
    return asked.run(given, _scattered)


def _scattered(tensors: Sequence[Any], asked: Reduction) -> list[Any]:
    def forward(inputs: list[Any]) -> tuple[list[Any], Any]:
        return _run(inputs, asked), None

    def backward(grads: list[Any], _: Any) -> list[Any]:
        factor = asked.scatter_factor(STOP)
        scaled = [grad * tf.cast(factor, grad.dtype) for grad in grads]
        return grouped_allgather(scaled, asked.gradient_name(), process_set=asked.process_set)

    return differentiable(tensors, forward, backward)


def _run(tensors: Sequence[Any], asked: Reduction) -> list[Any]:
    dtypes = [dtype_of(tensor) for tensor in tensors]
    asked.check("reducescatter", asked.scattered_wires(dtypes))
    number, kind = asked.process_set.number(), asked.kind("reducescatter")
    named = operation_name(kind, asked.name, tensors[0], number)

    def combine(arrays: list[Array]) -> list[Array]:
        return scatter_arrays(named(), arrays, asked)

    outputs: list[tuple[str, Any]] = [
        (dtype, None if t.shape.rank is None else (None, *t.shape[1:]))
        for dtype, t in zip(dtypes, tensors, strict=True)
    ]
    return run(combine, tensors, outputs)
