"""From which size on tensors are compressed."""

from __future__ import annotations

import dataclasses

from ringlet.compressors.base.batched import Batched, BatchedRounds
from ringlet.compressors.base.contract import Traits, keeps
from ringlet.compressors.base.modifier import Modifier
from ringlet.compressors.core.context import Context
from ringlet.compressors.core.multitensor import MultiTensor, Varying
from ringlet.compressors.core.options import option
from ringlet.compressors.specs.registry import register


@register("min_size")
class MinSize(Modifier):
    """Let tensors of fewer than ``elements`` elements travel uncompressed; 0 compresses all."""

    elements: int = option(1024, ge=0, doc="elements from which on a tensor is compressed")

    def multi_tensor(self, ctx: Context) -> MultiTensor | None:
        """The wrapped compressor's kernels."""
        own = keeps(self, Modifier, "encode_into", "decompress", "sum_into")
        return self.wrapped_compressor.multi_tensor(ctx) if own else None

    def batched(self) -> Batched | None:
        """The wrapped compressor's kernels."""
        own = keeps(self, Modifier, "compress", "encode_into", "decompress", "sum_into", "finish")
        return self.wrapped_compressor.batched() if own else None

    def batched_rounds(self) -> BatchedRounds | None:
        """The wrapped compressor's exchanges."""
        own = keeps(self, Modifier, "exchange", "exchange_feedback")
        return self.wrapped_compressor.batched_rounds() if own else None

    def multi_varying(self, ctx: Context) -> Varying | None:
        """The wrapped compressor's kernels."""
        own = keeps(self, Modifier, "compress", "decompress", "sum_into")
        return self.wrapped_compressor.multi_varying(ctx) if own else None

    def traits(self) -> Traits:
        """Return the wrapped traits with this size."""
        return dataclasses.replace(self.wrapped_compressor.traits(), min_size=self.elements)
