"""Giving a model the dtypes of a precision policy.

Micikevicius et al., "Mixed precision training", ICLR 2018.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch.nn.modules.batchnorm import _NormBase

from ringlet.precision import Policy, parse_policy
from ringlet.precision.appliers import Applier, register_applier
from ringlet.ring.callers import public
from ringlet.torch.tensors.views import cast

_NORMS = (_NormBase, torch.nn.LayerNorm, torch.nn.GroupNorm, torch.nn.RMSNorm)
_WHOLE = (torch.nn.RNNBase,)  # these hold their parameters in lists of their own


@public
def apply_precision(module: torch.nn.Module, precision: str | Policy) -> torch.nn.Module:
    """Give ``module`` a policy's dtypes, in place, and return it: ``policy.apply(module)``.

    Norm layers, and what the policy's ``keep`` names, stay in float32: a layer computes in float32
    if that is all of its parameters, and otherwise with a copy in the dtype of the others, as a
    Linear does whose bias is kept. (Recurrent layers are converted as a whole, or kept.) Inputs are
    cast on the way in and outputs to float32 on the way out, so that the loss is computed in
    float32. A policy that only computes in 16 bits leaves parameters alone, and runs ``forward``
    under ``torch.autocast``.

    Raises ValueError for a module that holds integer parameters or is of another dtype already.
    """
    return parse_policy(precision).apply(module)


def give(module: torch.nn.Module, policy: Policy) -> None:
    """Do what ``apply_precision`` says."""
    if policy.compute == "float32":
        return
    dtype: torch.dtype = getattr(torch, policy.compute)
    fitting = (torch.float32,) if policy.autocasts else (torch.float32, dtype)
    for name, p in module.named_parameters():
        if not p.is_floating_point():
            raise ValueError(f"policy {policy.name!r} has no use for {name!r}, which is {p.dtype}")
        if p.dtype not in fitting:
            raise ValueError(
                f"parameter {name!r} is {p.dtype} already; apply {policy.name!r} to a float32 model"
            )
    wide = {id(child) for name, child in module.named_modules() if _stays(name, child, policy)}
    if policy.autocasts:
        from ringlet.torch import autocasting  # which takes a second to import

        for child in module.modules():
            if id(child) in wide:
                autocasting.disable(child)
        autocasting.enable(module, dtype)
        return
    kept = _kept(module, policy, wide)
    partly: dict[int, tuple[torch.nn.Module, list[str]]] = {}
    for child in module.modules():
        if id(child) in wide:
            _cast_around(child, torch.float32, dtype)
            continue
        for name, p in child.named_parameters(recurse=False):
            if id(p) in kept:
                partly.setdefault(id(child), (child, []))[1].append(name)
            else:
                p.data = p.data.to(dtype)
    _copy_narrow(module, [partly[key] for key in partly], dtype)
    for child in module.modules():
        if child is not module:
            # Attention reads a child's parameters without calling it.
            near = [partly[id(c)] for c in (child, *child.children()) if id(c) in partly]
            _copy_narrow(child, near, dtype)
    _cast_around(module, dtype, torch.float32)


def _stays(prefix: str, layer: torch.nn.Module, policy: Policy) -> bool:
    """Whether a layer computes in float32: a norm, or one whose own parameters are all kept."""
    own = _names(prefix, layer)
    return isinstance(layer, _NORMS) or (bool(own) and all(_keeps(policy, own, layer)))


def _kept(module: torch.nn.Module, policy: Policy, wide: set[int]) -> set[int]:
    """Return the ids of the parameters that stay in float32, under whatever name."""
    kept: set[int] = set()
    for prefix, layer in module.named_modules():
        own = list(layer.parameters(recurse=False))
        if id(layer) in wide:
            kept.update(map(id, own))
        elif not isinstance(layer, _WHOLE):
            flags = _keeps(policy, _names(prefix, layer), layer)
            kept.update(id(p) for p, keeps in zip(own, flags, strict=True) if keeps)
    return kept


def _keeps(policy: Policy, names: list[str], layer: torch.nn.Module) -> list[bool]:
    return [policy.keeps(name, type(layer).__name__) for name in names]


def _names(prefix: str, layer: torch.nn.Module) -> list[str]:
    own = [name for name, _ in layer.named_parameters(recurse=False)]
    return [f"{prefix}.{name}" if prefix else name for name in own]


def _cast_around(module: torch.nn.Module, inside: torch.dtype, outside: torch.dtype) -> None:
    # Hooks that a module can be saved with: functions of modules, not of functions.
    module.register_forward_pre_hook(partial(_cast_input, inside), with_kwargs=True)
    module.register_forward_hook(partial(_cast_output, outside))


def _cast_input(
    dtype: torch.dtype, _: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    return cast(args, dtype), cast(kwargs, dtype)


def _cast_output(dtype: torch.dtype, _: torch.nn.Module, __: Any, output: Any) -> Any:
    return cast(output, dtype)


def _copy_narrow(
    module: torch.nn.Module, partly: list[tuple[torch.nn.Module, list[str]]], dtype: torch.dtype
) -> None:
    """During ``module``'s forward, let attributes of kept parameters be copies of ``dtype``."""
    if not partly:
        return
    # Attributes, so that a copy of the module gets its own.
    module._ringlet_partly, module._ringlet_narrow, module._ringlet_copied = partly, dtype, []  # type: ignore[assignment]
    module.register_forward_pre_hook(_narrow)
    module.register_forward_hook(_forget, always_call=True)


def _narrow(module: Any, _: Any) -> None:
    copied = []
    for layer, names in module._ringlet_partly:
        for name in names:
            # An instance's own attribute comes before the parameter; a caller may have set it.
            if name not in layer.__dict__:
                layer.__dict__[name] = layer._parameters[name].to(module._ringlet_narrow)
                copied.append((layer, name))
    module._ringlet_copied.append(copied)


def _forget(module: Any, _: Any, __: Any) -> None:
    for layer, name in module._ringlet_copied.pop():
        del layer.__dict__[name]


def _given(model: Any, policy: Policy) -> bool:
    if not isinstance(model, torch.nn.Module):
        return False
    give(model, policy)
    return True


def _autocast(dtype: str, device: str | None) -> AbstractContextManager[Any]:
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.autocast(device, dtype=getattr(torch, dtype))


register_applier("torch", Applier(_given, _autocast))
