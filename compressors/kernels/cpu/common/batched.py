"""Kernels for many tensors a call, made of kernels for one."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numba import carray, njit, types

from ringlet.compressors.kernels.cpu.common.intrinsics import pointer
from ringlet.ring.jit import jit


@cache
def batch_encoder(encode: Any) -> Any:
    """Return the kernel ``encode(tensors, payloads, decay, options)``, a loop around ``encode``.

    Rows of ``tensors`` (uint64) tell where values and the residual lie (0: there is none), the key,
    and the counter of the first value; those of ``payloads`` how many values there are, and where
    the payload's arrays lie. ``encode(x, residual, decay, key, start, places, options)`` encodes
    one tensor, whose row of ``payloads`` it is given as ``places``. Nothing is checked.
    """

    @jit
    def encode_many(tensors: Any, payloads: Any, decay: Any, options: Any) -> None:
        for t in range(payloads.shape[0]):
            n = types.intp(payloads[t, 0])
            x = carray(pointer(tensors[t, 0]), n, np.float32)
            residual = carray(pointer(tensors[t, 1]), n if tensors[t, 1] else 0, np.float32)
            key, start = tensors[t, 2], types.intp(tensors[t, 3])
            encode(x, residual, decay, key, start, payloads[t], options)

    return encode_many


@cache
def batch_decoder(decode: Any) -> Any:
    """Return the kernel ``decode(outs, payloads, scale, options)``, a loop around ``decode``.

    ``outs`` (uint64) tells where each output lies, which becomes ``scale`` times the sum of its
    payloads; ``payloads`` has rows as in ``batch_encoder``, for one rank after another.
    ``decode(places, add, out, options)`` decodes one payload, and adds to ``out`` or overwrites it;
    where it returns False, so does the kernel, at once. Nothing else is checked.
    """

    @jit
    def decode_many(outs: Any, payloads: Any, scale: Any, options: Any) -> bool:
        for t in range(outs.size):
            out = carray(pointer(outs[t]), types.intp(payloads[0, t, 0]), np.float32)
            for rank in range(payloads.shape[0]):
                if not decode(payloads[rank, t], rank > 0, out, options):
                    return False
            if scale != types.float32(1.0):
                for i in range(out.size):
                    out[i] *= scale
        return True

    return decode_many


@cache
def packed_encoder(encode: Any) -> Any:
    """Return ``encode`` of ``base.packed_codec`` for ``batch_encoder``.

    Options are the bits of a code, the bucket, and the parameter.
    """

    @njit(inline="always")
    def encode_placed(
        x: Any, residual: Any, decay: Any, key: Any, start: Any, places: Any, options: Any
    ) -> None:
        bits, bucket, parameter = options
        codes = carray(pointer(places[1]), (x.size * bits + 7) // 8, np.uint8)
        scales = carray(pointer(places[2]), (x.size + bucket - 1) // bucket, np.uint16)
        encode(x, residual, decay, bucket, parameter, key, start, codes, scales)

    return encode_placed


@cache
def packed_decoder(decode: Any) -> Any:
    """Return ``decode`` of ``base.packed_codec`` for ``batch_decoder``; options as there."""

    @njit(inline="always")
    def decode_placed(places: Any, add: bool, out: Any, options: Any) -> bool:
        bits, bucket, _ = options
        codes = carray(pointer(places[1]), (out.size * bits + 7) // 8, np.uint8)
        scales = carray(pointer(places[2]), (out.size + bucket - 1) // bucket, np.uint16)
        decode(codes, scales, bucket, add, out)
        return True

    return decode_placed


@cache
def scaled_encoder(encode: Any) -> Any:
    """Return ``encode`` of ``base.block_scaled`` for ``batch_encoder``.

    Options are the bits of a code, and the block.
    """

    @njit(inline="always")
    def encode_placed(
        x: Any, residual: Any, decay: Any, key: Any, start: Any, places: Any, options: Any
    ) -> None:
        bits, block = options
        codes = carray(pointer(places[1]), (x.size * bits + 7) // 8, np.uint8)
        scales = carray(pointer(places[2]), (x.size + block - 1) // block, np.uint8)
        encode(x, residual, decay, key, start, codes, scales)

    return encode_placed


@cache
def scaled_decoder(write: Any, add_to: Any) -> Any:
    """Return ``decode`` of ``base.block_scaled``, which writes and which adds, for many tensors."""

    @njit(inline="always")
    def decode_placed(places: Any, add: bool, out: Any, options: Any) -> bool:
        bits, block = options
        codes = carray(pointer(places[1]), (out.size * bits + 7) // 8, np.uint8)
        scales = carray(pointer(places[2]), (out.size + block - 1) // block, np.uint8)
        if add:
            add_to(codes, scales, out)
        else:
            write(codes, scales, out)
        return True

    return decode_placed


__all__ = [
    "batch_decoder",
    "batch_encoder",
    "packed_decoder",
    "packed_encoder",
    "scaled_decoder",
    "scaled_encoder",
]
