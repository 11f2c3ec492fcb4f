"""Casts between float32 and the two half precisions; half arrays are uint16 views."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray, njit, types

from ringlet.compressors.kernels.cpu.common.intrinsics import (
    bf16_to_f32,
    f16_to_f32,
    f32_to_bf16,
    f32_to_f16,
    is_finite,
    pointer,
)


class Casts(NamedTuple):
    """The kernels of one half precision: a codec's four, three that multiply, three for many.

    Those for many tensors take tables of addresses as ``batch_encoder`` and ``batch_decoder`` of
    ``kernels.cpu.quantizers.quantize`` do. Nothing is checked.
    """

    encode: Any  # (x, out)
    encode_feedback: Any  # (x, residual, decay, out)
    decode: Any  # (bits, out)
    accumulate: Any  # (bits, out): out += bits
    widen: Any  # (bits, factor, out): out = factor * bits
    narrow: Any  # (x, factor, out): the same from float32 to half precision
    rescale: Any  # (bits, factor, out): the same from half precision to half precision
    encode_many: Any  # (tensors, payloads, decay)
    encode_feedback_many: Any  # (tensors, payloads, decay)
    decode_many: Any  # (outs, payloads, scale): out = scale * the sum of its payloads


def _family(half: bool) -> Casts:
    """Make the kernels of float16 if ``half``, else of bfloat16."""
    # What a cached kernel closes over must be plain values: dispatchers differ between processes.

    @njit(nogil=True, cache=True)
    def encode(x: Any, out: Any) -> None:
        for i in range(x.size):
            out[i] = f32_to_f16(x[i]) if half else f32_to_bf16(x[i])

    @njit(nogil=True, cache=True)
    def encode_feedback(x: Any, residual: Any, decay: Any, out: Any) -> None:
        for i in range(x.size):
            target = x[i] + decay * residual[i]
            bits = f32_to_f16(target) if half else f32_to_bf16(target)
            lost = target - (f16_to_f32(bits) if half else bf16_to_f32(bits))
            out[i] = bits
            residual[i] = lost if is_finite(lost) else residual[i]

    @njit(nogil=True, cache=True)
    def decode(bits: Any, out: Any) -> None:
        for i in range(bits.size):
            out[i] = f16_to_f32(bits[i]) if half else bf16_to_f32(bits[i])

    @njit(nogil=True, cache=True)
    def accumulate(bits: Any, out: Any) -> None:
        for i in range(bits.size):
            out[i] += f16_to_f32(bits[i]) if half else bf16_to_f32(bits[i])

    @njit(nogil=True, cache=True)
    def widen(bits: Any, factor: Any, out: Any) -> None:
        for i in range(bits.size):
            out[i] = factor * (f16_to_f32(bits[i]) if half else bf16_to_f32(bits[i]))

    @njit(nogil=True, cache=True)
    def narrow(x: Any, factor: Any, out: Any) -> None:
        for i in range(x.size):
            out[i] = f32_to_f16(factor * x[i]) if half else f32_to_bf16(factor * x[i])

    @njit(nogil=True, cache=True)
    def rescale(bits: Any, factor: Any, out: Any) -> None:
        for i in range(bits.size):
            x = factor * (f16_to_f32(bits[i]) if half else bf16_to_f32(bits[i]))
            out[i] = f32_to_f16(x) if half else f32_to_bf16(x)

    @njit(nogil=True, cache=True)
    def encode_many(tensors: Any, payloads: Any, decay: Any) -> None:
        for t in range(payloads.shape[0]):
            n = types.intp(payloads[t, 0])
            x = carray(pointer(tensors[t, 0]), n, np.float32)
            out = carray(pointer(payloads[t, 1]), n, np.uint16)
            for i in range(n):
                out[i] = f32_to_f16(x[i]) if half else f32_to_bf16(x[i])

    @njit(nogil=True, cache=True)
    def encode_feedback_many(tensors: Any, payloads: Any, decay: Any) -> None:
        for t in range(payloads.shape[0]):
            n = types.intp(payloads[t, 0])
            x = carray(pointer(tensors[t, 0]), n, np.float32)
            residual = carray(pointer(tensors[t, 1]), n, np.float32)
            out = carray(pointer(payloads[t, 1]), n, np.uint16)
            for i in range(n):
                target = x[i] + decay * residual[i]
                bits = f32_to_f16(target) if half else f32_to_bf16(target)
                lost = target - (f16_to_f32(bits) if half else bf16_to_f32(bits))
                out[i] = bits
                residual[i] = lost if is_finite(lost) else residual[i]

    @njit(nogil=True, cache=True)
    def decode_many(outs: Any, payloads: Any, scale: Any) -> None:
        for t in range(outs.size):
            n = types.intp(payloads[0, t, 0])
            out = carray(pointer(outs[t]), n, np.float32)
            for rank in range(payloads.shape[0]):
                bits = carray(pointer(payloads[rank, t, 1]), n, np.uint16)
                if rank == 0:
                    for i in range(n):
                        out[i] = f16_to_f32(bits[i]) if half else bf16_to_f32(bits[i])
                else:
                    for i in range(n):
                        out[i] += f16_to_f32(bits[i]) if half else bf16_to_f32(bits[i])
            if scale != types.float32(1.0):
                for i in range(n):
                    out[i] *= scale

    return Casts(
        encode, encode_feedback, decode, accumulate, widen, narrow, rescale,
        encode_many, encode_feedback_many, decode_many,
    )  # fmt: skip


f16 = _family(True)
bf16 = _family(False)
