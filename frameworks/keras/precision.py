"""Precision policies in Keras' terms: its dtype policies, and its LossScaleOptimizer.

Keras' mixed policies hold variables in float32, which are the masters, and compute in 16 bits; what
layers keep in float32, layers decide.
"""

from __future__ import annotations

from typing import Any

import keras

from ringlet.precision import DynamicScale, Policy, parse_policy


def set_precision(precision: str | Policy) -> Policy:
    """Let layers that are made from now on compute as a policy says; return the policy.

    Sets Keras' global dtype policy: "mixed_float16", "mixed_bfloat16" or "float32".
    """
    policy = parse_policy(precision)
    keras.config.set_dtype_policy(policy.keras_dtype())
    return policy


def with_loss_scale(optimizer: Any, policy: Policy) -> Any:
    """Return ``optimizer``, in a LossScaleOptimizer if the policy has a loss scale and it is none.

    Raises ValueError for scales that Keras does not know: those that do not double and halve.
    """
    scale = policy.scale
    if not scale.watches or isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return optimizer
    if not isinstance(scale, DynamicScale) or (scale.growth, scale.backoff) != (2.0, 0.5):
        raise ValueError(
            f"the loss scale of policy {policy.name!r} is {scale}; Keras' LossScaleOptimizer "
            "doubles and halves. Take such a policy, as 'fp16', or wrap the optimizer yourself"
        )
    return keras.optimizers.LossScaleOptimizer(
        optimizer, initial_scale=scale.scale, dynamic_growth_steps=scale.interval
    )
