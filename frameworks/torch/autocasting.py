"""Running a module's forward with or without autocast.

To import this imports torch's compiler, which takes as long as all the rest of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import torch

from ringlet.torch.tensors.views import cast

Hook = TypeVar("Hook", bound=Callable[..., Any])


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
