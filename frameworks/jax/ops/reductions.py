"""Allreduce on JAX's arrays, under Horovod's names and arguments, eager and in programs.

Operations without a name get one from a counter, so ranks must run those in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ringlet.compressors.specs.routes import Spec
from ringlet.jax.ops.cotangents import STOP, differentiable
from ringlet.jax.ops.operands import GROUP, dtype_of, name_when_run, operand
from ringlet.jax.ops.ordered_calls import call
from ringlet.job.process_sets import ProcessSet, global_process_set
from ringlet.ring.callers import public
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.shared.array_operations import allreduce_arrays
from ringlet.shared.reduction_arguments import Reduction
from ringlet.shared.requests import check_some


@public
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
    return _allreduce([tensor], Reduction.among(locals()))[0]


@public
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
    check_some(tensors, "allreduce", *GROUP)
    return _allreduce(list(tensors), Reduction.among(locals()))


def _allreduce(tensors: Sequence[Any], asked: Reduction) -> list[Any]:
    return asked.run([operand(tensor) for tensor in tensors], _reduced)


def _reduced(tensors: Sequence[Any], asked: Reduction) -> list[Any]:
    asked.check_name()

    def forward(inputs: list[Any]) -> list[Any]:
        return _run(inputs, asked)

    def backward(grads: list[Any]) -> list[Any]:
        return _reduced(grads, asked.backward(STOP))

    return differentiable(tensors, forward, backward)


def _run(tensors: Sequence[Any], asked: Reduction) -> list[Any]:
    dtypes = [dtype_of(tensor) for tensor in tensors]
    asked.check("allreduce", asked.wires(dtypes))
    named = name_when_run(asked.kind("allreduce"), asked.name, asked.process_set.number())

    def combine(arrays: Sequence[Array], results: Sequence[Array]) -> None:
        allreduce_arrays(named(), arrays, results, asked)

    shapes = [tuple(tensor.shape) for tensor in tensors]
    return call(combine, tensors, list(zip(dtypes, shapes, strict=True)))
