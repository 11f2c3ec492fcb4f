"""Gradients of whichever framework Keras runs on, to the reducer and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import keras
import numpy as np

from ringlet.job.process_sets import ProcessSet
from ringlet.ring.dtypes import Array
from ringlet.ring.rendezvous.epochs import is_elastic
from ringlet.shared.arrays import numpy_dtype
from ringlet.shared.drift import RATE
from ringlet.shared.gradients.accumulation import Accumulator
from ringlet.shared.gradients.gradient_reducer import GradientReducer
from ringlet.shared.gradients.gradient_settings import Slot

Called = TypeVar("Called", bound=Callable[..., Any])
SUPPORTED = ("tensorflow", "torch", "jax")
LOSS_SCALE_OUTSIDE = (
    "a LossScaleOptimizer around a DistributedOptimizer would skip steps on one rank and not on "
    "others. Wrap it the other way round: DistributedOptimizer(LossScaleOptimizer(optimizer)). "
    "Under the policy mixed_float16, model.compile puts one around every optimizer that is none"
)


def backend() -> str:
    """Return the name of Keras's backend; RuntimeError for one without an adapter."""
    name: str = keras.config.backend()
    if name not in SUPPORTED:
        raise RuntimeError(
            f"ringlet.keras runs on Keras's backends {', '.join(SUPPORTED)}, not {name!r}; set "
            "KERAS_BACKEND before keras is imported"
        )
    return name


def as_written(function: Called) -> Called:
    """Decorate an entry point: AutoGraph and torch.compile run it as Python, step by step."""
    if keras.config.backend() == "torch":
        import torch

        disable: Callable[[Called], Called] = torch.compiler.disable
        return disable(function)
    if keras.config.backend() != "tensorflow":
        return function
    import tensorflow as tf

    result: Called = tf.autograph.experimental.do_not_convert(function)
    return result


def reduce_gradients(
    reducer: GradientReducer,
    variables: Sequence[Any],
    names: Sequence[str],
    gradients: Sequence[Any],
    cohorts: Sequence[str],
    accumulator: Accumulator,
) -> tuple[Any, list[Any]]:
    """Return whether a step ends with this pass, and the gradients reduced over all ranks."""
    if backend() == "tensorflow":
        from ringlet.tensorflow.ops.gradient_node import reduced

        return reduced(reducer, variables, names, gradients, cohorts, accumulator)
    if backend() == "jax":
        return True, _reduce_jax(reducer, variables, names, gradients, cohorts)
    return _reduce_torch(reducer, accumulator, variables, names, gradients, cohorts)


def size_of(process_set: ProcessSet) -> Any:
    """Return how many ranks ``process_set`` has, or 1 outside it; in a program, when that runs."""
    if backend() == "tensorflow":
        from ringlet.tensorflow.ops import topology_ops

        return topology_ops.size_of(process_set)

    def ask() -> int:
        return process_set.size() if process_set.included() else 1

    if backend() != "jax" or not is_elastic():
        return ask()
    from ringlet.jax.ops.ordered_calls import call

    def tell(_: Sequence[Array], results: Sequence[Array]) -> None:
        results[0][...] = ask()

    return call(tell, [], [("int32", ())])[0]


def one_if_finite(gradients: Sequence[Any]) -> Any:
    """Return 1 (float32), or NaN where one of ``gradients`` is not finite; None is none."""
    ops = keras.ops
    rows = [getattr(g, "values", g) if hasattr(g, "dense_shape") else g for g in gradients]
    finite = [ops.all(ops.isfinite(values)) for values in rows if values is not None]
    alike = ops.all(ops.stack(finite)) if finite else ops.ones((), "bool")
    return ops.where(alike, ops.ones((), "float32"), float("nan"))


def spoiled(gradient: Any, ones: Any) -> Any:
    """Return ``gradient``, or NaN in its place where ``ones`` is NaN: a sum of ones elsewhere."""
    one = keras.ops.cast(keras.ops.divide(ones, ones), gradient.dtype)
    return keras.ops.divide(gradient, one)


def when(ends: Any, apply: Callable[[], Any], reduced: Sequence[Any]) -> Any:
    """Call ``apply`` where a step ends, which in a graph is known when it runs.

    There nothing that it changes is changed before all gradients are ``reduced``: the count of
    steps, which depends on none of them, stays as it was where that fails.
    """
    if isinstance(ends, bool):  # without TensorFlow
        return apply() if ends else None
    import tensorflow as tf

    known = bool(ends) if tf.executing_eagerly() else tf.get_static_value(ends)
    if known is None:
        return tf.cond(ends, lambda: _then_nothing(apply), tf.no_op)
    if not known:
        return None
    with tf.control_dependencies([gradient for gradient in reduced if gradient is not None]):
        return apply()


