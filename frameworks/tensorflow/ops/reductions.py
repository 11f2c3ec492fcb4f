"""Allreduce on TensorFlow's tensors, under Horovod's names and arguments, eager and in graphs.

Operations without a name get one from a counter, so ranks must run those in the same order.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import tensorflow as tf

from ringlet.compressors.specs.edition import edition
from ringlet.compressors.specs.routes import Spec
from ringlet.fusion import Handle, Request
from ringlet.fusion.devices.host import Place
from ringlet.fusion.requests.handle import wait_all
from ringlet.job.process_sets import ProcessSet, global_process_set
from ringlet.job.session import current
from ringlet.ring.communicator import ReduceOp
from ringlet.ring.dtypes import Array
from ringlet.ring.errors import RingError
from ringlet.shared.arrays import allocate, flat
from ringlet.shared.reduction_arguments import Reduction
from ringlet.shared.requests import (
    group_requests,
    refuse_one,
)
from ringlet.tensorflow.ops.autodiff import STOP, differentiable
from ringlet.tensorflow.ops.bridge import as_written, begin, operation_name
from ringlet.tensorflow.ops.indexed_slices import allreduce_slices, refuse_other_ops
from ringlet.tensorflow.ops.overlap import Finish
from ringlet.tensorflow.ops.placement import direct
from ringlet.tensorflow.ops.tensors import LEAVES, dense, dtype_of


@as_written
def allreduce(
    tensor: Any,
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Spec = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    name: str | None = None,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
) -> Any:
    """Return ``tensor`` combined over all ranks: averaged, or by ``op``. Differentiable.

    ``op`` is Average, Sum, Min, Max, Product or Adasum. Values are multiplied by
    ``prescale_factor`` before and by ``postscale_factor`` after they are combined.
    ``compression`` is a spec; one that remembers (``ef``) needs a ``name``. ``tf.IndexedSlices``
    are summed or averaged as rows: indices ascend, each is there once. Devices and
    ``ignore_name_scope`` are accepted for Horovod's sake. Raises Mismatch, which is a
    ``tf.errors.FailedPreconditionError`` too, the same on every rank, when ranks pass different
    shapes, dtypes or arguments: in a tf.function where that is called.
    """
    asked = Reduction.among(locals())
    if isinstance(tensor, tf.IndexedSlices):
        return allreduce_slices(tensor, asked)
    return _allreduce([tensor], asked)[0]


@as_written
def grouped_allreduce(
    tensors: Sequence[Any],
    average: bool | None = None,
    device_dense: str = "",
    device_sparse: str = "",
    compression: Spec = None,
    op: ReduceOp | None = None,
    prescale_factor: float = 1.0,
    postscale_factor: float = 1.0,
    process_set: ProcessSet = global_process_set,
    ignore_name_scope: bool = False,
    name: str | None = None,
) -> list[Any]:
    """Return ``tensors`` combined over all ranks: all of them together, or none. Differentiable.

    One graph node, whatever their number; ``tf.IndexedSlices`` among them go one by one. See
    ``allreduce``.
    """
    asked = Reduction.among(locals())
    refuse_one(tensors, "allreduce", LEAVES)
    given = list(tensors)
    places = [i for i, tensor in enumerate(given) if not isinstance(tensor, tf.IndexedSlices)]
    results: list[Any] = list(given)
    if len(places) < len(given):
        refuse_other_ops(asked.op)
    if places:
        reduced = _allreduce([given[i] for i in places], asked)
        for place, tensor in zip(places, reduced, strict=True):
            results[place] = tensor
    for i, tensor in enumerate(given):
        if isinstance(tensor, tf.IndexedSlices):
            label = None if name is None else f"{name}.{i}"
            results[i] = allreduce_slices(tensor, replace(asked, name=label))
    return results


def _allreduce(tensors: Sequence[Any], asked: Reduction) -> list[Any]:
    return asked.run([dense(tensor) for tensor in tensors], _reduced)


def _reduced(tensors: Sequence[Any], asked: Reduction) -> list[Any]:
    asked.check_name()

    def forward(inputs: list[Any]) -> tuple[list[Any], Any]:
        return _run(inputs, asked), None

    def backward(grads: list[Any], _: Any) -> list[Any]:
        return _reduced(grads, asked.backward(STOP))

    return differentiable(tensors, forward, backward)


def _run(tensors: Sequence[Any], asked: Reduction) -> list[Any]:
    dtypes = [dtype_of(tensor) for tensor in tensors]
    wires, used = asked.wires(dtypes), asked.summed()
    asked.check("allreduce", wires)
    number, in_graph = asked.process_set.number(), not tf.executing_eagerly()
    named = operation_name(asked.kind("allreduce"), asked.name, tensors[0], number)
    alike = {"spec": str(used), "edition": edition(used), **asked.alike()}
    made: dict[Hashable, list[Request]] = {}  # what was asked for last, for it to be known again

    def submit(
        shapes: list[tuple[int, ...]], sources: list[Array], targets: list[Array], place: str
    ) -> Finish:
        base, engine = named(), current().engine
        key = base, place, *shapes
        requests = made.get(key)
        if requests is None:
            made.clear()
            requests = made[key] = group_requests(
                "allreduce", base, asked.single, wires, shapes, [place] * len(wires), **alike
            )
        under_way = _under_way()
        before = under_way.pop(requests[0].key, ())
        for handle in before:  # of a graph, where a name may be there twice
            with suppress(RingError):
                handle.wait()
        each = zip(requests, sources, targets, strict=True)
        handles = engine.submit_all([(*item, used) for item in each], not in_graph)
        if in_graph and asked.name is not None:
            under_way[requests[0].key] = handles

        def finish() -> Sequence[Array]:
            try:
                wait_all(handles)
            finally:
                if under_way.get(requests[0].key) is handles:
                    del under_way[requests[0].key]
            return targets

        return finish

    def combine(arrays: list[Array]) -> Finish:
        shapes = [array.shape for array in arrays]
        results = allocate(wires, shapes)
        both = zip(arrays, results, strict=True)
        sources = [flat(array.astype(result.dtype, copy=False)) for array, result in both]
        finish = submit(shapes, sources, [flat(result) for result in results], Place.name)

        def reduced() -> list[Array]:
            finish()
            return [
                result.astype(array.dtype, copy=False)
                for array, result in zip(arrays, results, strict=True)
            ]

        return reduced

    way = direct(tensors, asked.op) if wires == dtypes else None
    if way is not None:

        def at_place(sources: list[Array], targets: list[Array], place: str) -> None:
            submit([tuple(tensor.shape) for tensor in tensors], sources, targets, place)()

        return way.run(at_place)
    outputs = [(dtype, t.shape) for dtype, t in zip(dtypes, tensors, strict=True)]
    return begin(combine, tensors, outputs)


def _under_way() -> dict[Hashable, Sequence[Handle]]:
    """Return what nodes of graphs have begun and none has waited for, by the first one's key."""
    found: dict[Hashable, Sequence[Handle]] = current().extras.setdefault("tensorflow begun", {})
    return found
