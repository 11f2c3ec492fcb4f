"""Horovod's names for compressors, beside spec strings."""

from __future__ import annotations

from typing import Any

from ringlet.compressors import FP16
from ringlet.shared.compression import Compressor, NoneCompressor, as_compressor, as_router, legacy

__all__ = [
    "Compression",
    "Compressor",
    "FP16Compressor",
    "NoneCompressor",
    "as_compressor",
    "as_router",
    "legacy",
]


class FP16Compressor(Compressor):
    """Floating-point tensors travel as float16: the spec "fp16"."""

    spec = FP16()

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor as float16, and its dtype."""
        from keras import backend, ops

        dtype = backend.standardize_dtype(tensor.dtype)
        return (ops.cast(tensor, "float16") if "float" in dtype else tensor), dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in the dtype that it had."""
        from keras import ops

        return ops.cast(tensor, ctx)


class Compression:
    """``Compression.none`` and ``Compression.fp16``, as in Horovod; specs do the same and more."""

    none = NoneCompressor
    fp16 = FP16Compressor
