"""Reduce-scatter: combine over all ranks, and keep this rank's share of the rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringlet.compressors.specs.routes import Spec
from ringlet.jax.ops.cotangents import differentiable, no_gradient
from ringlet.jax.ops.movements import grouped_allgather
from ringlet.jax.ops.operands import check_defined, dtype_of, name_when_run, operand
from ringlet.jax.ops.ordered_calls import call
from ringlet.job.process_sets import ProcessSet, global_process_set
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.shared.array_operations import Factors, scatter_arrays, scattered_types
from ringlet.shared.compression import as_compressor
from ringlet.shared.requests import check_scatter, check_some, scatter_gradient, scattered_as


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
    factors = prescale_factor, postscale_factor
    return _scatter([tensor], name, op, process_set, factors, compression, single=True)[0]


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
    check_some(tensors, "reducescatter")
    factors = prescale_factor, postscale_factor
    return _scatter(list(tensors), name, op, process_set, factors, compression)


def _scatter(
    tensors: Sequence[Any],
    name: str | None,
    op: ReduceOp,
    process_set: ProcessSet,
    factors: Factors,
    compression: Any,
    single: bool = False,
) -> list[Any]:
    op, given = ReduceOp(op), [operand(tensor) for tensor in tensors]
    check_scatter(op, [tensor.ndim for tensor in given])
    wire = scattered_as(as_compressor(compression))
    dtypes = [dtype_of(tensor) for tensor in given]
    check_defined("reducescatter", name, scattered_types(dtypes, wire), op, factors)
    kind = "reducescatter" if single else "grouped_reducescatter"
    named = name_when_run(kind, name, process_set.number())
    size, rank = process_set.size(), process_set.rank()

    def combine(arrays: Sequence[Array], results: Sequence[Array]) -> None:
        scattered = scatter_arrays(named(), arrays, wire, op, factors, process_set, single)
        for array, result in zip(scattered, results, strict=True):
            result[...] = array

    def forward(inputs: list[Any]) -> list[Any]:
        outputs = [
            (dtype, (_share(each.shape[0], rank, size), *each.shape[1:]))
            for each, dtype in zip(inputs, dtypes, strict=True)
        ]
        return call(combine, inputs, outputs)

    def backward(grads: list[Any]) -> list[Any]:
        factor = scatter_gradient(op, factors, process_set)
        if factor is None:
            no_gradient(f"reducescatter with op={op.name.title()}")
        assert factor is not None
        scaled = [grad * grad.dtype.type(factor) for grad in grads]
        again = None if name is None else f"{name}.grad"
        return grouped_allgather(scaled, again, process_set)

    return differentiable(given, forward, backward)


def _share(rows: int, rank: int, size: int) -> int:
    """Return how many of ``rows`` are a rank's: earlier ranks have the longer shares."""
    return rows // size + (rank < rows % size)
