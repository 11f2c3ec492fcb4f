"""Horovod's names for compressors, beside spec strings."""

from __future__ import annotations

from typing import Any

import torch

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
    def compress(tensor: torch.Tensor) -> tuple[torch.Tensor, Any]:
        """Return the tensor as float16, and its dtype."""
        return (tensor.half() if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Return the tensor in the dtype that it had."""
        return tensor.to(ctx)


class Compression:
    """``Compression.none`` and ``Compression.fp16``, as in Horovod; specs do the same and more."""

    none = NoneCompressor
    fp16 = FP16Compressor
