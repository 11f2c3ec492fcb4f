"""Selection of entries by CUDA kernels: as many as there are room for, or as reach a threshold."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from ringlet.compressors.base.contract import Payload
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.multitensor import MultiTensor, Varying

if TYPE_CHECKING:
    from ringlet.compressors.kernels.cuda.common.multitensor import Seek
    from ringlet.compressors.kernels.cuda.sparsifiers.threshold import Sought


def reaching_on_device(sought: Sought, decay: float, ctx: Context) -> Payload | None:
    """Return what reaches a threshold by CUDA kernels; None if there are none. GPU only.

    Waits for the device once: how many entries there are decides what is allocated for them.
    """
    from ringlet.compressors.kernels.cuda.runtime.device import device_of
    from ringlet.compressors.kernels.cuda.sparsifiers.threshold import reaching

    device = device_of(ctx.xp)
    if device is None:
        return None
    if sought.x.size == 0:
        return {"indices": ctx.xp.empty(0, "uint32"), "values": ctx.xp.empty(0, "float32")}
    found = reaching(device, [sought], ctx.workspace.array, ctx.xp.empty, decay)
    return dict(zip(("indices", "values"), found[0], strict=True))


def selections_on_device(ctx: Context) -> MultiTensor | None:
    """Return the CUDA kernels that select from many tensors at once; None if there are none."""
    if ctx.xp is np:
        return None
    from ringlet.compressors.kernels.cuda.runtime.device import device_of

    device = device_of(ctx.xp)
    if device is None:
        return None
    from ringlet.compressors.kernels.cuda.common.multitensor import Selections

    return Selections(device)


def reaching_many_on_device(
    seek: Seek, count: Callable[[int], int], ctx: Context
) -> Varying | None:
    """Return the CUDA kernels that do so for many tensors at once; None if there are none."""
    if ctx.xp is np:
        return None
    from ringlet.compressors.kernels.cuda.runtime.device import device_of

    device = device_of(ctx.xp)
    if device is None:
        return None
    from ringlet.compressors.kernels.cuda.common.multitensor import Reaching

    return Reaching(device, seek, count)


def largest_on_device(
    x: Array, residual: Array | None, decay: float, payload: Payload, ctx: Context
) -> bool:
    """Fill ``payload`` with the largest entries by CUDA kernels; False if there are none.

    By a sampled threshold, then by radix; the host learns nothing and waits for nothing.
    """
    if ctx.xp is np:
        return False
    from ringlet.compressors.kernels.cuda.runtime.device import device_of
    from ringlet.compressors.kernels.cuda.sparsifiers.topk import Selected, largest

    device = device_of(ctx.xp)
    if device is None:
        return False
    tensor = Selected(x, payload["indices"], payload["values"], residual)
    largest(device, [tensor], ctx.workspace.array, decay)
    return True
