"""Casts between float32 and the two half precisions; half arrays are uint16 views."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit

from ringlet.compressors.kernels.cpu.common.intrinsics import (
    bf16_to_f32,
    f16_to_f32,
    f32_to_bf16,
    f32_to_f16,
    is_finite,
    pointer,
)
from ringlet.ring.jit import jit


class Casts(NamedTuple):
    """The kernels of one half precision: a codec's four, three that multiply, three for many.

    Those for many tensors are for ``batch_encoder`` and ``batch_decoder`` of
    ``kernels.cpu.common.batched``, without options.
    """

    encode: Any  # (x, out)
    encode_feedback: Any  # (x, residual, decay, out)
    decode: Any  # (bits, out)
    accumulate: Any  # (bits, out): out += bits
    widen: Any  # (bits, factor, out): out = factor * bits
    narrow: Any  # (x, factor, out): the same from float32 to half precision
    rescale: Any  # (bits, factor, out): the same from half precision to half precision, or in place
    encode_placed: Any  # (x, residual, decay, key, start, places, options)
    encode_feedback_placed: Any  # the same
    decode_placed: Any  # (places, add, out, options)


@njit(inline="always")
def _narrow(value: Any, half: bool) -> Any:
    return f32_to_f16(value) if half else f32_to_bf16(value)


@njit(inline="always")
def _widen(bits: Any, half: bool) -> Any:
    return f16_to_f32(bits) if half else bf16_to_f32(bits)


def _family(half: bool) -> Casts:
    """Make the kernels of float16 if ``half``, else of bfloat16."""

    @jit
    def encode(x: Any, out: Any) -> None:
        for i in range(x.size):
            out[i] = _narrow(x[i], half)

    @jit
    def encode_feedback(x: Any, residual: Any, decay: Any, out: Any) -> None:
        for i in range(x.size):
            target = x[i] + decay * residual[i]
            bits = _narrow(target, half)
            lost = target - _widen(bits, half)
            out[i] = bits
            residual[i] = lost if is_finite(lost) else residual[i]

    @jit
    def decode(bits: Any, out: Any) -> None:
        for i in range(bits.size):
            out[i] = _widen(bits[i], half)

    @jit
    def accumulate(bits: Any, out: Any) -> None:
        for i in range(bits.size):
            out[i] += _widen(bits[i], half)

    @jit
    def widen(bits: Any, factor: Any, out: Any) -> None:
        for i in range(bits.size):
            out[i] = factor * _widen(bits[i], half)

    @jit
    def narrow(x: Any, factor: Any, out: Any) -> None:
        for i in range(x.size):
            out[i] = _narrow(factor * x[i], half)

    @jit
    def rescale(bits: Any, factor: Any, out: Any) -> None:
        if bits.ctypes.data == out.ctypes.data:  # compilers use vectors if it has one name
            for i in range(out.size):
                out[i] = _narrow(factor * _widen(out[i], half), half)
        else:
            for i in range(out.size):
                out[i] = _narrow(factor * _widen(bits[i], half), half)

    @njit(inline="always")
    def encode_placed(
        x: Any, residual: Any, decay: Any, key: Any, start: Any, places: Any, options: Any
    ) -> None:
        encode(x, carray(pointer(places[1]), x.size, np.uint16))

    @njit(inline="always")
    def encode_feedback_placed(
        x: Any, residual: Any, decay: Any, key: Any, start: Any, places: Any, options: Any
    ) -> None:
        encode_feedback(x, residual, decay, carray(pointer(places[1]), x.size, np.uint16))

    @njit(inline="always")
    def decode_placed(places: Any, add: bool, out: Any, options: Any) -> bool:
        bits = carray(pointer(places[1]), out.size, np.uint16)
        if add:
            accumulate(bits, out)
        else:
            decode(bits, out)
        return True

    return Casts(
        encode, encode_feedback, decode, accumulate, widen, narrow, rescale,
        encode_placed, encode_feedback_placed, decode_placed,
    )  # fmt: skip


f16 = _family(True)
bf16 = _family(False)
