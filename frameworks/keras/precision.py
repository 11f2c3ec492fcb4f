"""Precision policies in Keras' terms: its dtype policies, and its LossScaleOptimizer.

Keras' mixed policies hold variables in float32, which are the masters, and compute in 16 bits; what
layers keep in float32, layers decide.
"""

from __future__ import annotations

from typing import Any

import keras

from ringlet.compressors import Router
from ringlet.precision import DynamicScale, Policy, parse_policy


def set_precision(precision: str | Policy) -> Policy:
    """Let layers that are made from now on compute as a policy says; return the policy.

    Sets Keras' global dtype policy: "mixed_float16", "mixed_bfloat16" or "float32".
    """
    policy = parse_policy(precision)
    keras.config.set_dtype_policy(policy.keras_dtype())
    return policy


def fits(policy: Policy, model: Any) -> None:
    """Raise ValueError if no layer of ``model`` computes in a policy's 16-bit dtype."""
    found = sorted(
        {str(layer.compute_dtype) for layer in model._flatten_layers(include_self=False)}
    )
    if policy.compute != "float32" and policy.compute not in found:
        raise ValueError(
            f"policy {policy.name!r} computes in {policy.compute}, but this model's layers in "
            f"{', '.join(found)}: layers keep the dtype that they were made and saved with. Call "
            "set_precision before the model is made"
        )


def remembering(router: Router) -> list[str]:
    """Return the compressors that remember something of a step, which an overflow would spoil."""
    return [str(c) for c in router.compressors if c.traits().stateful]


def guards(policy: Policy, router: Router) -> bool:
    """Whether gradients that a caller has scaled need a watch over what compressors remember.

    That is where ``policy`` has a loss scale and a compressor of ``router`` remembers: an overflow
    must not get into its memory. Raises ValueError where that scale changes: what is remembered is
    in its units, and has to be told of the change.
    """
    fed = remembering(router)
    if not (policy.scale.watches and fed):
        return False
    if policy.scale.after(overflow=True) != policy.scale:
        raise ValueError(
            f"policy {policy.name!r} has a loss scale that changes, and {fed[0]!r} remembers "
            "gradients in units of it, of which a tape knows nothing. Take DistributedOptimizer "
            "with this policy, or a fixed scale such as 'fp16(static=1024)', or a compressor that "
            "remembers nothing"
        )
    return True


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
