"""Selections of many tensors a call, of which the values decide how many entries travel."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, njit, types

from ringlet.compressors.kernels.cpu.common.copies import copy
from ringlet.compressors.kernels.cpu.common.feedback import advance, forget
from ringlet.compressors.kernels.cpu.common.intrinsics import pointer
from ringlet.compressors.kernels.cpu.common.scatter import scatter, scatter_add
from ringlet.compressors.kernels.cpu.sparsifiers.topk import collect, take
from ringlet.ring.jit import jit


@cache
def selector(select: Any, fed: bool) -> Any:
    """Return the kernel ``select_many(tensors, payloads, decay, plans)``, a loop around ``select``.

    Rows of ``tensors`` and ``payloads`` are those of ``base.batched``; rows of ``plans`` (float64)
    are the tensors' own. ``select(x, plan, key, listed, found, indices, values)`` fills the last
    two with entries of ``x``, and returns how many there are; ``listed`` (uint32) and ``found``
    (int32) are scratch of its length. With feedback what is sent is forgotten in the residual.
    """

    @jit
    def select_many(tensors: Any, payloads: Any, decay: Any, plans: Any) -> None:
        longest = 0
        for t in range(payloads.shape[0]):
            longest = max(longest, types.intp(payloads[t, 0]))
        listed, found = np.empty(longest, np.uint32), np.empty(longest, np.int32)
        room = np.empty(longest if fed else 0, np.float32)
        for t in range(payloads.shape[0]):
            n = types.intp(payloads[t, 0])
            x = carray(pointer(tensors[t, 0]), n, np.float32)
            indices = carray(pointer(payloads[t, 1]), n, np.uint32)
            values = carray(pointer(payloads[t, 3]), n, np.float32)
            if fed:
                residual = carray(pointer(tensors[t, 1]), n, np.float32)
                x = _advanced(x, residual, decay, listed, room[:n])
            count = select(x, plans[t], tensors[t, 2], listed[:n], found[:n], indices, values)
            payloads[t, 2] = payloads[t, 4] = types.uint64(count)
            if fed:
                forget(indices[:count], values[:count], residual)

    return select_many


@njit(nogil=True)
def reaching(x: Any, floor: Any, listed: Any, found: Any) -> Any:
    """List the entries of ``x`` whose magnitude reaches ``floor``; return how many there are."""
    return collect(x, x, types.float32(1), False, 0, types.int32(floor), listed, found)


@njit(nogil=True)
def all_listed(x: Any, count: int, listed: Any, indices: Any, values: Any) -> Any:
    """Send all of so many that are listed."""
    for j in range(count):
        indices[j] = listed[j]
        values[j] = x[listed[j]]
    return count


@njit(nogil=True)
def largest_listed(
    x: Any, count: int, k: int, listed: Any, found: Any, indices: Any, values: Any
) -> Any:
    """Send the ``k`` largest of so many that are listed, the lowest index among equals."""
    one = types.float32(1)
    take(x, x, one, False, listed[:count], found[:count], indices[:k], values[:k])
    return k


@njit(inline="always")
def decode_placed(places: Any, add: bool, out: Any, options: Any) -> Any:
    """Decode one of many tensors, for ``common.batched.batch_decoder``; False if it makes no sense.

    There are no options.
    """
    if places[2] != places[4]:
        return False
    count = types.intp(places[2])
    indices = carray(pointer(places[1]), count, np.uint32)
    values = carray(pointer(places[3]), count, np.float32)
    return scatter_add(indices, values, out) if add else scatter(indices, values, out)


@njit(nogil=True)
def _advanced(x: Any, residual: Any, decay: Any, bad: Any, room: Any) -> Any:
    """Set ``residual`` to p = x + decay * residual where that is finite; return p.

    That is ``residual`` itself, unless something was not finite.
    """
    count = advance(x, residual, decay, 0, bad)
    if count == 0:
        return residual
    copy(residual, room)
    for j in range(count):
        i = bad[j]
        room[i] = x[i] + decay * residual[i]
    return room
