"""Allreduce on torch tensors, under Horovod's names and arguments.

Operations without a name get one from a counter, so ranks must call those in the same order.
Asynchronous forms return a handle for ``synchronize``.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from operator import is_
from typing import Any, NamedTuple

import torch

from ringlet.compressors import Compressor, NoCompression
from ringlet.compressors.specs.edition import edition
from ringlet.compressors.specs.routes import Spec
from ringlet.fusion import Handle, Request
from ringlet.fusion.requests.series import Series, prototype_of
from ringlet.job.process_sets import InvalidArgument, ProcessSet, global_process_set
from ringlet.job.session import Runtime, current
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.shared.compression import around, as_compressor, legacy
from ringlet.shared.requests import (
    SUMS,
    check_nameable,
    check_some,
    group_requests,
    reduce_op,
    reduced_as,
    refuse_one,
)
from ringlet.torch.ops.entry_points import public
from ringlet.torch.ops.handles import (
    Tensors,
    TorchHandle,
    WrittenHandle,
    WrittenTensor,
    differentiable,
)
from ringlet.torch.tensors.placement import flat_at, packed, place_of
from ringlet.torch.tensors.shared_storage import any_overlap
from ringlet.torch.tensors.views import (
    DTYPES,
    as_array,
    check,
    dtype_of,
    flat,
    taken_as_it_is,
    unstage,
    without_graph,
)

_PLAIN = as_compressor(None)


@public
def allreduce_async_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Spec = None,
) -> TorchHandle:
    """Combine ``tensor`` over all ranks, in place. See ``allreduce``."""
    factors, chosen = (prescale_factor, postscale_factor), reduce_op(average, op)
    return _start_one(tensor, tensor, name, chosen, factors, process_set, compression)


@public
def allreduce_async(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Spec = None,
) -> TorchHandle:
    """Combine ``tensor`` over all ranks into a new tensor. See ``allreduce``."""
    factors, chosen = (prescale_factor, postscale_factor), reduce_op(average, op)
    return _start_one(tensor, None, name, chosen, factors, process_set, compression)


@public
def allreduce(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    compression: Spec = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> torch.Tensor:
    """Return ``tensor`` combined over all ranks: averaged, or by ``op``. Differentiable.

    ``op`` is Average, Sum, Min, Max, Product or Adasum. Values are multiplied by
    ``prescale_factor`` before and by ``postscale_factor`` after they are combined.
    ``compression`` is a spec; one that remembers (``ef``) needs a ``name``. Raises Mismatch, the
    same on every rank, when ranks pass different shapes, dtypes or arguments.
    """
    chosen, factors = reduce_op(average, op), (prescale_factor, postscale_factor)
    cast = legacy(compression)
    if cast is not None:

        def combine(small: Tensors) -> Tensors:
            return [allreduce(small[0], None, name, None, chosen, *factors, process_set)]

        wide: list[torch.Tensor] = around(cast, [tensor], combine)
        return wide[0]

    def start(tensors: Tensors) -> TorchHandle:
        return _start_one(tensors[0], None, name, chosen, factors, process_set, compression, True)

    def backward(grads: Tensors, handle: TorchHandle) -> Tensors:
        _refuse_gradient(chosen)
        made, again = f"{handle.name}.grad", grads[0].contiguous()
        return [allreduce(again, None, made, None, chosen, *factors, process_set)]

    result: torch.Tensor = differentiable([tensor], start, backward)
    return result


@public
def allreduce_(
    tensor: torch.Tensor,
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Spec = None,
) -> torch.Tensor:
    """Combine ``tensor`` over all ranks in place, and return it. See ``allreduce``."""
    factors, chosen = (prescale_factor, postscale_factor), reduce_op(average, op)
    handle = _start_one(tensor, tensor, name, chosen, factors, process_set, compression, True)
    result: torch.Tensor = handle.wait()
    return result


@public
def grouped_allreduce_async_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Spec = None,
) -> TorchHandle:
    """Combine tensors over all ranks together, in place. See ``grouped_allreduce``."""
    factors = prescale_factor, postscale_factor
    call = _Call(name, reduce_op(average, op), factors, process_set, compression)
    return _start(tensors, tensors, call)


@public
def grouped_allreduce_async(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Spec = None,
) -> TorchHandle:
    """Combine tensors over all ranks together, into new ones. See ``grouped_allreduce``."""
    factors = prescale_factor, postscale_factor
    call = _Call(name, reduce_op(average, op), factors, process_set, compression)
    return _start(tensors, None, call)


@public
def grouped_allreduce(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    compression: Spec = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
) -> list[torch.Tensor]:
    """Return ``tensors`` combined over all ranks: all of them together, or none. Differentiable.

    See ``allreduce``.
    """
    refuse_one(tensors, "allreduce")
    chosen, factors = reduce_op(average, op), (prescale_factor, postscale_factor)
    cast = legacy(compression)
    if cast is not None:

        def combine(small: Tensors) -> Tensors:
            return grouped_allreduce(small, None, name, None, chosen, *factors, process_set)

        return around(cast, tensors, combine)

    def start(given: Tensors) -> TorchHandle:
        call = _Call(name, chosen, factors, process_set, compression, waits=True)
        return _start(given, None, call)

    def backward(grads: Tensors, handle: TorchHandle) -> Tensors:
        _refuse_gradient(chosen)
        made, again = f"{handle.name}.grad", [g.contiguous() for g in grads]
        return grouped_allreduce(again, None, made, None, chosen, *factors, process_set)

    result: list[torch.Tensor] = differentiable(list(tensors), start, backward)
    return result


@public
def grouped_allreduce_(
    tensors: Sequence[torch.Tensor],
    average: bool | None = None,
    name: str | None = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    compression: Spec = None,
) -> list[torch.Tensor]:
    """Combine tensors over all ranks together in place, and return them."""
    factors = prescale_factor, postscale_factor
    call = _Call(name, reduce_op(average, op), factors, process_set, compression, waits=True)
    result: list[torch.Tensor] = _start(tensors, tensors, call).wait()
    return result


def refuse_mean(tensor: torch.Tensor, op: ReduceOp) -> None:
    """Raise InvalidArgument for an average of booleans, which would be no boolean."""
    if op is ReduceOp.AVERAGE and tensor.dtype is torch.bool:
        raise InvalidArgument(
            "booleans have no average: pass op=Sum for any, op=Min for all, or tensor.float()"
        )


class _Call(NamedTuple):
    """The arguments of a call. It is for a ``single`` tensor or a group, and ``waits`` at once."""

    name: str | None
    op: ReduceOp
    factors: tuple[float, float]
    process_set: ProcessSet
    compression: Any
    single: bool = False
    waits: bool = False

    def requests(
        self, base: str, compressor: Compressor, sources: Tensors, places: Sequence[str]
    ) -> list[Request]:
        """Return requests, named after ``base``, for what is handed in."""
        return group_requests(
            "allreduce",
            base,
            self.single,
            [dtype_of(source) for source in sources],
            [source.shape for source in sources],
            places,
            op=self.op,
            spec=str(compressor),
            edition=edition(compressor),
            prescale=self.factors[0],
            postscale=self.factors[1],
            process_set=self.process_set.number(),
        )


class _Asked:
    """What a call asked for. The next one under its name that asks for the same submits it again.

    Of tensors in host memory that the engine takes as they are; ``single`` if it was no group. For
    a single call without a name the request is the prototype of its ``series``.
    """

    __slots__ = ("compressor", "factors", "kinds", "op", "requests", "series", "single", "used")

    def __init__(
        self,
        compressor: Compressor,
        op: ReduceOp,
        factors: tuple[float, float],
        single: bool,
        kinds: list[tuple[torch.dtype, torch.Size]],
        requests: list[Request],
        used: Compressor,
        series: Series | None = None,
    ) -> None:
        self.compressor, self.op, self.factors, self.single = compressor, op, factors, single
        self.kinds, self.requests, self.used, self.series = kinds, requests, used, series

    def has(self, array: Array) -> bool:
        """Whether it asked for the first tensor's dtype and shape; ``array`` is one as it is."""
        request = self.requests[0]
        return array.shape == request.shape and array.dtype == request.fit[1]

    def is_for(
        self,
        compressor: Compressor,
        op: ReduceOp,
        factors: tuple[float, float],
        single: bool,
        kinds: list[tuple[torch.dtype, torch.Size]],
    ) -> bool:
        """Whether a call of these asks for the same."""
        alike = self.compressor == compressor and self.op is op and self.factors == factors
        return alike and self.single is single and self.kinds == kinds


