"""Updates of what EF21 and momentum correction remember, one pass each."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, types

from ringlet.compressors.kernels.cpu.common.intrinsics import f32_bits, is_finite, pointer
from ringlet.ring.jit import jit


@jit
def commit(received: Any, sent: Any, worker: Any, server: Any) -> None:
    """EF21: add what was received to ``server``, what was sent to ``worker``; return the server's.

    Where the sum is not finite it is returned, and nothing is remembered.
    """
    for i in range(received.size):
        total, own = server[i] + received[i], worker[i] + sent[i]
        ok = is_finite(total) and is_finite(own)
        worker[i] = own if ok else worker[i]
        server[i] = total if is_finite(total) else server[i]
        received[i] = total


@jit
def advance(x: Any, scale: Any, momentum: Any, velocity: Any, out: Any) -> None:
    """Momentum: fill ``out`` with momentum * velocity + scale * x."""
    for i in range(x.size):
        out[i] = momentum * velocity[i] + scale * x[i]


@jit
def settle(advanced: Any, sent: Any, masking: bool, velocity: Any) -> None:
    """Momentum: keep what ``advance`` gave, but zero where something was sent, if ``masking``.

    Where either is not finite the old value stays.
    """
    for i in range(sent.size):
        ok = is_finite(advanced[i]) and is_finite(sent[i])
        masked = masking and (f32_bits(sent[i]) & types.uint32(0x7FFFFFFF)) != types.uint32(0)
        value = types.float32(0) if masked else advanced[i]
        velocity[i] = value if ok else velocity[i]


@jit
def advance_many(tensors: Any, payloads: Any, momentum: Any, outs: Any) -> None:
    """Do what ``advance`` does for many tensors: rows are those of ``base.batched``.

    The second memory is the velocity; ``outs`` (uint64) tells where each result goes.
    """
    for t in range(outs.size):
        n = types.intp(payloads[t, 0])
        x = carray(pointer(tensors[t, 0]), n, np.float32)
        velocity = carray(pointer(tensors[t, 4]), n, np.float32)
        out = carray(pointer(outs[t]), n, np.float32)
        advance(x, types.float32(1), momentum, velocity, out)


@jit
def settle_many(tensors: Any, payloads: Any, advanced: Any, sent: Any, masking: bool) -> None:
    """Do what ``settle`` does for many tensors; the first two of its arrays lie at addresses."""
    for t in range(advanced.size):
        n = types.intp(payloads[t, 0])
        moved = carray(pointer(advanced[t]), n, np.float32)
        decoded = carray(pointer(sent[t]), n, np.float32)
        settle(moved, decoded, masking, carray(pointer(tensors[t, 4]), n, np.float32))


@jit
def differ_many(tensors: Any, payloads: Any, outs: Any) -> None:
    """EF21: write what differs from what is known, the residual, to ``outs`` (uint64).

    That is of the values, or of their sum with the second memory, where there is one.
    """
    for t in range(outs.size):
        n = types.intp(payloads[t, 0])
        x = carray(pointer(tensors[t, 0]), n, np.float32)
        known = carray(pointer(tensors[t, 1]), n, np.float32)
        out = carray(pointer(outs[t]), n, np.float32)
        if tensors[t, 4]:
            total = carray(pointer(tensors[t, 4]), n, np.float32)
            for i in range(n):
                out[i] = (total[i] + x[i]) - known[i]
        else:
            for i in range(n):
                out[i] = x[i] - known[i]


@jit
def commit_many(tensors: Any, lengths: Any, received: Any, sent: Any) -> None:
    """Do what ``commit`` does for many tensors; the first two of its arrays lie at addresses.

    The first memory is the worker's, the second one the server's.
    """
    for t in range(received.size):
        n = types.intp(lengths[t])
        total = carray(pointer(received[t]), n, np.float32)
        own = carray(pointer(sent[t]), n, np.float32)
        worker = carray(pointer(tensors[t, 1]), n, np.float32)
        commit(total, own, worker, carray(pointer(tensors[t, 4]), n, np.float32))
