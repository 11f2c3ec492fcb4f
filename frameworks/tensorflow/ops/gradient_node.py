"""All gradients of a step through one graph node, to the reducer and back."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from ringlet.ring.dtypes import Array
from ringlet.shared.arrays import numpy_dtype
from ringlet.shared.drift import RATE
from ringlet.shared.gradients.accumulation import Accumulator
from ringlet.shared.gradients.gradient_reducer import GradientReducer
from ringlet.shared.gradients.gradient_settings import Slot
from ringlet.shared.reduction_arguments import Reduction
from ringlet.tensorflow.ops.autodiff import STOP, differentiable
from ringlet.tensorflow.ops.bridge import Output, in_plain_graph, run
from ringlet.tensorflow.ops.reductions import grouped_allreduce
from ringlet.tensorflow.ops.tensors import dense, dtype_of

BROADCAST_VARIABLES = (
    "call hvd.broadcast_variables(variables, root_rank=0) on all ranks before training, or after "
    "the first step, with the optimizer's variables among them"
)


def reduced(
    reducer: GradientReducer,
    variables: Sequence[Any],
    names: Sequence[str],
    gradients: Sequence[Any],
    cohorts: Sequence[str],
    accumulator: Accumulator | None = None,
) -> tuple[Any, list[Any]]:
    """Return whether this pass is one that ends a step (bool), and the reduced gradients.

    ``gradients`` are tensors, IndexedSlices, or None for variables that were not used, which stays
    so. Between steps, while ``accumulator`` adds up, the gradients returned mean nothing.
    """
    slots: list[Slot] = []
    told_later: dict[str, Any] = {}  # shapes that are known when the graph runs; here in part
    tensors: list[Any] = []
    outputs: list[Output] = [("bool", ())]
    if in_plain_graph():  # a session runs the nodes of several optimizers at once, in any order
        reducer.enlist()
    accumulates = accumulator is not None and accumulator.passes > 1
    sources = zip(variables, names, gradients, cohorts, strict=True)
    for variable, name, gradient, cohort in sources:
        if gradient is None:
            continue
        slot, parts = _slot(variable, name, gradient, cohort, told_later)
        slots.append(slot)
        tensors += parts
        if slot.sparse and not reducer.settings.dense(slot):
            outputs += [(slot.dtype, (None, *slot.shape[1:])), ("int64", (None,))]
        elif slot.name in told_later:
            outputs.append((slot.dtype, told_later[slot.name]))
        else:
            outputs.append((slot.dtype, slot.shape))

    unused = [name for name, gradient in zip(names, gradients, strict=True) if gradient is None]
    shown = (
        None if in_plain_graph() else partial(_shown, reducer, _held(variables, names, gradients))
    )

    def exchange(arrays: list[Array]) -> list[Array]:
        shaped = _shaped(slots, arrays, told_later)
        every, given = shaped, arrays
        if accumulator is not None and accumulates:
            summed = accumulator.add(shaped, arrays)
            if summed is None:
                return [np.array(False), *_placeholders(outputs[1:])]
            every, given = summed
        used = {slot.name for slot in every}
        without = [name for name in unused if name not in used]
        results = reducer.reduce(every, given, without, shown=shown)
        if accumulator is not None:
            accumulator.refuse_unused(shaped, every)
        kinds = [numpy_dtype(dtype) for dtype, _ in outputs[1:]]
        pairs = zip(results, kinds, strict=True)
        return [np.array(True), *[array.astype(kind, copy=False) for array, kind in pairs]]

    ends, *received = run(exchange, tensors, outputs)
    arriving = iter(received)
    results: list[Any] = []
    by_name = {slot.name: slot for slot in slots}
    for name, gradient in zip(names, gradients, strict=True):
        if gradient is None:
            results.append(None)
        elif by_name[name].sparse and not reducer.settings.dense(by_name[name]):
            values, indices = next(arriving), next(arriving)
            shape = tf.constant(by_name[name].shape, tf.int64)
            results.append(tf.IndexedSlices(values, indices, shape))
        else:
            results.append(next(arriving))
    return ends if accumulates else tf.constant(True), results


def reduced_differentiably(
    reducer: GradientReducer,
    variables: Sequence[Any],
    names: Sequence[str],
    gradients: Sequence[Any],
    cohorts: Sequence[str],
) -> list[Any]:
    """Return the reduced gradients, which an outer tape can differentiate in its turn.

    What compression leaves out counts as if it had travelled, as with ``allreduce``.
    """
    settings, present = reducer.settings, [i for i, g in enumerate(gradients) if g is not None]
    sparse = {i for i in present if isinstance(gradients[i], tf.IndexedSlices)}
    shapes: dict[int, Any] = {}  # of tables whose gradients stay rows

    def split(each: Sequence[Any]) -> list[Any]:
        parts: list[Any] = []
        for i in present:
            rows = isinstance(each[i], tf.IndexedSlices)
            parts += [each[i].values, each[i].indices] if rows else [each[i]]
        return [tf.convert_to_tensor(part) for part in parts]

    def joined(parts: Sequence[Any], kept: Collection[int], shape_of: Callable[[int], Any]) -> Any:
        arriving, each = iter(parts), list(gradients)
        for i in present:
            first = next(arriving)
            each[i] = tf.IndexedSlices(first, next(arriving), shape_of(i)) if i in kept else first
        return each

    def forward(given: list[Any]) -> tuple[list[Any], Any]:
        again = joined(given, sparse, lambda i: gradients[i].dense_shape)
        _, results = reduced(reducer, variables, names, again, cohorts)
        rows = [i for i in present if isinstance(results[i], tf.IndexedSlices)]
        shapes.update({i: results[i].dense_shape for i in rows})
        return split(results), again

    def backward(upstream: list[Any], again: Any) -> list[Any]:
        if shapes:
            raise LookupError(
                f"the gradient of {names[min(shapes)]!r} travels as rows, which an outer tape "
                "cannot differentiate; pass sparse_as_dense=True to DistributedGradientTape"
            )
        if settings.process_set.included():
            Reduction(settings.op, (1.0, 1.0), None, settings.process_set).backward(STOP)
            upstream = grouped_allreduce(upstream, op=settings.op, process_set=settings.process_set)
        results: list[Any] = []
        for i, grad in zip(present, upstream, strict=True):
            if i in sparse:
                values, indices = again[i].values, again[i].indices
                taken = tf.gather(grad, tf.reshape(indices, [-1]))
                results += [tf.reshape(taken, tf.shape(values)), None]
            else:
                results.append(grad)
        return results

    if not present:
        return reduced(reducer, variables, names, gradients, cohorts)[1]
    parts = differentiable(split(gradients), forward, backward)
    return joined(parts, shapes, shapes.__getitem__)  # type: ignore[no-any-return]


def _held(
    variables: Sequence[Any], names: Sequence[str], gradients: Sequence[Any]
) -> list[tuple[str, weakref.ref[Any]]]:
    """Return the variables that have a gradient, which this does not keep alive."""
    held = [getattr(variable, "_value", variable) for variable in variables]
    each = zip(names, held, gradients, strict=True)
    return [(n, weakref.ref(v)) for n, v, g in each if g is not None and hasattr(v, "assign")]


def _shown(
    reducer: GradientReducer, held: Sequence[tuple[str, weakref.ref[Any]]]
) -> list[tuple[str, Array]]:
    """Return the values of variables, and the learning rate, when the node runs."""
    values = [(name, reference()) for name, reference in held]
    found = [(name, np.asarray(v.numpy())) for name, v in values if v is not None]
    return found if reducer.rate is None else [*found, (RATE, np.array(reducer.rate(), np.float64))]


def _slot(
    variable: Any, name: str, gradient: Any, cohort: str, told_later: dict[str, Any]
) -> tuple[Slot, list[Any]]:
    what = f"the gradient of {name!r}"
    sparse = isinstance(gradient, tf.IndexedSlices)
    values = dense(gradient.values if sparse else gradient, what)
    known = tf.TensorShape(variable.shape)
    if not known.is_fully_defined():
        known = tf.TensorShape(None) if sparse else values.shape
    if not known.is_fully_defined():
        if sparse:
            raise ValueError(f"{what}: the shape of its table, {variable.shape}, must be known")
        told_later[name] = known
        known = tf.TensorShape([])
    shape = tuple(known.as_list())
    slot = Slot(name, dtype_of(values, what), shape, sparse, cohort)
    if not sparse:
        return slot, [values]
    # Values may have been computed in another shape than the table's rows.
    return slot, [tf.reshape(values, (-1, *shape[1:])), tf.convert_to_tensor(gradient.indices)]


def _shaped(
    slots: list[Slot], arrays: Sequence[Array], told_later: Collection[str]
) -> Sequence[Slot]:
    """Return ``slots`` with the shapes that those called ``told_later`` have in this step."""
    if not told_later:
        return slots
    given, shaped = iter(arrays), []
    for slot in slots:
        first, *_ = [next(given) for _ in range(slot.inputs)]
        shaped.append(replace(slot, shape=first.shape) if slot.name in told_later else slot)
    return shaped


def _placeholders(outputs: Sequence[Output]) -> list[Array]:
    return [np.zeros([n or 0 for n in shape], numpy_dtype(dtype)) for dtype, shape in outputs]
