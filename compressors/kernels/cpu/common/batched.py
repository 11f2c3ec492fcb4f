"""Kernels for many tensors a call, made of kernels for one: packed codes and a scale per bucket."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, types

from ringlet.compressors.kernels.cpu.common.intrinsics import pointer
from ringlet.ring.jit import jit


@cache
def batch_encoder(encode: Any, feedback: bool) -> Any:
    """Return the kernel ``encode(tensors, payloads, decay, bits, bucket, parameter)``.

    ``encode`` is as in ``base.packed_codec``. Rows of ``tensors`` (uint64) tell where values and
    the residual lie, the key, and the counter of the first value; those of ``payloads`` how many
    values there are, and where codes (uint8) and scales (uint16) lie. Nothing is checked.
    """

    @jit
    def encode_many(
        tensors: Any, payloads: Any, decay: Any, bits: Any, bucket: Any, parameter: Any
    ) -> None:
        for t in range(payloads.shape[0]):
            n = types.intp(payloads[t, 0])
            x = carray(pointer(tensors[t, 0]), n, np.float32)
            residual = carray(pointer(tensors[t, 1]), n if feedback else 0, np.float32)
            codes = carray(pointer(payloads[t, 1]), (n * bits + 7) // 8, np.uint8)
            scales = carray(pointer(payloads[t, 2]), (n + bucket - 1) // bucket, np.uint16)
            key, start = tensors[t, 2], types.intp(tensors[t, 3])
            encode(x, residual, decay, bucket, parameter, key, start, codes, scales)

    return encode_many


@cache
def batch_decoder(decode: Any) -> Any:
    """Return the kernel ``decode(outs, payloads, scale, bits, bucket)``.

    ``outs`` (uint64) tells where each output lies, which becomes ``scale`` times the sum of its
    payloads; ``payloads`` has rows as in ``batch_encoder``, for one rank after another. Nothing is
    checked.
    """

    @jit
    def decode_many(outs: Any, payloads: Any, scale: Any, bits: Any, bucket: Any) -> None:
        for t in range(outs.size):
            n = types.intp(payloads[0, t, 0])
            out = carray(pointer(outs[t]), n, np.float32)
            for rank in range(payloads.shape[0]):
                codes = carray(pointer(payloads[rank, t, 1]), (n * bits + 7) // 8, np.uint8)
                count = (n + bucket - 1) // bucket
                scales = carray(pointer(payloads[rank, t, 2]), count, np.uint16)
                decode(codes, scales, bucket, rank > 0, out)
            if scale != types.float32(1.0):
                for i in range(n):
                    out[i] *= scale

    return decode_many


__all__ = ["batch_decoder", "batch_encoder"]
