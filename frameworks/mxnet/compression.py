"""Horovod's names for compressors, beside spec strings."""

from __future__ import annotations

from typing import Any

import numpy as np

from ringlet.compressors import FP16
from ringlet.shared.compression import Compressor, NoneCompressor

__all__ = ["Compression", "Compressor", "FP16Compressor", "NoneCompressor"]


class FP16Compressor(Compressor):
    """Floating-point tensors travel as float16: the spec "fp16"."""

    spec = FP16()

    @staticmethod
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Return the tensor as float16, and its dtype."""
        floats = np.dtype(tensor.dtype).kind == "f"
        return (tensor.astype("float16") if floats else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Return the tensor in the dtype that it had."""
        return tensor.astype(ctx)


class Compression:
    """``Compression.none`` and ``Compression.fp16``, as in Horovod; specs do the same and more."""

    none = NoneCompressor
    fp16 = FP16Compressor
