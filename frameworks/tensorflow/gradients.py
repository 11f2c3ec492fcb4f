"""All gradients of a step through one graph node, to the reducer and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ringlet.keras.accumulation import Accumulator
from ringlet.keras.arrays import numpy_dtype
from ringlet.keras.gradients import Reducer, Slot
from ringlet.ring.dtypes import Array
from ringlet.tensorflow.bridge import Output, in_plain_graph, run
from ringlet.tensorflow.tensors import dense, dtype_of


def reduced(
    reducer: Reducer,
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
    tensors: list[Any] = []
    outputs: list[Output] = [("bool", ())]
    if in_plain_graph():  # a session runs the nodes of several optimizers at once, in any order
        reducer.enlist()
    accumulates = accumulator is not None and accumulator.passes > 1
    sources = zip(variables, names, gradients, cohorts, strict=True)
    for variable, name, gradient, cohort in sources:
        if gradient is None:
            continue
        slot, parts = _slot(variable, name, gradient, cohort)
        slots.append(slot)
        tensors += parts
        if slot.sparse and not reducer.settings.dense(slot):
            outputs += [(slot.dtype, (None, *slot.shape[1:])), ("int64", (None,))]
        else:
            outputs.append((slot.dtype, slot.shape))

    def exchange(arrays: list[Array]) -> list[Array]:
        given = accumulator.add(slots, arrays) if accumulator and accumulates else arrays
        if given is None:
            return [np.array(False), *_placeholders(outputs[1:])]
        results = reducer.reduce(slots, given)
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


def _slot(variable: Any, name: str, gradient: Any, cohort: str) -> tuple[Slot, list[Any]]:
    what = f"the gradient of {name!r}"
    sparse = isinstance(gradient, tf.IndexedSlices)
    values = dense(gradient.values if sparse else gradient, what)
    known = tf.TensorShape(variable.shape)
    if not known.is_fully_defined():
        known = tf.TensorShape(None) if sparse else values.shape
    if not known.is_fully_defined():
        raise ValueError(f"{what}: its variable has shape {variable.shape}, which must be known")
    shape = tuple(known.as_list())
    slot = Slot(name, dtype_of(values, what), shape, sparse, cohort)
    if not sparse:
        return slot, [values]
    # Values may have been computed in another shape than the table's rows.
    return slot, [tf.reshape(values, (-1, *shape[1:])), tf.convert_to_tensor(gradient.indices)]


def _placeholders(outputs: Sequence[Output]) -> list[Array]:
    return [np.zeros([n or 0 for n in shape], numpy_dtype(dtype)) for dtype, shape in outputs]
