"""Precision policies: the dtypes of parameters, computation and reduction, and the loss scale."""

from ringlet.precision.policy import Policy, parse_policy, register_policy, registered_policies
from ringlet.precision.scaler import DynamicScale, LossScale, NoScale, StaticScale

__all__ = [
    "DynamicScale",
    "LossScale",
    "NoScale",
    "Policy",
    "StaticScale",
    "parse_policy",
    "register_policy",
    "registered_policies",
]