_MOST_ASKED = 1 << 13  # names whose calls are kept


def _start_one(
    tensor: torch.Tensor,
    output: torch.Tensor | None,
    name: str | None,
    op: ReduceOp,
    factors: tuple[float, float],
    process_set: ProcessSet,
    compression: Any,
    waits: bool = False,
) -> TorchHandle:
    """Submit the reduction of one tensor into ``output``, or a new tensor. See ``_start``."""
    runtime = current()
    number = 0 if process_set is global_process_set else process_set.number()
    known, values = _asked_of(runtime), as_array(tensor)
    asked = None if values is None else known.get((number, name))
    if values is not None and asked is not None and not asked.has(values) and name is None:
        asked = known.get((number, (values.dtype, values.shape)))
    if (
        values is None
        or asked is None
        or not asked.has(values)
        or asked.compressor is not (_PLAIN if compression is None else as_compressor(compression))
        or not (asked.single and asked.op is op and asked.factors == factors)
        or (name is None and asked.series is not runtime.series("allreduce", number))
    ):
        outputs = None if output is None else [output]
        call = _Call(name, op, factors, process_set, compression, True, waits)
        return _start([tensor], outputs, call)
    request = asked.requests[0]
    if asked.series is not None:
        request = request.numbered(asked.series.next())
    if values.ndim != 1:
        values = values.reshape(-1)
    if output is None:
        output = torch.empty_like(tensor)
    target = values if output is tensor else flat(output)
    operation = runtime.engine.submit(request, values, target, asked.used, waits)
    return WrittenTensor(operation, output)