def _then_nothing(apply: Callable[[], Any]) -> Any:
    import tensorflow as tf

    done = apply()
    return tf.group(done) if isinstance(done, tf.Operation) else tf.no_op()


def check_jax(optimizer: Any, passes: int) -> None:
    """Raise ValueError for what an optimizer in a program of JAX's cannot do.

    Its steps are one program, which does not know between them whether one was skipped.
    """
    if backend() != "jax":
        return
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        raise ValueError(
            "a LossScaleOptimizer cannot be distributed on Keras's backend jax: take the policy "
            "mixed_bfloat16, or 'bf16' as precision, which need no loss scale"
        )
    if passes != 1:
        raise ValueError(
            "backward_passes_per_step is for Keras's other backends: on jax pass "
            "gradient_accumulation_steps to the optimizer inside"
        )


def _reduce_jax(
    reducer: GradientReducer,
    variables: Sequence[Any],
    names: Sequence[str],
    gradients: Sequence[Any],
    cohorts: Sequence[str],
) -> list[Any]:
    from ringlet.jax.ops.operands import dtype_of
    from ringlet.jax.ops.ordered_calls import call
    from ringlet.jax.ops.watched_arrays import FLAG, compare_where, raise_flag

    slots, given = [], []
    for name, gradient, cohort in zip(names, gradients, cohorts, strict=True):
        if gradient is not None:
            dtype = dtype_of(gradient, f"the gradient of {name!r}")
            slots.append(Slot(name, dtype, tuple(gradient.shape), False, cohort))
            given.append(gradient)
    unused = [name for name, gradient in zip(names, gradients, strict=True) if gradient is None]

    outputs = [(slot.dtype, slot.shape) for slot in slots]

    def exchange(arrays: Sequence[Array], results: Sequence[Array]) -> None:
        *to, flag = results
        flag[...] = 0
        reducer.reduce(slots, arrays, unused, to, lambda: raise_flag(flag))

    *done, due = call(exchange, given, [*outputs, FLAG])
    values = zip(names, variables, gradients, strict=True)
    watched = {n: keras.ops.convert_to_tensor(v) for n, v, g in values if g is not None}
    if reducer.rate is not None:
        watched[RATE] = keras.ops.convert_to_tensor(reducer.rate())
    compare_where(due, lambda: reducer.drift, watched)
    reduced = iter(done)
    return [None if gradient is None else next(reduced) for gradient in gradients]


def _rate(reducer: GradientReducer) -> list[tuple[str, Any]]:
    return [] if reducer.rate is None else [(RATE, keras.ops.convert_to_numpy(reducer.rate()))]


def _reduce_torch(
    reducer: GradientReducer,
    accumulator: Accumulator,
    variables: Sequence[Any],
    names: Sequence[str],
    gradients: Sequence[Any],
    cohorts: Sequence[str],
) -> tuple[bool, list[Any]]:
    from ringlet.torch.tensors.views import as_tensor, check, dtype_of, flat, on_host

    slots, arrays = [], []
    for name, gradient, cohort in zip(names, gradients, cohorts, strict=True):
        if gradient is None:
            continue
        check(gradient, f"the gradient of {name!r}")
        dtype, shape = dtype_of(gradient), tuple(gradient.shape)
        slots.append(Slot(name, dtype, shape, False, cohort))
        array = flat(on_host(gradient))
        arrays.append(array.view(numpy_dtype(dtype)).reshape(shape))
    summed = accumulator.add(slots, arrays)
    if summed is None:
        return False, list(gradients)
    every, given = summed
    used = {slot.name for slot in every}
    unused = [name for name in names if name not in used]

    def shown() -> list[tuple[str, Array]]:
        values = zip(names, variables, gradients, strict=True)
        found = [(n, keras.ops.convert_to_numpy(v)) for n, v, g in values if g is not None]
        return [*found, *_rate(reducer)]

    common = accumulator.agreed()
    results = iter(reducer.reduce(every, given, unused, shown=shown, common=common))
    accumulator.refuse_unused(slots, every)
    done: list[Any] = []
    for gradient in gradients:
        if gradient is None:
            done.append(None)
            continue
        array = next(results)
        dtype, shape = dtype_of(gradient), tuple(gradient.shape)
        plain = array.view(np.uint16) if dtype == "bfloat16" else array
        done.append(as_tensor(plain.reshape(-1), dtype, shape).to(gradient.device))
    return True, done
