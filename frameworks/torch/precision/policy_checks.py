"""Whether a precision policy goes together with parameters and with what travels."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch

from ringlet.compressors import Compressor
from ringlet.precision import Policy
from ringlet.ring.callers import outside
from ringlet.ring.communicator import ReduceOp


def check_policy(policy: Policy, named: dict[str, torch.nn.Parameter], op: ReduceOp) -> None:
    """Raise ValueError for a policy that does not fit, and warn of what is likely a mistake."""
    halves = [name for name, p in named.items() if p.dtype is torch.float16]
    if acts(policy) and op is ReduceOp.ADASUM:
        raise ValueError("precision does not go together with op=Adasum")
    for name, p in named.items():
        if acts(policy) and not p.is_floating_point():
            raise ValueError(f"policy {policy.name!r} has no use for {name!r}, which is {p.dtype}")
    wanted = getattr(torch, policy.parameters)
    if policy.masters and named and not any(p.dtype is wanted for p in named.values()):
        alone = (
            "that has parameters of both kinds: they share a loss scale"
            if policy.scale.watches
            else "without precision="
        )
        raise ValueError(
            f"no parameter is {policy.parameters}: call apply_precision(model, {policy.name!r}) "
            "before the optimizer is made. Parameters that stay in float32, such as biases and "
            f"norms, need an optimizer {alone}"
        )
    if policy.scale.watches:
        return
    advice = "and there is no loss scale: small gradients become zero. Pass precision="
    if halves:
        warnings.warn(
            f"{len(halves)} parameters are float16, the first {halves[0]!r}, {advice}'fp16'",
            stacklevel=outside(),
        )
    elif policy.compute == "float16":
        warnings.warn(
            f"policy {policy.name!r} computes in float16, {advice}'amp_fp16'", stacklevel=outside()
        )


def check_wire(policy: Policy, compressors: Iterable[Compressor]) -> None:
    """Warn of compressors that do not work alike under a loss scale."""
    odd = [str(c) for c in compressors if not c.traits().scales]
    if policy.scale.watches and odd:
        warnings.warn(
            f"{odd[0]!r} goes by absolute sizes, but gradients come to it times the loss scale "
            f"({policy.scale.scale:g} at first), which its results are divided by: take a policy "
            "without one, such as 'bf16', or another compressor",
            stacklevel=outside(),
        )


def acts(policy: Policy) -> bool:
    """Whether the optimizer needs masters or a loss scale."""
    return policy.masters or policy.scale.watches
