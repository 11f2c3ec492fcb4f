"""Sparsification by a threshold.

How many that are is known where the values are: on a GPU, the host waits for it, once a tensor.

Strom, "Scalable distributed DNN training using commodity GPU cloud computing", Interspeech 2015.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from ringlet.compressors.base.batched import Batched
from ringlet.compressors.base.contract import Payload, Traits, keeps
from ringlet.compressors.base.cuda_device import device_for
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.lengths import check_countable
from ringlet.compressors.core.multitensor import Varying
from ringlet.compressors.core.options import option
from ringlet.compressors.core.read_only import unlocked
from ringlet.compressors.core.threads import run_ranges
from ringlet.compressors.sparsifiers.selection import Selection
from ringlet.compressors.sparsifiers.topk import largest, largest_array
from ringlet.compressors.specs.registry import register

if TYPE_CHECKING:
    from ringlet.compressors.kernels.cuda.sparsifiers.threshold import Seek, Sought


@register("threshold")
class Threshold(Selection):
    """Send the entries with a magnitude of at least ``value``, but at most a share ``cap``.

    Strom, Interspeech 2015, with exact values. Where more qualify than the cap allows, the largest
    of them travel. Takes 8 bytes for an entry; how many there are varies, so that a good ``value``
    has to be known, in units of the gradient (a loss scale included). NaN and Inf are sent.
    Use it with error feedback: ``threshold | ef``.
    """

    paper: ClassVar[str] = "Strom, Interspeech 2015"
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

    def batched(self) -> Batched | None:
        """The kernels for many tensors a call."""
        if not keeps(self, Threshold, "compress", "limit"):
            return None
        from ringlet.compressors.kernels.cpu.sparsifiers.threshold import within

        bits = magnitude_bits(self.value)
        return self.batched_selection(within, self.limit, lambda n: (self.limit(n), bits))

    def warm_up(self, ctx: Context) -> None:
        """Compile the kernels, the one included that a cap asks for."""
        super().warm_up(ctx)
        warm_up(ctx)

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


def warm_up(ctx: Context) -> None:
    """Compile what selects on a CPU: what reaches a threshold, and the largest."""
    if ctx.xp is np:
        x = np.ones(64, np.float32)
        reaching(x, 0, ctx)
        largest(x, 1, ctx)


def reaching(x: Array, threshold: int, ctx: Context) -> Array:
    """Return the indices (uint32, ascending) of magnitudes with bits of at least ``threshold``."""
    from ringlet.compressors.kernels.cpu.sparsifiers import threshold as kernels

    scratch, x = ctx.workspace.array("candidates", x.size, np.uint32), unlocked(x)
    counts: dict[int, int] = {}

    def collect(start: int, stop: int) -> None:
        counts[start] = kernels.collect(x[start:stop], threshold, start, scratch[start:stop])

    run_ranges(x.size, 1, collect)
    # A copy: what is returned travels after the scratch array has been used again.
    return np.concatenate([scratch[start : start + counts[start]] for start in sorted(counts)])


def reaching_on_device(sought: Sought, decay: float, ctx: Context) -> Payload | None:
    """Return what reaches a threshold by CUDA kernels; None if there are none. GPU only.

    Waits for the device once: how many entries there are decides what is allocated for them.
    """
    from ringlet.compressors.kernels.cuda.sparsifiers.threshold import reaching

    device = device_for(ctx)
    if device is None:
        return None
    if sought.x.size == 0:
        return {"indices": ctx.xp.empty(0, "uint32"), "values": ctx.xp.empty(0, "float32")}
    found = reaching(device, [sought], ctx.workspace.array, ctx.xp.empty, decay)
    return dict(zip(("indices", "values"), found[0], strict=True))


def reaching_many_on_device(
    seek: Seek, count: Callable[[int], int], ctx: Context
) -> Varying | None:
    """Return the CUDA kernels that do so for many tensors at once; None if there are none."""
    if ctx.xp is np:
        return None
    device = device_for(ctx)
    if device is None:
        return None
    from ringlet.compressors.kernels.cuda.sparsifiers.threshold import ThresholdSelections

    return ThresholdSelections(device, seek, count)
