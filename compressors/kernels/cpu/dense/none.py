"""float32 values that travel as they are, for many tensors a call.

For ``batch_encoder`` and ``batch_decoder`` of ``kernels.cpu.common.batched``, without options.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit

from ringlet.compressors.kernels.cpu.common.intrinsics import is_finite, pointer


@njit(inline="always")
def encode_placed(
    x: Any, residual: Any, decay: Any, key: Any, start: Any, places: Any, options: Any
) -> None:
    """Copy the values."""
    out = carray(pointer(places[1]), x.size, np.float32)
    for i in range(x.size):
        out[i] = x[i]


@njit(inline="always")
def encode_feedback_placed(
    x: Any, residual: Any, decay: Any, key: Any, start: Any, places: Any, options: Any
) -> None:
    """Send what is held back as well: all of it, where that is finite."""
    out = carray(pointer(places[1]), x.size, np.float32)
    for i in range(x.size):
        target = x[i] + decay * residual[i]
        lost = target - target
        out[i] = target
        residual[i] = lost if is_finite(lost) else residual[i]


@njit(inline="always")
def decode_placed(places: Any, add: bool, out: Any, options: Any) -> bool:
    """Copy the values, or add them."""
    values = carray(pointer(places[1]), out.size, np.float32)
    for i in range(out.size):
        out[i] = out[i] + values[i] if add else values[i]
    return True
