"""Top-k sparsification.

Aji and Heafield, "Sparse communication for distributed gradient descent", EMNLP 2017; Stich,
Cordonnier and Jaggi, "Sparsified SGD with memory", NeurIPS 2018.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from ringlet.compressors.base.batched import Batched
from ringlet.compressors.base.contract import Compressor, Part, Payload, Traits, keeps
from ringlet.compressors.base.cuda_device import device_for
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.errors import CompressorError
from ringlet.compressors.core.lengths import check_countable, check_entries, check_lengths
from ringlet.compressors.core.multitensor import MultiTensor
from ringlet.compressors.core.options import option
from ringlet.compressors.core.read_only import unlocked
from ringlet.compressors.core.threads import run_ranges
from ringlet.compressors.sparsifiers.selection import Selection
from ringlet.compressors.specs.registry import register

_NOTHING = np.empty(0, np.float32)


@register("topk")
class TopK(Selection):
    """Send the entries of largest magnitude: exactly max(1, floor(ratio * n)) of them.

    Among equals the lowest index wins, so the result is deterministic. NaN counts as largest and
    is sent. An entry takes 8 bytes on the wire. Use it with error feedback: ``topk | ef``.
    """

    paper: ClassVar[str] = "Aji, EMNLP 2017"
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
        return selections_on_device(ctx) if self._selects() else None

    def batched(self) -> Batched | None:
        """The kernels for many tensors a call."""
        if not self._selects() or not keeps(self, TopK, "count", "layout"):
            return None
        from ringlet.compressors.kernels.cpu.common.batched import batch_decoder
        from ringlet.compressors.kernels.cpu.sparsifiers import topk as kernels

        ratio, decode = self.ratio, batch_decoder(kernels.decode_placed)
        return Batched(
            self.label,
            self.layout,
            ("indices", "values"),
            lambda *tables: kernels.encode_many(*tables, ratio, False),
            lambda *tables: kernels.encode_many(*tables, ratio, True),
            lambda *tables: decode(*tables, (ratio,)),
        )

    def _selects(self) -> bool:
        """Whether entries are selected and put in their places here, and not by a subclass."""
        return (
            keeps(self, TopK, "encode_into", "feedback_into", "selects_on_device")
            and keeps(self, Selection, "decompress", "accumulate")
            and keeps(self, Compressor, "sum_into")
        )

    def selects_on_device(
        self, x: Array, residual: Array | None, decay: float, payload: Payload, ctx: Context
    ) -> bool:
        """Select with CUDA kernels, if there are any."""
        return largest_on_device(x, residual, decay, payload, ctx)


def largest(x: Array, k: int, ctx: Context) -> Payload:
    """Return exactly the ``k`` entries of largest magnitude, the lowest index among equals."""
    payload = {"indices": np.empty(k, np.uint32), "values": np.empty(k, np.float32)}
    largest_into(x, payload, ctx)
    return payload


def largest_into(
    x: Array, payload: Payload, ctx: Context, residual: Array | None = None, decay: float = 1.0
) -> None:
    """Do the same with as many entries as ``payload`` has room for. CPU only.

    With a ``residual`` they are those of x + decay * residual; the residual keeps the others.
    """
    from ringlet.compressors.kernels.cpu.common.vectors import WIDTH
    from ringlet.compressors.kernels.cpu.sparsifiers import topk as kernels

    indices, values = check_entries("the largest entries", payload)
    n, k, x = x.size, values.size, unlocked(x)
    check_lengths("the largest entries", n, residual=residual)
    if k > n:
        raise CompressorError(f"{k} entries cannot be the largest of {n}")
    if k == 0:
        return
    feedback, weight = residual is not None, np.float32(decay)
    held = _NOTHING if residual is None else residual  # not x, which may be read-only
    listed = ctx.workspace.array("candidates", n, np.uint32)
    found = ctx.workspace.array("magnitudes", n, np.int32)
    sample = ctx.workspace.array("sample", kernels.SAMPLE, np.int32)
    floor = kernels.sampled_floor(x, held, weight, feedback, k, sample)
    counts: dict[int, int] = {}

    def collect(start: int, stop: int) -> None:
        at = slice(start, stop)
        counts[start] = kernels.collect(
            x[at], held[at], weight, feedback, start, floor, listed[at], found[at]
        )

    run_ranges(n, WIDTH, collect)
    count = 0
    for start, more in sorted(counts.items()):
        if start != count:
            listed[count : count + more] = listed[start : start + more]
            found[count : count + more] = found[start : start + more]
        count += more
    if count < k:  # the sample was misleading
        infinite = listed[:count][found[:count] >= kernels.INFINITE]
        np.bitwise_and((held if feedback else x).view(np.int32), 0x7FFFFFFF, out=found)
        if feedback:  # the residual took no part in those
            with np.errstate(invalid="ignore", over="ignore"):
                sums = x[infinite] + weight * held[infinite]
            found[infinite] = sums.view(np.int32) & 0x7FFFFFFF
        listed[:] = np.arange(n, dtype=np.uint32)
        count = n
    kernels.take(x, held, weight, feedback, listed[:count], found[:count], indices, values)


def largest_array(x: Array, k: int, ctx: Context) -> Payload:
    """Do the same in array code."""
    xp = ctx.xp
    if k == 0:
        return {"indices": xp.empty(0, "uint32"), "values": xp.empty(0, "float32")}
    bits = x.view("uint32") & 0x7FFFFFFF
    threshold = xp.partition(bits, x.size - k)[x.size - k]
    above, equal = bits > threshold, bits == threshold
    chosen = above | equal & (xp.cumsum(equal) <= k - above.sum())
    # Where each goes is counted, not how many there are: nothing waits for a GPU.
    places = xp.where(chosen, xp.cumsum(chosen) - 1, k)
    indices = xp.empty(k + 1, "uint32")
    indices[places] = xp.arange(x.size, dtype="uint32")
    return {"indices": indices[:k], "values": x[indices[:k]]}


def largest_on_device(
    x: Array, residual: Array | None, decay: float, payload: Payload, ctx: Context
) -> bool:
    """Fill ``payload`` with the largest entries by CUDA kernels; False if there are none.

    By a sampled threshold, then by radix; the host learns nothing and waits for nothing.
    """
    if ctx.xp is np:
        return False
    from ringlet.compressors.kernels.cuda.sparsifiers.topk import Selected, largest

    device = device_for(ctx)
    if device is None:
        return False
    tensor = Selected(x, payload["indices"], payload["values"], residual)
    largest(device, [tensor], ctx.workspace.array, decay)
    return True


def selections_on_device(ctx: Context) -> MultiTensor | None:
    """Return the CUDA kernels that select from many tensors at once; None if there are none."""
    if ctx.xp is np:
        return None
    device = device_for(ctx)
    if device is None:
        return None
    from ringlet.compressors.kernels.cuda.sparsifiers.topk import TopKSelections

    return TopKSelections(device)
