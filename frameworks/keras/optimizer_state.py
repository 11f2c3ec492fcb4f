"""What optimizers keep, of Keras 3 and of tf_keras: variables, velocities, the learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from ringlet.keras import tf_keras
from ringlet.ring.dtypes import Array


def as_array(variable: Any) -> Array:
    """Return a copy of a variable's value: one of Keras's, or TensorFlow's own."""
    if isinstance(variable, keras.Variable):
        return np.array(keras.ops.convert_to_numpy(variable))
    return np.array(variable.numpy())


def hold_variables(model: Any) -> None:
    """Have a model's variables hold their values: in ``fit`` Keras's trainer on jax has these.

    Not elsewhere: what a trainer has may be of before a step that failed.
    """
    if any(getattr(variable, "_value", variable) is None for variable in model.weights):
        model.jax_state_sync()


def is_given_away(variable: Any) -> bool:
    """Whether a program of JAX's was given the variable's memory, and has not returned it."""
    if keras.config.backend() != "jax":
        return False
    return variable._value is None or bool(variable.value.is_deleted())  # None: by ``fit``


def state_variables(optimizer: Any, variables: Sequence[Any]) -> list[Any]:
    """Return all variables of ``optimizer``, which are made now, for ``variables``, if need be."""
    if tf_keras.is_optimizer(optimizer):
        if not tf_keras.is_built(optimizer):
            tf_keras.build(optimizer, variables)
        return tf_keras.variables_of(optimizer)
    if not optimizer.built:
        optimizer.build(variables)
    return list(optimizer.variables)


def learning_rate(optimizer: Any) -> float:
    """Return the learning rate of the next step."""
    rate = optimizer.learning_rate
    if tf_keras.is_optimizer(optimizer):
        return float(rate(optimizer.iterations) if callable(rate) else rate)
    return float(keras.ops.convert_to_numpy(rate))


def scale_velocities(optimizer: Any, factor: float) -> None:
    """Scale what SGD's momentum has made: the same as scaling its momentum for one step."""
    if tf_keras.is_optimizer(optimizer):
        for velocity in tf_keras.velocities_of(optimizer):
            velocity.assign(velocity * factor)
        return
    inner = getattr(optimizer, "inner_optimizer", optimizer)
    if getattr(inner, "momentum", 0) and inner.built:
        for velocity in getattr(inner, "momentums", ()):
            if velocity is not None:
                velocity.assign(keras.ops.multiply(velocity, factor))
