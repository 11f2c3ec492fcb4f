"""Which compressors there are as JAX's own operations."""

from __future__ import annotations

import jax.numpy as jnp

from ringlet.compressors import BF16, FP16, Compressor, NoCompression
from ringlet.compressors.modifiers.hadamard import Hadamard
from ringlet.compressors.quantizers.natural import Natural
from ringlet.compressors.quantizers.onebit import OneBit
from ringlet.compressors.quantizers.quantize import QSGD, MaxNorm
from ringlet.compressors.quantizers.terngrad import TernGrad
from ringlet.compressors.sparsifiers.blocktopk import BlockTopK
from ringlet.jax.sharded.array_codecs import (
    ArrayCodec,
    BucketCodes,
    Largest,
    Plain,
    Rotated,
    SignBits,
)
from ringlet.jax.sharded.random_codecs import PowersOfTwo, Ternary

SUPPORTED = (
    "none, fp16, bf16, int8, int4, maxnorm, qsgd, natural, terngrad, onebit, block_topk (32 and 16 "
    "bits), powersgd, hadamard and ef"
)


def codec_for(compressor: Compressor) -> ArrayCodec:
    """Return what does as ``compressor`` does, without error feedback and rounds.

    Raises ValueError for one that is not written in JAX's operations, or for such options.
    """
    kind = type(compressor)
    if kind is NoCompression:
        return Plain(jnp.float32)
    if kind is FP16:
        return Plain(jnp.float16)
    if kind is BF16:
        return Plain(jnp.bfloat16)
    if isinstance(compressor, MaxNorm | QSGD):
        return BucketCodes(compressor)
    if isinstance(compressor, Natural):
        return PowersOfTwo(compressor)
    if isinstance(compressor, TernGrad):
        return Ternary(compressor)
    if isinstance(compressor, OneBit) and kind is OneBit:
        return SignBits(compressor)
    if isinstance(compressor, BlockTopK) and compressor.bits >= 16 and not compressor.dct:
        return Largest(compressor)
    if isinstance(compressor, Hadamard):
        inner = codec_for(compressor.wrapped_compressor)
        if not inner.adds:
            return Rotated(inner, compressor.block)
    raise ValueError(
        f"compression={str(compressor)!r} is not there as operations of JAX's. There are "
        f"{SUPPORTED}; others are for reduce_gradients"
    )
