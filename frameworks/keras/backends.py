"""Gradients of whichever framework Keras runs on, to the reducer and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import numpy as np

from ringlet.shared.accumulation import Accumulator
from ringlet.shared.arrays import numpy_dtype
from ringlet.shared.gradients import Reducer, Slot

Called = TypeVar("Called", bound=Callable[..., Any])
SUPPORTED = ("tensorflow", "torch")


def backend() -> str:
    """Return the name of Keras's backend; RuntimeError for one without an adapter."""
    name: str = keras.config.backend()
    if name not in SUPPORTED:
        raise RuntimeError(
            f"ringlet.keras runs on Keras's backends {' and '.join(SUPPORTED)}, not {name!r}; set "
            "KERAS_BACKEND before keras is imported"
        )
    return name


def as_written(function: Called) -> Called:
    """Decorate an entry point, so that TensorFlow's AutoGraph does not rewrite it."""
    if keras.config.backend() != "tensorflow":
        return function
    import tensorflow as tf

    result: Called = tf.autograph.experimental.do_not_convert(function)
    return result


def reduce_gradients(
    reducer: Reducer,
    accumulator: Accumulator,
    variables: Sequence[Any],
    names: Sequence[str],
    gradients: Sequence[Any],
    cohorts: Sequence[str],
) -> tuple[Any, list[Any]]:
    """Return whether a step ends with this pass, and the gradients reduced over all ranks."""
    if backend() == "tensorflow":
        from ringlet.tensorflow.ops.gradient_node import reduced

        return reduced(reducer, variables, names, gradients, cohorts, accumulator)
    return _reduce_torch(reducer, accumulator, names, gradients, cohorts)


def _reduce_torch(
    reducer: Reducer,
    accumulator: Accumulator,
    names: Sequence[str],
    gradients: Sequence[Any],
    cohorts: Sequence[str],
) -> tuple[bool, list[Any]]:
    from ringlet.torch.tensors.views import as_tensor, check, dtype_of, flat

    slots, arrays = [], []
    for name, gradient, cohort in zip(names, gradients, cohorts, strict=True):
        if gradient is None:
            continue
        check(gradient, f"the gradient of {name!r}")
        dtype, shape = dtype_of(gradient), tuple(gradient.shape)
        slots.append(Slot(name, dtype, shape, False, cohort))
        array = flat(gradient.detach().contiguous())
        arrays.append(array.view(numpy_dtype(dtype)).reshape(shape))
    given = accumulator.add(slots, arrays)
    if given is None:
        return False, list(gradients)
    unused = [name for name, gradient in zip(names, gradients, strict=True) if gradient is None]
    results = iter(reducer.reduce(slots, given, unused))
    done: list[Any] = []
    for gradient in gradients:
        if gradient is None:
            done.append(None)
            continue
        array = next(results)
        dtype, shape = dtype_of(gradient), tuple(gradient.shape)
        plain = array.view(np.uint16) if dtype == "bfloat16" else array
        done.append(as_tensor(plain.reshape(-1), dtype, shape))
    return True, done