def _start(tensors: Tensors, outputs: Tensors | None, call: _Call) -> TorchHandle:
    """Submit a reduction of every tensor into ``outputs``, which are the tensors, or new ones.

    The handle returns all outputs, or the single one. Tensors that overlap are all reduced from
    what they hold now.
    """
    refuse_one(tensors, "allreduce")
    tensors = list(tensors)
    check_some(tensors, "allreduce")
    for tensor in tensors:
        check(tensor)
        refuse_mean(tensor, call.op)
    tangled = outputs is not None and len(tensors) > 1 and any_overlap(tensors)
    if outputs is None:
        layout = torch.contiguous_format
        outputs = [torch.empty_like(tensor, memory_format=layout) for tensor in tensors]
    runtime, number = current(), call.process_set.number()
    compressor = as_compressor(call.compression)
    what = compressor, call.op, call.factors, call.single, [(t.dtype, t.shape) for t in tensors]
    direct = not tangled and all(map(taken_as_it_is, tensors))
    asked = None if call.name is None else _asked_of(runtime).get((number, call.name))
    if asked is not None and asked.is_for(*what) and direct and all(map(taken_as_it_is, outputs)):
        operations = _submit_again(runtime, asked, tensors, outputs, call.waits)
        return WrittenHandle(operations, outputs, call.single)
    base = call.name or _unnamed(runtime, number, compressor, call.single)
    places = [place_of(tensor, call.op) for tensor in tensors]
    sources = [_source(t, call.op, compressor, p) for t, p in zip(tensors, places, strict=True)]
    if tangled:
        sources = [source.clone() for source in sources]
    used = compressor if call.op in SUMS else NoCompression()
    requests = call.requests(base, used, sources, places)
    recognised = call.single or call.name is not None
    if direct and recognised and all(map(is_, sources, tensors)):
        _remember(runtime, number, call.name, _Asked(*what, requests, used))
    return _submit(runtime, requests, sources, outputs, used, call, tangled)


