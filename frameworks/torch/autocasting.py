"""Running a module's forward with or without autocast."""

from __future__ import annotations

from typing import Any

import torch

_CAST = (torch.float32, torch.float16, torch.bfloat16)


def enable(module: torch.nn.Module, dtype: torch.dtype) -> None:
    """Let ``module`` compute in ``dtype`` by autocast, and return float32."""
    _around(module, dtype)


def disable(module: torch.nn.Module) -> None:
    """Let ``module`` compute in float32 under whatever autocast."""
    _around(module, None)


def _around(module: torch.nn.Module, dtype: torch.dtype | None) -> None:
    def enter(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = next((p.device.type for p in module.parameters()), "cpu")
        context: Any = torch.autocast(device, dtype=dtype, enabled=dtype is not None)
        context.__enter__()
        module.__dict__.setdefault("_ringlet_autocast", []).append(context)
        if dtype is not None:
            return None
        return cast(args, torch.float32), cast(kwargs, torch.float32)

    def leave(module: Any, _: Any, output: Any) -> Any:
        module._ringlet_autocast.pop().__exit__(None, None, None)
        return cast(output, torch.float32)

    untraced: Any = torch.compiler.disable  # it knows contexts of with statements alone
    module.register_forward_pre_hook(untraced(enter), with_kwargs=True)
    module.register_forward_hook(untraced(leave), always_call=True)


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
