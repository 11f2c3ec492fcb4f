"""Reduce-scatter on torch tensors: each rank keeps its share of the rows of a reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ringlet.compressors.specs.routes import Spec
from ringlet.job.process_sets import ProcessSet, global_process_set
from ringlet.job.session import current
from ringlet.ring.communicator import ReduceOp
from ringlet.shared.compression import around, as_compressor, legacy
from ringlet.shared.requests import (
    as_op,
    check_scatter,
    group_requests,
    refuse_one,
    scatter_gradient,
    scattered_as,
)
from ringlet.torch.ops.entry_points import public
from ringlet.torch.ops.handles import Tensors, TorchHandle, differentiable
from ringlet.torch.ops.movements import grouped_allgather
from ringlet.torch.ops.reductions import refuse_mean
from ringlet.torch.tensors.placement import Room, flat_at, packed, place_of
from ringlet.torch.tensors.views import DTYPES, check, dtype_of


@public
def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> TorchHandle:
    """Start a ``reducescatter``."""
    factors = prescale_factor, postscale_factor
    return _start([tensor], name, op, process_set, factors, single=True)


@public
def reducescatter(
    tensor: torch.Tensor,
    name: str | None = None,
    compression: Spec = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> torch.Tensor:
    """Return this rank's rows of ``tensor`` combined over all ranks. Differentiable.

    The first dimension is divided over the ranks; where that leaves rows over, the first ranks
    have one more. ``op`` is Average or Sum (or Min, Max, Product); ``compression`` "none", "fp16"
    or "bf16". The gradient of a Sum is multiplied by the number of ranks, as in Horovod.
    """
    result: torch.Tensor = _differentiable(
        [tensor], name, compression, op, process_set, (prescale_factor, postscale_factor), True
    )
    return result


@public
def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> TorchHandle:
    """Start a ``grouped_reducescatter``."""
    refuse_one(tensors, "reducescatter")
    return _start(tensors, name, op, process_set, (prescale_factor, postscale_factor))


@public
def grouped_reducescatter(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    compression: Spec = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> list[torch.Tensor]:
    """Reduce and scatter several tensors, all together or none. See ``reducescatter``."""
    refuse_one(tensors, "reducescatter")
    result: list[torch.Tensor] = _differentiable(
        tensors, name, compression, op, process_set, (prescale_factor, postscale_factor), False
    )
    return result


def _differentiable(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    compression: Any,
    op: ReduceOp,
    process_set: ProcessSet,
    factors: tuple[float, float],
    single: bool,
) -> Any:
    cast, op = legacy(compression), as_op(op)
    wire = None if cast is not None else scattered_as(as_compressor(compression))

    def start(given: Tensors) -> TorchHandle:
        return _start(given, name, op, process_set, factors, single, wire)

    def backward(grads: Tensors, handle: TorchHandle) -> Tensors:
        factor = scatter_gradient(op, factors, process_set)
        if factor is None:
            raise RuntimeError(f"reducescatter with op={op.name.title()} has no gradient")
        scaled = [grad.contiguous() * factor for grad in grads]
        return grouped_allgather(scaled, f"{handle.name}.grad", process_set)

    if cast is None:
        return differentiable(list(tensors), start, backward)

    def combine(small: Tensors) -> Tensors:
        result = differentiable(small, start, backward)
        return [result] if single else result

    wide = around(cast, tensors, combine)
    return wide[0] if single else wide


def _start(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: ReduceOp,
    process_set: ProcessSet,
    factors: tuple[float, float],
    single: bool = False,
    wire: str | None = None,
) -> TorchHandle:
    runtime, number, op = current(), process_set.number(), as_op(op)
    for tensor in tensors:
        check(tensor)
        refuse_mean(tensor, op)
    check_scatter(op, [tensor.dim() for tensor in tensors])
    base = name or runtime.unnamed("reducescatter" if single else "grouped_reducescatter", number)
    rank = process_set.rank()
    places = [place_of(tensor, op) for tensor in tensors]
    sources = [
        packed(t, place).to(DTYPES[wire] if wire and t.is_floating_point() else t.dtype)
        for t, place in zip(tensors, places, strict=True)
    ]
    rooms = [Room(source, place) for source, place in zip(sources, places, strict=True)]
    dtypes, shapes = [dtype_of(s) for s in sources], [s.shape for s in sources]
    requests = group_requests(
        "reducescatter",
        base,
        single,
        dtypes,
        shapes,
        places,
        op=op,
        prescale=factors[0],
        postscale=factors[1],
        process_set=number,
    )
    items = [
        (request, flat_at(source, request.place), room.output, None)
        for request, source, room in zip(requests, sources, rooms, strict=True)
    ]

    def result(done: Any) -> Any:
        outputs = [
            room.filled(operation.output, operation.sizes[rank]).to(tensor)
            for operation, room, tensor in zip(done, rooms, tensors, strict=True)
        ]
        return outputs[0] if single else outputs

    return TorchHandle(runtime.engine.submit_all(items), result)