def _submit_again(
    runtime: Runtime, asked: _Asked, tensors: Tensors, outputs: Tensors, waits: bool
) -> list[Handle]:
    """Submit ``tensors`` as was ``asked`` before; the engine takes them, and ``outputs``, as is."""
    arrays = [flat(tensor) for tensor in tensors]
    targets = [
        array if output is tensor else flat(output)
        for array, tensor, output in zip(arrays, tensors, outputs, strict=True)
    ]
    used = [asked.used] * len(tensors)
    items = zip(asked.requests, arrays, targets, used, strict=True)
    return runtime.engine.submit_all(list(items), waits)


def _remember(runtime: Runtime, number: int, name: str | None, asked: _Asked) -> None:
    """Keep what a call ``asked`` for, by process set and name, or in its series without a name."""
    known = _asked_of(runtime)
    if len(known) >= _MOST_ASKED:
        known.clear()
    if name is not None:
        known[number, name] = asked
        return
    request = asked.requests[0]
    asked.requests, asked.series = [prototype_of(request)], runtime.series("allreduce", number)
    known[number, None] = known[number, (request.storage, request.shape)] = asked


def _submit(
    runtime: Runtime,
    requests: Sequence[Request],
    sources: Tensors,
    outputs: Tensors,
    compressor: Compressor,
    call: _Call,
    apart: bool,
) -> TorchHandle:
    """Submit ``sources``, and copy the results to ``outputs`` that the engine cannot write to.

    Nor must it where it is to stay ``apart`` from them.
    """
    targets = [
        without_graph(output) if not apart and _can_hold(output, source) else source
        for source, output in zip(sources, outputs, strict=True)
    ]
    items = [
        (request, flat_at(source, request.place), flat_at(target, request.place), compressor)
        for request, source, target in zip(requests, sources, targets, strict=True)
    ]
    operations = runtime.engine.submit_all(items, call.waits)

    def result(_: Any) -> Any:
        done = [unstage(t, o) for t, o in zip(targets, outputs, strict=True)]
        return done[0] if call.single else done

    return TorchHandle(operations, result)


def _asked_of(runtime: Runtime) -> dict[tuple[int, Hashable], _Asked]:
    """Return what calls of this runtime asked for, by process set and name.

    Of calls without names, the last one (None) and the last one of each dtype and shape.
    """
    known: dict[tuple[int, Hashable], _Asked] = runtime.extras.setdefault("allreduces", {})
    return known


def _unnamed(runtime: Runtime, number: int, compressor: Compressor, single: bool) -> str:
    check_nameable(compressor)
    return runtime.unnamed("allreduce" if single else "grouped_allreduce", number)


def _can_hold(output: torch.Tensor, source: torch.Tensor) -> bool:
    """Whether the engine can write the result of ``source`` to ``output`` itself."""
    alike = output.dtype is source.dtype and output.device == source.device
    return alike and output.is_contiguous()


def _source(tensor: torch.Tensor, op: ReduceOp, compressor: Compressor, place: str) -> torch.Tensor:
    """Return what is handed in: for minima and the like, a 16-bit cast happens here."""
    return packed(tensor, place).to(DTYPES[reduced_as(dtype_of(tensor), op, compressor)])


def _refuse_gradient(op: ReduceOp) -> None:
    if op not in SUMS:
        raise RuntimeError(f"allreduce with op={op.name.title()} has no gradient")
