"""Top-k sparsification.

Aji and Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017; Stich,
Cordonnier and Jaggi, "Sparsified SGD with memory", NeurIPS 2018.
"""

from __future__ import annotations

import numpy as np

from ringlet.compressors.context import Array, Context
from ringlet.compressors.contract import Compressor, Part, Payload, Traits, exercise
from ringlet.compressors.errors import PayloadError
from ringlet.compressors.options import option
from ringlet.compressors.registry import register


@register("topk")
class TopK(Compressor):
    """Send the entries of largest magnitude: exactly max(1, floor(ratio * n)) of them.

    Among equals the lowest index wins, so the result is deterministic. NaN counts as largest and
    is sent. An entry takes 8 bytes on the wire. Use it with error feedback: ``topk | ef``.
    """

    ratio: float = option(0.01, gt=0, le=1, doc="share of the entries that travel")

    def count(self, n: int) -> int:
        """Return how many of ``n`` entries travel."""
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
        xp, n, k = ctx.xp, x.size, self.count(x.size)
        if n == 0:
            return {"indices": xp.empty(0, "uint32"), "values": x.copy()}
        # Without its sign a float's bits order like its magnitude, NaN on top.
        bits = x.view("uint32") & 0x7FFFFFFF
        threshold = xp.partition(bits, n - k)[n - k]
        above = xp.flatnonzero(bits > threshold)
        equal = xp.flatnonzero(bits == threshold)[: k - above.size]
        indices = xp.sort(xp.concatenate([above, equal])).astype("uint32")
        return {"indices": indices, "values": x[indices]}

    def decompress(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Put the values at their places among zeros."""
        indices, values = payload["indices"], payload["values"]
        if ctx.xp is not np:
            out[...] = 0
            out[indices] = values
            return
        from ringlet.compressors.kernels import select

        _inside(select.scatter(indices, values, out), out)

    def encode_into(self, x: Array, payload: Payload, ctx: Context) -> None:
        """Select without a sort, in one pass in the usual case."""
        if ctx.xp is not np or x.size == 0:
            return super().encode_into(x, payload, ctx)
        from ringlet.compressors.kernels import select

        candidates = ctx.workspace.array("candidates", x.size, np.uint32)
        select.topk(x, payload["values"].size, candidates, payload["indices"], payload["values"])
        return None

    def feedback_into(
        self, x: Array, residual: Array, decay: float, payload: Payload, ctx: Context
    ) -> None:
        """Add the residual, select, and keep everything not sent."""
        if ctx.xp is not np or x.size == 0:
            return super().feedback_into(x, residual, decay, payload, ctx)
        from ringlet.compressors.kernels import select

        target = ctx.workspace.array("feedback", x.size)
        select.add_residual(x, residual, np.float32(decay), target)
        self.encode_into(target, payload, ctx)
        select.drop_selected(target, payload["indices"], residual)
        return None

    def accumulate(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Add the values at their places."""
        if ctx.xp is not np:
            out[payload["indices"]] += payload["values"]
            return
        from ringlet.compressors.kernels import select

        _inside(select.scatter_add(payload["indices"], payload["values"], out), out)

    def warm_up(self, ctx: Context) -> None:
        """Compile the kernels."""
        exercise(self, ctx)


def _inside(ok: bool, out: Array) -> None:
    if not ok:
        raise PayloadError(f"topk received an index beyond the tensor's {out.size} elements")
