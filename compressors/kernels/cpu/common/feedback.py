"""What error feedback does to residuals: one pass over memory each.

``residual`` keeps its old value wherever the new one would not be finite.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types

from ringlet.compressors.kernels.cpu.common.intrinsics import f32_bits, is_finite, pointer
from ringlet.ring.jit import jit

_BLOCK = 1024


@jit
def add(x: Any, residual: Any, decay: Any, out: Any) -> None:
    """Set ``out`` to x + decay * residual."""
    for i in range(x.size):
        out[i] = x[i] + decay * residual[i]


@jit
def advance(x: Any, residual: Any, decay: Any, first: Any, bad: Any) -> int:
    """Set ``residual`` to x + decay * residual; list ``first + i`` in ``bad`` where it stays.

    Returns how many there are. ``bad`` (uint32) has room for all of x.
    """
    count = 0
    for start in range(0, x.size, _BLOCK):
        values, held = x[start : start + _BLOCK], residual[start : start + _BLOCK]
        top = types.uint32(0)
        for i in range(values.size):
            top = max(top, f32_bits(values[i] + decay * held[i]) & types.uint32(0x7FFFFFFF))
        if top < types.uint32(0x7F800000):
            for i in range(values.size):
                held[i] = values[i] + decay * held[i]
        else:
            for i in range(values.size):
                target = values[i] + decay * held[i]
                if is_finite(target):
                    held[i] = target
                else:
                    bad[count] = first + start + i
                    count += 1
    return count


@jit
def forget(indices: Any, values: Any, residual: Any) -> None:
    """Zero ``residual`` where finite ``values`` were sent as they are."""
    for j in range(indices.size):
        if is_finite(values[j]):
            residual[indices[j]] = types.float32(0)


@jit
def keep(target: Any, decoded: Any, residual: Any) -> None:
    """Set ``residual`` to target - decoded."""
    for i in range(target.size):
        lost = target[i] - decoded[i]
        residual[i] = lost if is_finite(lost) else residual[i]


@jit
def keep_combined(target: Any, sent: Any, combined: Any, residual: Any) -> None:
    """Set ``residual`` to target - sent where the ``combined`` result is finite as well."""
    for i in range(target.size):
        lost = target[i] - sent[i]
        residual[i] = lost if is_finite(lost) and is_finite(combined[i]) else residual[i]


@jit
def keep_finite(target: Any, residual: Any) -> None:
    """Set ``residual`` to ``target``."""
    for i in range(target.size):
        residual[i] = target[i] if is_finite(target[i]) else residual[i]


@jit
def settle(target: Any, indices: Any, decoded: Any, old: Any, residual: Any) -> None:
    """Set ``residual`` to what ``decoded`` lacks of the entries sent; ``old`` is what was there."""
    for j in range(indices.size):
        lost = target[indices[j]] - decoded[j]
        residual[indices[j]] = lost if is_finite(lost) else old[j]


@jit
def add_many(tensors: Any, payloads: Any, decay: Any, outs: Any) -> None:
    """Do what ``add`` does for many tensors: rows are those of ``base.batched``.

    ``outs`` (uint64) tells where each sum goes.
    """
    for t in range(outs.size):
        n = types.intp(payloads[t, 0])
        x = carray(pointer(tensors[t, 0]), n, np.float32)
        residual = carray(pointer(tensors[t, 1]), n, np.float32)
        add(x, residual, decay, carray(pointer(outs[t]), n, np.float32))


@jit
def keep_many(tensors: Any, payloads: Any, targets: Any, decoded: Any) -> None:
    """Do what ``keep`` does for many tensors; targets and what is decoded lie at addresses."""
    for t in range(targets.size):
        n = types.intp(payloads[t, 0])
        target = carray(pointer(targets[t]), n, np.float32)
        sent = carray(pointer(decoded[t]), n, np.float32)
        keep(target, sent, carray(pointer(tensors[t, 1]), n, np.float32))
