"""Whether CUDA kernels run on a compressor's arrays, and on which device."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ringlet.compressors.core.context import Context

if TYPE_CHECKING:
    from ringlet.compressors.kernels.cuda.runtime.device import Device


def device_for(ctx: Context) -> Device | None:
    """Return what runs CUDA kernels on arrays of ``ctx.xp``; None where array code has to do.

    For NumPy's arrays nothing of the kernels is imported.
    """
    if ctx.xp is np:
        return None
    from ringlet.compressors.kernels.cuda.runtime.device import device_of

    return device_of(ctx.xp)
