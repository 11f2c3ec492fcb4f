"""The randomised Hadamard rotation, block by block in the first-level cache.

Loops have constant strides and lengths, and places are unsigned: only then do compilers see that
the elements of a vector do not depend on one another.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, njit, types

from ringlet.compressors.kernels.cpu.common.copies import copy
from ringlet.compressors.kernels.cpu.common.intrinsics import bits_f32, f32_bits, is_finite, pointer
from ringlet.compressors.kernels.cpu.common.rng import squares
from ringlet.ring.jit import jit

_U = types.uint64


@jit
def rotate(x: Any, key: Any, start: Any, block: int, out: Any) -> None:
    """Fill ``out`` with the rotated ``x``: change signs, then transform each block.

    ``start`` is the place of x[0] in its tensor, a multiple of ``block``. May work in place.
    """
    words = np.empty(64, np.uint32)
    for first in range(0, x.size, block):
        target = out[first : min(first + block, x.size)]
        copy(x[first : first + target.size], target)
        _flip(target, key, start + first, block, words)
        _transform(target, block)


@jit
def restore(x: Any, key: Any, start: Any, block: int, add: bool, out: Any) -> None:
    """Fill ``out`` with what ``rotate`` turned into ``x``, or ``add`` it. May work in place."""
    words, work = np.empty(64, np.uint32), np.empty(block if add else 0, np.float32)
    for first in range(0, x.size, block):
        target = out[first : min(first + block, x.size)]
        values = work[: target.size] if add else target
        copy(x[first : first + target.size], values)
        _transform(values, block)
        _flip(values, key, start + first, block, words)
        if add:
            for i in range(target.size):
                target[i] += values[i]


@jit
def rotate_many(tensors: Any, payloads: Any, block: int, outs: Any) -> None:
    """Do what ``rotate`` does for many tensors: rows are those of ``base.batched``.

    ``outs`` (uint64) tells where each result goes.
    """
    for t in range(outs.size):
        n = types.intp(payloads[t, 0])
        x = carray(pointer(tensors[t, 0]), n, np.float32)
        out = carray(pointer(outs[t]), n, np.float32)
        rotate(x, tensors[t, 2], types.intp(tensors[t, 3]), block, out)


@jit
def restore_many(tensors: Any, payloads: Any, block: int, scale: Any, outs: Any) -> None:
    """Do what ``restore`` does for many tensors, in place; results are multiplied by ``scale``."""
    for t in range(outs.size):
        out = carray(pointer(outs[t]), types.intp(payloads[t, 0]), np.float32)
        restore(out, tensors[t, 2], types.intp(tensors[t, 3]), block, False, out)
        if scale != types.float32(1.0):
            for i in range(out.size):
                out[i] *= scale


@jit
def rotate_sum(
    x: Any, residual: Any, decay: Any, key: Any, start: Any, block: int, out: Any
) -> None:
    """Fill ``out`` with the rotated x + decay * residual."""
    words = np.empty(64, np.uint32)
    for first in range(0, x.size, block):
        target = out[first : min(first + block, x.size)]
        values, held = x[first : first + target.size], residual[first : first + target.size]
        for i in range(target.size):
            target[i] = values[i] + decay * held[i]
        _flip(target, key, start + first, block, words)
        _transform(target, block)


@jit
def keep(x: Any, residual: Any, decay: Any, key: Any, start: Any, block: int, decoded: Any) -> None:
    """Leave x + decay * residual, less the restored ``decoded``, in ``residual`` where finite.

    ``decoded`` is overwritten.
    """
    words = np.empty(64, np.uint32)
    for first in range(0, x.size, block):
        target = decoded[first : min(first + block, x.size)]
        values, held = x[first : first + target.size], residual[first : first + target.size]
        _transform(target, block)
        _flip(target, key, start + first, block, words)
        for i in range(target.size):
            lost = (values[i] + decay * held[i]) - target[i]
            held[i] = lost if is_finite(lost) else held[i]


@jit
def _flip(values: Any, key: Any, start: Any, block: int, words: Any) -> None:
    """Change signs: bit i // 64 of random number i % 64 decides on element i of a group.

    In place: between two arrays that may be one, compilers use no vectors.
    """
    group = min(block, 2048)
    for begin in range(0, values.size, group):
        counter = _U((start + begin) // group * 64)
        for j in range(64):
            words[j] = squares(key, counter + _U(j))
        end = min(begin + group, values.size)
        for row in range((end - begin) // 64):
            first, shift = _U(begin + 64 * row), types.uint32(31 - row)
            for j in range(64):
                sign = (words[j] << shift) & types.uint32(0x80000000)
                at = first + _U(j)
                values[at] = bits_f32(f32_bits(values[at]) ^ sign)
        for i in range((end - begin) // 64 * 64, end - begin):
            sign = (words[i % 64] << types.uint32(31 - i // 64)) & types.uint32(0x80000000)
            values[begin + i] = bits_f32(f32_bits(values[begin + i]) ^ sign)


@jit
def _transform(values: Any, block: int) -> None:
    """Transform a block in place; a shorter one in powers of two, the largest first."""
    start, size = 0, block
    while start < values.size:
        while size > values.size - start:
            size //= 2
        piece = values[start : start + size]
        unit = types.float32(1.0 / np.sqrt(types.float64(size)))
        for i in range(size):
            piece[i] *= unit
        if size < 64:
            _short(piece)
        else:
            _long(piece)
        start += size


@jit
def _short(v: Any) -> None:
    half = 1
    while half < v.size:
        for first in range(0, v.size, 2 * half):
            for i in range(first, first + half):
                v[i], v[i + half] = v[i] + v[i + half], v[i] - v[i + half]
        half *= 2


@jit
def _long(v: Any) -> None:
    _radix8(v, 1)
    _radix8(v, 8)
    _radix4(v, 64)
    _radix4(v, 256)
    _radix4(v, 1024)
    _radix4(v, 4096)
    _radix4(v, 16384)


@njit(inline="always")
def _radix8(v: Any, s: Any) -> None:
    """Add and subtract elements that lie s, then 2 s, then 4 s apart."""
    for group in range(v.size // (8 * s)):
        for j in range(s):
            i = _U(8 * s * group) + _U(j)
            a, b, c, d = v[i], v[i + _U(s)], v[i + _U(2 * s)], v[i + _U(3 * s)]
            e, f, g, h = v[i + _U(4 * s)], v[i + _U(5 * s)], v[i + _U(6 * s)], v[i + _U(7 * s)]
            a, b, c, d, e, f, g, h = a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h
            a, b, c, d, e, f, g, h = a + c, b + d, a - c, b - d, e + g, f + h, e - g, f - h
            v[i], v[i + _U(s)], v[i + _U(2 * s)], v[i + _U(3 * s)] = a + e, b + f, c + g, d + h
            v[i + _U(4 * s)], v[i + _U(5 * s)] = a - e, b - f
            v[i + _U(6 * s)], v[i + _U(7 * s)] = c - g, d - h


@njit(inline="always")
def _radix4(v: Any, s: Any) -> None:
    """Add and subtract elements that lie s, then 2 s apart; only the first in 2 s elements."""
    for group in range(v.size // (4 * s)):
        for j in range(s):
            i = _U(4 * s * group) + _U(j)
            a, b, c, d = v[i], v[i + _U(s)], v[i + _U(2 * s)], v[i + _U(3 * s)]
            a, b, c, d = a + b, a - b, c + d, c - d
            v[i], v[i + _U(s)], v[i + _U(2 * s)], v[i + _U(3 * s)] = a + c, b + d, a - c, b - d
    if v.size == 2 * s:
        for j in range(s):
            i = _U(j)
            v[i], v[i + _U(s)] = v[i] + v[i + _U(s)], v[i] - v[i + _U(s)]
