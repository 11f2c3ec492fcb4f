"""Running a module's forward with or without autocast."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

Hook = TypeVar("Hook", bound=Callable[..., Any])

_CAST = (torch.float32, torch.float16, torch.bfloat16)


def enable(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Let ``module`` compute in ``dtype`` by autocast, and return float32."""
    _around(module, dtype)


def disable(module: torch.nn.Module) -> None:
    """Let ``module`` compute in float32 under whatever autocast."""
    _around(module, None)


def _around(module: torch.nn.Module, dtype: torch.dtype | None) -> None:
    # Hooks that a module can be saved with: functions of modules, not of functions.
    module.register_forward_pre_hook(partial(_enter, dtype), with_kwargs=True)
    module.register_forward_hook(_leave, always_call=True)


def _disabled(hook: Hook) -> Hook:
    untraced: Any = torch.compiler.disable  # it knows contexts of with statements alone
    disabled: Hook = untraced(hook)
    return disabled


@_disabled
def _enter(
    dtype: torch.dtype | None, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    device = next((p.device.type for p in module.parameters()), "cpu")
    context: Any = torch.autocast(device, dtype=dtype, enabled=dtype is not None)
    context.__enter__()
    module.__dict__.setdefault("_ringlet_autocast", []).append(context)
    if dtype is not None:
        return None
    return cast(args, torch.float32), cast(kwargs, torch.float32)


@_disabled
def _leave(module: Any, _: Any, output: Any) -> Any:
    module._ringlet_autocast.pop().__exit__(None, None, None)
    return cast(output, torch.float32)


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return 16-bit and float32 tensors, and those in tuples, lists and dicts, as ``dtype``."""
    if isinstance(value, torch.Tensor):
        return value.to(dtype) if value.dtype in _CAST else value
    if type(value) in (tuple, list):
        return type(value)(cast(item, dtype) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(cast(item, dtype) for item in value))
    if type(value) is dict:
        return {key: cast(item, dtype) for key, item in value.items()}
    return value
