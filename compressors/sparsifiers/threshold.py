"""Sparsification by a threshold; the base of compressors that send as many entries as it takes.

How many that are is known where the values are: on a GPU, the host waits for it, once a tensor.

Strom, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech 2015.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from ringlet.compressors.base.contract import Compressor, Payload, Traits, exercise
from ringlet.compressors.base.feedback import advance, on_device
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.errors import CompressorError, PayloadError
from ringlet.compressors.core.lengths import check_countable, check_entries, check_lengths
from ringlet.compressors.core.multitensor import Varying, keeps
from ringlet.compressors.core.options import option
from ringlet.compressors.core.pool import run_ranges
from ringlet.compressors.sparsifiers.selection import reaching_many_on_device, reaching_on_device
from ringlet.compressors.specs.registry import register

if TYPE_CHECKING:
    from ringlet.compressors.kernels.cuda.sparsifiers.threshold import Sought

_NOTHING = np.empty(0, np.float32)


class Selection(Compressor):
    """Base of compressors that send indices (uint32, ascending) and values of some entries."""

    def traits(self) -> Traits:
        """Return that the payload's size depends on the values."""
        return Traits()

    def decompress(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Put the values at their places among zeros."""
        indices, values = check_entries(self.label(), payload)
        if ctx.xp is not np:
            out[...] = 0
            if not on_device("scatter", ctx, out, a=values, indices=indices):
                out[indices] = values
            return
        from ringlet.compressors.kernels.cpu.sparsifiers import threshold as sparse

        self._inside(sparse.scatter(indices, values, out), out)

    def accumulate(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Add the values at their places."""
        indices, values = check_entries(self.label(), payload)
        if ctx.xp is not np:
            if not on_device("scatter_add", ctx, out, a=values, indices=indices):
                out[indices] += values
            return
        from ringlet.compressors.kernels.cpu.sparsifiers import threshold as sparse

        self._inside(sparse.scatter_add(indices, values, out), out)

    def feedback_into(
        self, x: Array, residual: Array, decay: float, payload: Payload, ctx: Context
    ) -> None:
        """Add to the residual, select, and forget there what is sent."""
        if self.selects_on_device(x, residual, decay, payload, ctx):
            return
        if ctx.xp is not np:
            super().feedback_into(x, residual, decay, payload, ctx)
            return
        self.encode_into(advance(x, residual, decay, ctx), payload, ctx)
        self._forget(payload, residual)

    def selects_on_device(
        self, x: Array, residual: Array | None, decay: float, payload: Payload, ctx: Context
    ) -> bool:
        """Do all of it with CUDA kernels, if there are any for these arrays."""
        return False

    def compress_feedback(self, x: Array, residual: Array, decay: float, ctx: Context) -> Payload:
        """Do the same for payloads of variable size."""
        if ctx.xp is not np:
            found = self.compress_on_device(x, residual, decay, ctx)
            return super().compress_feedback(x, residual, decay, ctx) if found is None else found
        payload = self.compress(advance(x, residual, decay, ctx), ctx)
        self._forget(payload, residual)
        return payload

    def compress_on_device(
        self, x: Array, residual: Array | None, decay: float, ctx: Context
    ) -> Payload | None:
        """Do all of it with CUDA kernels; None if there are none for these arrays."""
        return None

    def scatters(self) -> bool:
        """Whether payloads are decoded here, and not by a subclass in its own way."""
        own = keeps(self, Selection, "compress_feedback", "decompress", "accumulate")
        return own and keeps(self, Compressor, "sum_into")

    def _forget(self, payload: Payload, residual: Array) -> None:
        from ringlet.compressors.kernels.cpu.common import feedback

        feedback.forget(payload["indices"], payload["values"], residual)

    def _inside(self, ok: bool, out: Array) -> None:
        if not ok:
            raise PayloadError(
                f"{self.label()} received an index beyond the tensor's {out.size} elements"
            )

    def warm_up(self, ctx: Context) -> None:
        """Compile the kernels."""
        exercise(self, ctx)
        if ctx.xp is np:
            x = ctx.xp.ones(64, "float32")
            reaching(x, 0, ctx)
            largest(x, 1, ctx)


@register("threshold")
class Threshold(Selection):
    """Send the entries with a magnitude of at least ``value``, but at most a share ``cap``.

    Strom, Interspeech 2015, with exact values. Where more qualify than the cap allows, the largest
    of them travel. Takes 8 bytes for an entry; how many there are varies, so that a good ``value``
    has to be known, in units of the gradient (a loss scale included). NaN and Inf are sent.
    Use it with error feedback: ``threshold | ef``.
    """

    value: float = option(1e-3, gt=0, doc="smallest magnitude that travels")
    cap: float = option(1.0, gt=0, le=1, doc="largest share of the entries that travels")

    def traits(self) -> Traits:
        """Those of a selection, which depends on the size of the values here."""
        return dataclasses.replace(super().traits(), scales=False)

    def limit(self, n: int) -> int:
        """Return how many of ``n`` entries travel at most."""
        check_countable(self.label(), n)
        return min(n, max(1, int(n * self.cap * (1 + 1e-12))))

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Select in one pass."""
        limit = self.limit(x.size)
        if ctx.xp is not np:
            found = self.compress_on_device(x, None, 1.0, ctx)
            return self.reference(x, ctx) if found is None else found
        indices = reaching(x, magnitude_bits(self.value), ctx)
        if indices.size <= limit:
            return {"indices": indices, "values": x[indices]}
        return largest(x, limit, ctx)

    def compress_on_device(
        self, x: Array, residual: Array | None, decay: float, ctx: Context
    ) -> Payload | None:
        """Select with CUDA kernels, if there are any, in one pass over memory."""
        if ctx.xp is np:
            return None
        return reaching_on_device(self.sought(x, residual, ctx), decay, ctx)

    def sought(self, x: Array, residual: Array | None, ctx: Context) -> Sought:
        """Return what CUDA kernels are to select."""
        from ringlet.compressors.kernels.cuda.sparsifiers.threshold import Given, Sought

        with np.errstate(over="ignore"):
            aim = Given(float(np.float32(self.value)))
        return Sought(x, self.limit(x.size), aim, residual)

    def multi_varying(self, ctx: Context) -> Varying | None:
        """The CUDA kernels, if there are any."""
        own = keeps(self, Threshold, "compress", "compress_on_device") and self.scatters()
        return reaching_many_on_device(self.sought, self.limit, ctx) if own else None

    def reference(self, x: Array, ctx: Context) -> Payload:
        """Do the same in array code."""
        xp = ctx.xp
        bits = x.view("uint32") & 0x7FFFFFFF
        indices = xp.flatnonzero(bits >= magnitude_bits(self.value)).astype("uint32")
        if indices.size <= self.limit(x.size):
            return {"indices": indices, "values": x[indices]}
        return largest_array(x, self.limit(x.size), ctx)


def magnitude_bits(value: float) -> int:
    """Return the bits of a threshold; one beyond float32 is infinity, which Inf and NaN reach."""
    with np.errstate(over="ignore"):
        return int(np.float32(value).view(np.uint32)) & 0x7FFFFFFF


def reaching(x: Array, threshold: int, ctx: Context) -> Array:
    """Return the indices (uint32, ascending) of magnitudes with bits of at least ``threshold``."""
    from ringlet.compressors.kernels.cpu.sparsifiers import threshold as sparse

    scratch = ctx.workspace.array("candidates", x.size, np.uint32)
    counts: dict[int, int] = {}

    def collect(start: int, stop: int) -> None:
        counts[start] = sparse.collect(x[start:stop], threshold, start, scratch[start:stop])

    run_ranges(x.size, 1, collect)
    # A copy: what is returned travels after the scratch array has been used again.
    return np.concatenate([scratch[start : start + counts[start]] for start in sorted(counts)])


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
    from ringlet.compressors.kernels.cpu.sparsifiers import topk as select

    indices, values = check_entries("the largest entries", payload)
    n, k = x.size, values.size
    check_lengths("the largest entries", n, residual=residual)
    if k > n:
        raise CompressorError(f"{k} entries cannot be the largest of {n}")
    if k == 0:
        return
    feedback, weight = residual is not None, np.float32(decay)
    held = _NOTHING if residual is None else residual  # not x, which may be read-only
    listed = ctx.workspace.array("candidates", n, np.uint32)
    found = ctx.workspace.array("magnitudes", n, np.int32)
    sample = ctx.workspace.array("sample", select.SAMPLE, np.int32)
    floor = select.sampled_floor(x, held, weight, feedback, k, sample)
    counts: dict[int, int] = {}

    def collect(start: int, stop: int) -> None:
        at = slice(start, stop)
        counts[start] = select.collect(
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
        infinite = listed[:count][found[:count] >= select.INFINITE]
        np.bitwise_and((held if feedback else x).view(np.int32), 0x7FFFFFFF, out=found)
        if feedback:  # the residual took no part in those
            with np.errstate(invalid="ignore", over="ignore"):
                sums = x[infinite] + weight * held[infinite]
            found[infinite] = sums.view(np.int32) & 0x7FFFFFFF
        listed[:] = np.arange(n, dtype=np.uint32)
        count = n
    select.take(x, held, weight, feedback, listed[:count], found[:count], indices, values)


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
