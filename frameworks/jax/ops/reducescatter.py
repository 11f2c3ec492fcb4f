"""Reduce-scatter: combine over all ranks, and keep this rank's share of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringlet.compressors.specs.routes import Spec
from ringlet.jax.ops.cotangents import STOP, differentiable
from ringlet.jax.ops.movements import grouped_allgather
from ringlet.jax.ops.operands import GROUP, dtype_of, name_when_run, operand
from ringlet.jax.ops.ordered_calls import call
from ringlet.job.process_sets import ProcessSet, global_process_set
from ringlet.ring.callers import public
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.shared.array_operations import scatter_arrays
from ringlet.shared.reduction_arguments import Reduction
from ringlet.shared.requests import check_scatter, check_some


@public
def reducescatter(
    tensor: Any,
    name: str | None = None,
    compression: Spec = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Any:
    """Return this rank's rows of the combination over all ranks. Differentiable.

    The first dimension is divided as equally as it can be, earlier ranks having the longer shares.
    ``op`` is Average, Sum, Min, Max or Product; ``compression`` "none", "fp16" or "bf16". The
    gradient needs equal shares inside ``jax.jit``.
    """
    return _scatter([tensor], Reduction.among(locals()))[0]


@public
def grouped_reducescatter(
    tensors: Sequence[Any],
    name: str | None = None,
    compression: Spec = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[Any]:
    """Reduce-scatter several arrays, all of them together or none. See ``reducescatter``."""
    check_some(tensors, "reducescatter", *GROUP)
    return _scatter(list(tensors), Reduction.among(locals()))


def _scatter(tensors: Sequence[Any], asked: Reduction) -> list[Any]:
    given = [operand(tensor) for tensor in tensors]
    check_scatter(asked.op, [tensor.ndim for tensor in given])
    return asked.run(given, _scattered)


def _scattered(tensors: Sequence[Any], asked: Reduction) -> list[Any]:
    dtypes = [dtype_of(tensor) for tensor in tensors]
    asked.check("reducescatter", asked.scattered_wires(dtypes))
    process_set = asked.process_set
    named = name_when_run(asked.kind("reducescatter"), asked.name, process_set.number())
    size, rank = process_set.size(), process_set.rank()

    def combine(arrays: Sequence[Array], results: Sequence[Array]) -> None:
        scattered = scatter_arrays(named(), arrays, asked)
        for array, result in zip(scattered, results, strict=True):
            result[...] = array

    def forward(inputs: list[Any]) -> list[Any]:
        outputs = [
            (dtype, (_share(each.shape[0], rank, size), *each.shape[1:]))
            for each, dtype in zip(inputs, dtypes, strict=True)
        ]
        return call(combine, inputs, outputs)

    def backward(grads: list[Any]) -> list[Any]:
        factor = asked.scatter_factor(STOP)
        scaled = [grad * grad.dtype.type(factor) for grad in grads]
        return grouped_allgather(scaled, asked.gradient_name(), process_set)

    return differentiable(tensors, forward, backward)


def _share(rows: int, rank: int, size: int) -> int:
    """Return how many of ``rows`` are a rank's: earlier ranks have the longer shares."""
    return rows // size + (rank < rows % size)
