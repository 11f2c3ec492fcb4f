"""Norms of whole tensors, from sums of squares that fit no float32.

On a GPU the host does not learn them: what is made of a norm stays an array of one element there.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ringlet.compressors.base.cuda_device import device_for
from ringlet.compressors.core.context import Array, Context, Workspace
from ringlet.compressors.core.read_only import unlocked
from ringlet.compressors.core.threads import run_ranges


def shrinking(x: Array, bound: float, ctx: Context) -> Any:
    """Return the factor (float32) that makes the norm of ``x`` at most ``bound``.

    It is 1 where the norm is not finite: an overflow must not be scaled away.
    """
    if ctx.xp is np:
        norm = math.sqrt(energy(x, ctx.workspace))
        return np.float32(bound / norm) if bound < norm < math.inf else np.float32(1)
    factor = _bound_on_device("shrink", x, bound, ctx)
    if factor is not None:
        return factor
    with np.errstate(over="ignore", invalid="ignore"):
        length = ctx.xp.sqrt(ctx.xp.square(x.astype("float64")).sum())
        shrinks = (length > bound) & ctx.xp.isfinite(length)
        found = ctx.xp.where(shrinks, bound / ctx.xp.where(shrinks, length, 1.0), 1.0)
    return found.astype("float32")


def clip(x: Array, times: float, out: Array, ctx: Context) -> None:
    """Set ``out`` to ``x``, clipped at so many of its root mean squares, unless not finite."""
    if x.size == 0:
        return
    if ctx.xp is np:
        most = times * math.sqrt(energy(x, ctx.workspace) / x.size)
        if math.isfinite(most):
            with np.errstate(over="ignore"):
                np.clip(x, np.float32(-most), np.float32(most), out=out)
        else:
            out[...] = x
        return
    limit = _bound_on_device("limit", x, times, ctx)
    if limit is not None:
        from ringlet.compressors.kernels.cuda.common import norms
        from ringlet.compressors.kernels.cuda.common.operands import Operands

        device = device_for(ctx)
        assert device is not None, "it made the limit"
        norms.clip(device, [Operands(x, out=out, bound=limit)])
        return
    with np.errstate(over="ignore", invalid="ignore"):
        bound = times * ctx.xp.sqrt(ctx.xp.square(x.astype("float64")).sum() / x.size)
        found = ctx.xp.where(ctx.xp.isfinite(bound), bound, np.inf).astype("float32")
    ctx.xp.minimum(ctx.xp.maximum(x, -found), found, out=out)


def _bound_on_device(kernel: str, x: Array, bound: float, ctx: Context) -> Array | None:
    """Return what CUDA kernels make of the norm, one element; None where there are none."""
    from ringlet.compressors.kernels.cuda.common import norms
    from ringlet.compressors.kernels.cuda.common.operands import Operands

    device = device_for(ctx)
    if device is None:
        return None
    found = ctx.workspace.array("norm", 1)
    tensor = Operands(x, bound=found)
    norms.bounds(device, kernel, [tensor], bound, ctx.workspace.array)
    return found


def energy(x: Array, workspace: Workspace) -> float:
    """Return ||x||^2 of float32 values, added in float64; NaN or Inf where x has one. CPU only."""
    from ringlet.compressors.kernels.cpu.common import norms as kernels

    chunk = kernels.CHUNK
    sums, x = workspace.array("squares", -(-x.size // chunk), np.float64), unlocked(x)

    def square(start: int, stop: int) -> None:
        kernels.square(x[start:stop], chunk, sums[start // chunk : -(-stop // chunk)])

    run_ranges(x.size, chunk, square)
    total = 0.0
    for value in sums.tolist():  # in order, which CUDA kernels follow
        total += value
    return total
