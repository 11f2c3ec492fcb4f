"""Top-k sparsification.

Aji and Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017; Stich,
Cordonnier and Jaggi, "Sparsified SGD with memory", NeurIPS 2018.
"""

from __future__ import annotations

import numpy as np

from ringlet.compressors.base.contract import Compressor, Part, Payload, Traits
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.lengths import check_countable
from ringlet.compressors.core.multitensor import MultiTensor, keeps
from ringlet.compressors.core.options import option
from ringlet.compressors.sparsifiers.selection import largest_on_device, selections_on_device
from ringlet.compressors.sparsifiers.threshold import Selection, largest_array, largest_into
from ringlet.compressors.specs.registry import register


@register("topk")
class TopK(Selection):
    """Send the entries of largest magnitude: exactly max(1, floor(ratio * n)) of them.

    Among equals the lowest index wins, so the result is deterministic. NaN counts as largest and
    is sent. An entry takes 8 bytes on the wire. Use it with error feedback: ``topk | ef``.
    """

    ratio: float = option(0.01, gt=0, le=1, doc="share of the entries that travel")

    def count(self, n: int) -> int:
        """Return how many of ``n`` entries travel."""
        check_countable(self.label(), n)
        # The smallest nudge, so that 0.29 * 100 is 29 in spite of binary fractions.
        return min(n, max(1, int(n * self.ratio * (1 + 1e-12))))

    def traits(self) -> Traits:
        """Contracts: what stays behind is at most a share 1 - k/n of the energy."""
        return Traits(fixed_size=True)

    def layout(self, n: int) -> tuple[Part, ...]:
        """k indices and k values."""
        k = self.count(n)
        return (Part("indices", "uint32", k), Part("values", "float32", k))

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Select in array code; the kernel agrees with it entry for entry."""
        return largest_array(x, self.count(x.size), ctx)

    def encode_into(self, x: Array, payload: Payload, ctx: Context) -> None:
        """Select without a sort, in one pass in the usual case."""
        if self.selects_on_device(x, None, 1.0, payload, ctx):
            return
        if ctx.xp is not np or x.size == 0:
            super().encode_into(x, payload, ctx)
            return
        largest_into(x, payload, ctx)

    def feedback_into(
        self, x: Array, residual: Array, decay: float, payload: Payload, ctx: Context
    ) -> None:
        """Add to the residual and select in one pass; forget there what is sent."""
        if ctx.xp is np and x.size:
            largest_into(x, payload, ctx, residual, decay)
        else:
            super().feedback_into(x, residual, decay, payload, ctx)

    def multi_tensor(self, ctx: Context) -> MultiTensor | None:
        """The CUDA kernels, if there are any."""
        own = (
            keeps(self, TopK, "encode_into", "feedback_into", "selects_on_device")
            and keeps(self, Selection, "decompress", "accumulate")
            and keeps(self, Compressor, "sum_into")
        )
        return selections_on_device(ctx) if own else None

    def selects_on_device(
        self, x: Array, residual: Array | None, decay: float, payload: Payload, ctx: Context
    ) -> bool:
        """Select with CUDA kernels, if there are any."""
        return largest_on_device(x, residual, decay, payload, ctx)
