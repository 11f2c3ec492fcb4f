"""Allreduce on JAX's arrays, under Horovod's names and arguments, eager and in programs.

Operations without a name get one from a counter, so ranks must run those in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringlet.compressors import Compressor, NoCompression
from ringlet.compressors.specs.routes import Spec
from ringlet.jax.ops.cotangents import differentiable, no_gradient
from ringlet.jax.ops.operands import check_defined, dtype_of, name_when_run, operand
from ringlet.jax.ops.ordered_calls import call
from ringlet.job.process_sets import ProcessSet, global_process_set
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.shared.array_operations import Factors, allreduce_arrays
from ringlet.shared.compression import as_compressor
from ringlet.shared.requests import SUMS, check_nameable, check_some, reduce_op, reduced_as


def allreduce(
    tensor: Any,
    average: bool | None = None,
    name: str | None = None,
    compression: Spec = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> Any:
    """Return ``tensor`` combined over all ranks: averaged, or by ``op``. Differentiable.

    ``op`` is Average, Sum, Min, Max, Product or Adasum. Values are multiplied by
    ``prescale_factor`` before and by ``postscale_factor`` after they are combined.
    ``compression`` is a spec; one that remembers (``ef``) needs a ``name``, and is for calls
    outside of ``jax.jit`` or for functions whose calls may depend on those before. Raises Mismatch,
    the same on every rank, when ranks pass different shapes, dtypes or arguments: inside
    ``jax.jit`` where the program is called.
    """
    chosen, factors = reduce_op(average, op), (prescale_factor, postscale_factor)
    return _allreduce([tensor], chosen, factors, name, process_set, compression, single=True)[0]


def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    name: str | None = None,
    compression: Spec = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[Any]:
    """Return ``tensors`` combined over all ranks: all of them together, or none. Differentiable.

    See ``allreduce``.
    """
    check_some(tensors, "allreduce")
    chosen, factors = reduce_op(average, op), (prescale_factor, postscale_factor)
    return _allreduce(list(tensors), chosen, factors, name, process_set, compression)


def _allreduce(
    tensors: Sequence[Any],
    op: ReduceOp,
    factors: Factors,
    name: str | None,
    process_set: ProcessSet,
    compression: Any,
    single: bool = False,
) -> list[Any]:
    given = [operand(tensor) for tensor in tensors]
    compressor = as_compressor(compression)
    if name is None:
        check_nameable(compressor)

    def forward(inputs: list[Any]) -> list[Any]:
        return _run(inputs, op, factors, name, process_set, compressor, single)

    def backward(grads: list[Any]) -> list[Any]:
        if op not in SUMS:
            no_gradient(f"allreduce with op={op.name.title()}")
        again = None if name is None else f"{name}.grad"
        return _run(grads, op, factors, again, process_set, NoCompression(), single)

    return differentiable(given, forward, backward)


def _run(
    tensors: Sequence[Any],
    op: ReduceOp,
    factors: Factors,
    name: str | None,
    process_set: ProcessSet,
    compressor: Compressor,
    single: bool,
) -> list[Any]:
    dtypes = [dtype_of(tensor) for tensor in tensors]
    wires = [reduced_as(dtype, op, compressor) for dtype in dtypes]
    check_defined("allreduce", name, wires, op, factors)
    kind = "allreduce" if single else "grouped_allreduce"
    named = name_when_run(kind, name, process_set.number())

    def combine(arrays: Sequence[Array], results: Sequence[Array]) -> None:
        allreduce_arrays(named(), arrays, results, op, factors, compressor, process_set, single)

    shapes = [tuple(tensor.shape) for tensor in tensors]
    return call(combine, tensors, list(zip(dtypes, shapes, strict=True)))
