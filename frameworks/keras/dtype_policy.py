"""Precision policies in Keras' terms: its dtype policies, and what its loss scale has to watch.

Keras' mixed policies hold variables in float32, which are the masters, and compute in 16 bits.
"""

from __future__ import annotations

import warnings
from typing import Any

import keras

from ringlet.precision import KEPT, Policy, parse_policy
from ringlet.ring.callers import public


@public
def set_precision(precision: str | Policy) -> Policy:
    """Let layers that are made from now on compute as a policy says; return the policy.

    Sets Keras' global dtype policy: "mixed_float16", "mixed_bfloat16" or "float32". That knows no
    patterns: what the policy's ``keep`` names is kept by ``apply_precision``, once the model is
    made. Warns where ``keep`` is not what it is by default.
    """
    policy = parse_policy(precision)
    if policy.keep != KEPT:
        warnings.warn(
            f"set_precision does not keep {policy.keep} in float32: Keras' global dtype policy "
            "knows no patterns. Call apply_precision(model, policy) once the model is made",
            stacklevel=2,
        )
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
            "set_precision before the model is made, or apply_precision before it is compiled"
        )
