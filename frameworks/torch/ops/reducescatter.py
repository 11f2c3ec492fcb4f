"""Reduce-scatter on torch tensors: each rank keeps its share of the rows of a reduction."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ringlet.compressors import BF16, FP16, NoCompression
from ringlet.compressors.routes import Spec
from ringlet.fusion import Request
from ringlet.job.process_sets import InvalidArgument, ProcessSet, global_process_set
from ringlet.job.session import current
from ringlet.ring.communicator import ReduceOp
from ringlet.shared.compression import as_compressor, legacy
from ringlet.torch.ops.handles import Handle, Tensors, differentiable
from ringlet.torch.ops.movements import grouped_allgather
from ringlet.torch.ops.reductions import refuse_mean
from ringlet.torch.tensors.placement import Room, flat_at, packed, place_of
from ringlet.torch.tensors.views import check, dtype_of


def reducescatter_async(
    tensor: torch.Tensor,
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a ``reducescatter``."""
    factors = prescale_factor, postscale_factor
    return _start([tensor], name, op, process_set, factors, single=True)


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


def grouped_reducescatter_async(
    tensors: Sequence[torch.Tensor],
    name: str | None = None,
    op: ReduceOp = ReduceOp.AVERAGE,
    process_set: ProcessSet = global_process_set,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
) -> Handle:
    """Start a ``grouped_reducescatter``."""
    return _start(tensors, name, op, process_set, (prescale_factor, postscale_factor))


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
    cast = legacy(compression)
    wire = None if cast is not None else _wire(as_compressor(compression))

    def start(given: Tensors) -> Handle:
        return _start(given, name, op, process_set, factors, single, wire)

    def backward(grads: Tensors, handle: Handle) -> Tensors:
        if op not in (ReduceOp.AVERAGE, ReduceOp.SUM):
            raise RuntimeError(f"reducescatter with op={op.name.title()} has no gradient")
        factor = factors[0] * factors[1] * (process_set.size() if op is ReduceOp.SUM else 1)
        scaled = [grad.contiguous() * factor for grad in grads]
        return grouped_allgather(scaled, f"{handle.name}.grad", process_set)

    if cast is None:
        return differentiable(list(tensors), start, backward)
    pairs = [cast.compress(tensor) for tensor in tensors]
    result = differentiable([pair[0] for pair in pairs], start, backward)
    outputs = [result] if single else result
    wide = [cast.decompress(t, pair[1]) for t, pair in zip(outputs, pairs, strict=True)]
    return wide[0] if single else wide


def _wire(compressor: Any) -> torch.dtype | None:
    if isinstance(compressor, NoCompression):
        return None
    if isinstance(compressor, FP16 | BF16):
        return torch.float16 if isinstance(compressor, FP16) else torch.bfloat16
    raise InvalidArgument(
        f"reducescatter takes compression 'none', 'fp16' or 'bf16', not {str(compressor)!r}: "
        "others are decoded on every rank, so use allreduce"
    )


def _start(
    tensors: Sequence[torch.Tensor],
    name: str | None,
    op: ReduceOp,
    process_set: ProcessSet,
    factors: tuple[float, float],
    single: bool = False,
    wire: torch.dtype | None = None,
) -> Handle:
    runtime, number, op = current(), process_set.number(), ReduceOp(op)
    if op is ReduceOp.ADASUM:
        raise InvalidArgument("reducescatter takes op Average, Sum, Min, Max or Product")
    for tensor in tensors:
        check(tensor)
        refuse_mean(tensor, op)
        if tensor.dim() == 0:
            raise InvalidArgument("reducescatter needs a tensor with at least one dimension")
    base = name or runtime.unnamed("reducescatter" if single else "grouped_reducescatter", number)
    count, rank = len(tensors), process_set.rank()
    places = [place_of(tensor, op) for tensor in tensors]
    sources = [
        packed(t, place).to(wire if wire and t.is_floating_point() else t.dtype)
        for t, place in zip(tensors, places, strict=True)
    ]
    rooms = [Room(source, place) for source, place in zip(sources, places, strict=True)]
    requests = [
        Request(
            base if single else f"{base}_{i + 1}of{count}",
            "reducescatter",
            dtype_of(source),
            tuple(source.shape),
            op,
            prescale=factors[0],
            postscale=factors[1],
            process_set=number,
            group="" if single else base,
            group_size=0 if single else count,
            place=places[i],
        )
        for i, source in enumerate(sources)
    ]
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

    return Handle(runtime.engine.submit_all(items), result)
