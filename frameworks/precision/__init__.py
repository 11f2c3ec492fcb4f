"""Precision policies: the dtypes of parameters, computation and reduction, and the loss scale."""

from ringlet.precision import builtin as _builtin  # noqa: F401 - registers
from ringlet.precision.policies import parse_policy, register_policy, registered_policies
from ringlet.precision.policy import BIASES, EMBEDDINGS, KEPT, NORMS, Policy
from ringlet.precision.scaler import DynamicScale, LossScale, NoScale, StaticScale

__all__ = [
    "BIASES",
    "EMBEDDINGS",
    "KEPT",
    "NORMS",
    "DynamicScale",
    "LossScale",
    "NoScale",
    "Policy",
    "StaticScale",
    "parse_policy",
    "register_policy",
    "registered_policies",
]
