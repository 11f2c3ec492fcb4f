"""All gradients of a step through one graph node, to the reducer and back."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from ringlet.job.process_sets import ProcessSet
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

log = logging.getLogger("ringlet")

BROADCAST_VARIABLES = (
    "call hvd.broadcast_variables(variables, root_rank=0) on all ranks before training, or after "
    "the first step, with the optimizer's variables among them"
)

_TAPED = "_ringlet_taped"  # what a tape has reduced tells among which ranks
_warned: weakref.WeakSet[GradientReducer] = weakref.WeakSet()


def mark_reduced(gradients: Sequence[Any], process_set: ProcessSet) -> None:
    """Note that a tape has reduced ``gradients`` among the ranks of ``process_set``."""
    for gradient in gradients:
        if gradient is not None:
            setattr(gradient, _TAPED, process_set)


def _warn_of_reduced(
    reducer: GradientReducer, names: Sequence[str], gradients: Sequence[Any]
) -> None:
    """Warn, once, of gradients that a tape has reduced among the same ranks already."""
    own, pairs = reducer.process_set, zip(names, gradients, strict=True)
    twice = [name for name, gradient in pairs if getattr(gradient, _TAPED, None) is own]
    if twice and reducer not in _warned:
        _warned.add(reducer)
        if own.included() and own.rank() == 0:
            log.warning(
                "%s reduces the gradient of %r, and of %d more, which a DistributedGradientTape "
                "has reduced already: sums would count each rank's as often as there are ranks. "
                "Leave the tape, or the optimizer, as it is without Ringlet",
                reducer.title,
                twice[0],
                len(twice) - 1,
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
    _warn_of_reduced(reducer, names, gradients)
    if in_plain_graph():  # a session runs the nodes of several optimizers at once, in any order
        reducer.enlist()
    if accumulator is not None and accumulator.passes == 1:
        accumulator = None
    sources = zip(variables, names, gradients, cohorts, strict=True)
    given = [None if source[2] is None else _given(*source) for source in sources]
    present = [one for one in given if one is not None]
    rows = {one.slot.name for one in present if one.slot.sparse}
    rows -= {one.slot.name for one in present if reducer.settings.dense(one.slot)}
    outputs: list[Output] = [("bool", ())]
    for one in present:
        outputs += one.outputs(one.slot.name in rows)
    unused = [name for name, gradient in zip(names, gradients, strict=True) if gradient is None]
    shown = (
        None if in_plain_graph() else partial(_shown, reducer, _held(variables, names, gradients))
    )

    def exchange(arrays: list[Array]) -> list[Array]:
        shaped = _shaped(present, arrays)
        every, summed = shaped, arrays
        if accumulator is not None:
            added = accumulator.add(shaped, arrays)
            if added is None:
                return [np.array(False), *_placeholders(outputs[1:])]
            every, summed = added
        used = {slot.name for slot in every}
        without = [name for name in unused if name not in used]
        common = None if accumulator is None else accumulator.agreed()
        results = reducer.reduce(every, summed, without, shown=shown, common=common)
        if accumulator is not None:
            accumulator.refuse_unused(shaped, every)
        kinds = [numpy_dtype(dtype) for dtype, _ in outputs[1:]]
        pairs = zip(results, kinds, strict=True)
        return [np.array(True), *[array.astype(kind, copy=False) for array, kind in pairs]]

    ends, *received = run(exchange, [part for one in present for part in one.parts], outputs)
    arriving = iter(received)
    results: list[Any] = []
    for each in given:
        if each is None:
            results.append(None)
        elif each.slot.name in rows:
            values, indices = next(arriving), next(arriving)
            shape = tf.constant(each.slot.shape, tf.int64)
            results.append(tf.IndexedSlices(values, indices, shape))
        else:
            results.append(next(arriving))
    return tf.constant(True) if accumulator is None else ends, results


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


class _Given(NamedTuple):
    """A gradient as it goes into the node."""

    slot: Slot
    parts: list[Any]  # values, and of IndexedSlices their indices
    in_part: tf.TensorShape | None  # what is known of its shape, if the rest comes with the array

    def outputs(self, rows: bool) -> list[Output]:
        """Return what comes out for it: a table, or values of ``rows`` and their indices."""
        if rows:
            return [(self.slot.dtype, (None, *self.slot.shape[1:])), ("int64", (None,))]
        return [(self.slot.dtype, self.slot.shape if self.in_part is None else self.in_part)]


def _given(variable: Any, name: str, gradient: Any, cohort: str) -> _Given:
    what = f"the gradient of {name!r}"
    sparse = isinstance(gradient, tf.IndexedSlices)
    values = dense(gradient.values if sparse else gradient, what)
    known, in_part = tf.TensorShape(variable.shape), None
    if not known.is_fully_defined():
        known = tf.TensorShape(None) if sparse else values.shape
    if not known.is_fully_defined():
        if sparse:
            raise ValueError(f"{what}: the shape of its table, {variable.shape}, must be known")
        known, in_part = tf.TensorShape([]), known
    shape = tuple(known.as_list())
    slot = Slot(name, dtype_of(values, what), shape, sparse, cohort)
    if not sparse:
        return _Given(slot, [values], in_part)
    # Values may have been computed in another shape than the table's rows.
    rows = tf.reshape(values, (-1, *shape[1:]))
    return _Given(slot, [rows, tf.convert_to_tensor(gradient.indices)], in_part)


def _shaped(given: Sequence[_Given], arrays: Sequence[Array]) -> Sequence[Slot]:
    """Return the slots, with the shapes of this step's ``arrays`` where those come with them."""
    each, slots = iter(arrays), []
    for one in given:
        first, *_ = [next(each) for _ in range(one.slot.inputs)]
        known = one.in_part is None
        slots.append(one.slot if known else replace(one.slot, shape=first.shape))
    return slots


def _placeholders(outputs: Sequence[Output]) -> list[Array]:
    return [np.zeros([n or 0 for n in shape], numpy_dtype(dtype)) for dtype, shape in outputs]
