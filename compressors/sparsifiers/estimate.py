"""Top-k by an estimated threshold: from a sample, or from a fitted distribution.

Lin et al., "Deep gradient compression", ICLR 2018; Abdelmoniem et al., "An efficient
statistical-based gradient compression technique for distributed training systems" (SIDCo),
MLSys 2021.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from ringlet.compressors.base.batched import Batched
from ringlet.compressors.base.bucketed import lane_sums
from ringlet.compressors.base.contract import Payload, Traits, keeps
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.lengths import check_countable
from ringlet.compressors.core.multitensor import Varying
from ringlet.compressors.core.options import option
from ringlet.compressors.core.read_only import unlocked
from ringlet.compressors.core.rng import squares
from ringlet.compressors.core.threads import run_ranges
from ringlet.compressors.sparsifiers.selection import Selection
from ringlet.compressors.sparsifiers.threshold import (
    magnitude_bits,
    reaching,
    reaching_many_on_device,
    reaching_on_device,
    warm_up,
)
from ringlet.compressors.sparsifiers.topk import largest, largest_array, largest_on_device
from ringlet.compressors.specs.registry import register

if TYPE_CHECKING:
    from ringlet.compressors.kernels.cuda.sparsifiers.threshold import Fit, Sample, Sought

_ATTEMPTS = 10  # as the kernels for many tensors have it, and the chunk
_FIRST = 0.25  # the share that every stage but the last of SIDCo lets through
_CHUNK = 1 << 16  # elements summed in one piece, however many threads there are


class Estimated(Selection):
    """Base: take what reaches an estimated threshold, if that is from 0.8 k to 1.3 k entries.

    If it is fewer, the threshold is lowered by a fifth, at most ten times; if it is more, or still
    fewer, the exact k largest travel. So the entries sent are always the largest ones.
    """

    ratio: float = option(0.01, gt=0, le=1, doc="share of the entries that should travel")

    def count(self, n: int) -> int:
        """Return how many of ``n`` entries should travel, k = ceil(ratio * n)."""
        check_countable(self.label(), n)
        return min(n, math.ceil(n * self.ratio * (1 - 1e-12)))

    def traits(self) -> Traits:
        """Of variable size; contracts like the exact selection of 0.8 k entries."""
        return Traits(delta=0.8 * self.ratio * (1 - 1e-9))

    def estimate(self, x: Array, k: int, ctx: Context, fast: bool) -> float:
        """Return a threshold that about ``k`` of more magnitudes reach; NaN when unknown."""
        raise TypeError(f"{type(self).__name__} estimates nothing")

    def aim(self, n: int, k: int, ctx: Context) -> Sample | Fit | None:
        """Return how CUDA kernels do the same for ``n`` elements; None when it is not worth it."""
        raise TypeError(f"{type(self).__name__} estimates nothing")

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Select with kernels."""
        if ctx.xp is np:
            return self._select(x, ctx, fast=True)
        found = self.compress_on_device(x, None, 1.0, ctx)
        return self.reference(x, ctx) if found is None else found

    def compress_on_device(
        self, x: Array, residual: Array | None, decay: float, ctx: Context
    ) -> Payload | None:
        """Select with CUDA kernels, if there are any: in one pass unless the estimate was poor."""
        if ctx.xp is np:
            return None
        sought = self.sought(x, residual, ctx)
        if sought is not None:
            return reaching_on_device(sought, decay, ctx)
        k = self.count(x.size)
        payload = {"indices": ctx.xp.empty(k, "uint32"), "values": ctx.xp.empty(k, "float32")}
        return payload if largest_on_device(x, residual, decay, payload, ctx) else None

    def sought(self, x: Array, residual: Array | None, ctx: Context) -> Sought | None:
        """Return what CUDA kernels are to select; None: the largest."""
        from ringlet.compressors.kernels.cuda.sparsifiers.threshold import Sought

        n, k = x.size, self.count(x.size)
        aim = self.aim(n, k, ctx) if 0 < k < n else None
        return None if aim is None else Sought(x, k, aim, residual)

    def multi_varying(self, ctx: Context) -> Varying | None:
        """The CUDA kernels, if there are any."""
        own = keeps(self, Estimated, "compress", "compress_on_device") and self.scatters()
        return reaching_many_on_device(self.sought, self.count, ctx) if own else None

    def batched(self) -> Batched | None:
        """The kernels for many tensors a call."""
        found = self.estimator()
        if found is None or not keeps(self, Estimated, "compress", "count", "_select"):
            return None
        select, draws = found
        return self.batched_selection(select, self._most, self.plan, draws)

    def estimator(self) -> tuple[Any, bool] | None:
        """Return what selects one of many tensors, and whether it draws; None: nothing does."""
        return None

    def plan(self, n: int) -> Sequence[float]:
        """Return what that is told about ``n`` elements."""
        raise TypeError(f"{type(self).__name__} plans nothing")

    def _most(self, n: int) -> int:
        """Return how many of ``n`` entries travel at most."""
        return min(n, max(self.count(n), int(1.3 * self.count(n))))

    def warm_up(self, ctx: Context) -> None:
        """Compile the kernels."""
        super().warm_up(ctx)
        warm_up(ctx)

    def reference(self, x: Array, ctx: Context) -> Payload:
        """Do the same in array code."""
        return self._select(x, ctx, fast=False)

    def _select(self, x: Array, ctx: Context, fast: bool) -> Payload:
        k, exact = self.count(x.size), largest if fast else largest_array
        threshold = self.estimate(x, k, ctx, fast) if 0 < k < x.size else math.nan
        if not math.isfinite(threshold):
            return exact(x, k, ctx)
        for _ in range(_ATTEMPTS):
            bits = magnitude_bits(threshold)
            if fast:
                found = reaching(x, bits, ctx)
            else:
                found = ctx.xp.flatnonzero((x.view("uint32") & 0x7FFFFFFF) >= bits)
            if found.size > 1.3 * k:  # the largest are among them
                return _within(found, exact(x[found], k, ctx))
            if found.size >= 0.8 * k:
                return {"indices": found.astype("uint32", copy=False), "values": x[found]}
            threshold *= 0.8
        return exact(x, k, ctx)


def _within(found: Array, selected: Payload) -> Payload:
    indices = found[selected["indices"]].astype("uint32", copy=False)
    return {"indices": indices, "values": selected["values"]}


@register("topk_sampled")
class TopKSampled(Estimated):
    """Send about the k largest entries, by the threshold that a random sample suggests.

    Lin et al., ICLR 2018. From 0.8 k to 1.3 k entries of 8 bytes, always the largest. NaN counts
    as largest and is sent. Use it with error feedback: ``topk_sampled | ef``.
    """

    paper: ClassVar[str] = "Lin, ICLR 2018"
    sample: float = option(0.01, gt=0, le=1, doc="share of the entries that is sampled")

    def estimate(self, x: Array, k: int, ctx: Context, fast: bool) -> float:
        """Return the magnitude at the rank among the sample that k has among all."""
        drawn = self.drawn(x.size, k)
        if drawn >= x.size:
            return math.nan
        if fast:
            from ringlet.compressors.kernels.cpu.sparsifiers import estimate

            bits = ctx.workspace.array("sample", drawn, np.int32)
            estimate.sample(unlocked(x), np.uint64(ctx.key()), bits)
        else:
            places = squares(ctx.xp, ctx.key(), 0, drawn).astype("uint64") * ctx.xp.uint64(x.size)
            taken = x[(places >> ctx.xp.uint64(32)).astype("int64")]
            bits = (taken.view("uint32") & 0x7FFFFFFF).astype("int32")
        rank = drawn - _rank(drawn, k, x.size)
        return float(ctx.xp.partition(bits, rank)[rank : rank + 1].view("float32")[0])

    def estimator(self) -> tuple[Any, bool] | None:
        """The kernel that samples."""
        from ringlet.compressors.kernels.cpu.sparsifiers.estimate import by_sample

        return (by_sample, True) if keeps(self, TopKSampled, "estimate", "drawn") else None

    def plan(self, n: int) -> Sequence[float]:
        """How many are to travel, how many are sampled, and a rank among these."""
        k = self.count(n)
        drawn = self.drawn(n, k) if 0 < k < n else n
        return (k, drawn, _rank(drawn, k, n)) if drawn < n else (k, 0, 0)

    def drawn(self, n: int, k: int) -> int:
        """Return how many of ``n`` entries are sampled where ``k`` are to travel."""
        # At least 64 entries are expected above the threshold, which then errs by an eighth.
        return max(math.ceil(n * self.sample), 64 * n // k)

    def aim(self, n: int, k: int, ctx: Context) -> Sample | Fit | None:
        """Sample, unless the sample would be as large as the tensor."""
        from ringlet.compressors.kernels.cuda.sparsifiers.threshold import Sample

        drawn = self.drawn(n, k)
        return Sample(ctx.key(), drawn, _rank(drawn, k, n)) if drawn < n else None

    def warm_up(self, ctx: Context) -> None:
        """Compile the kernels, the one that samples included."""
        super().warm_up(ctx)
        if ctx.xp is np:
            from ringlet.compressors.kernels.cpu.sparsifiers import estimate

            estimate.sample(np.ones(8, np.float32), np.uint64(ctx.key()), np.empty(8, np.int32))


@register("sidco")
class SIDCo(Estimated):
    """Send about the k largest entries, by fitting exponential tails stage after stage.

    Abdelmoniem et al., MLSys 2021 (SIDCo-E). Each stage but the last keeps a quarter of what the
    one before let through and fits the excess over its threshold. Exact for Laplacian gradients,
    and good for Gaussian ones from three stages on. From 0.8 k to 1.3 k entries of 8 bytes, always
    the largest; a gradient that fits badly costs further passes, never more entries. NaN counts as
    largest and is sent. Use it with error feedback: ``sidco | ef``.
    """

    paper: ClassVar[str] = "Abdelmoniem, MLSys 2021"
    stages: int = option(3, ge=1, le=8, doc="stages of the estimate, each a pass")

    def estimate(self, x: Array, k: int, ctx: Context, fast: bool) -> float:
        """Return the threshold of the last stage."""
        threshold = 0.0
        for weight in self.weights(k / x.size):
            total, count = self._exceeding(x, threshold, ctx, fast)
            if count == 0:
                break
            threshold += (total / count - threshold) * weight
            if not math.isfinite(threshold):
                break
        return threshold

    def estimator(self) -> tuple[Any, bool] | None:
        """The kernel that fits."""
        from ringlet.compressors.kernels.cpu.sparsifiers.estimate import by_fit

        return (by_fit, False) if keeps(self, SIDCo, "estimate", "weights", "_exceeding") else None

    def plan(self, n: int) -> Sequence[float]:
        """How many are to travel, and the weights of stages; none where all travel."""
        k = self.count(n)
        weights = self.weights(k / n) if 0 < k < n else ()
        return (k, *weights, *[0.0] * (self.stages - len(weights)))

    def weights(self, ratio: float) -> tuple[float, ...]:
        """Return by how many mean excesses each stage moves the threshold."""
        weights, left = [], ratio
        for stage in range(self.stages):
            last = stage == self.stages - 1 or left >= _FIRST
            share = left if last else _FIRST
            weights.append(-math.log(share))
            left /= share
            if last:
                break
        return tuple(weights)

    def aim(self, n: int, k: int, ctx: Context) -> Sample | Fit | None:
        """Fit the stages."""
        from ringlet.compressors.kernels.cuda.sparsifiers.threshold import Fit

        return Fit(self.weights(k / n))

    def _exceeding(self, x: Array, threshold: float, ctx: Context, fast: bool) -> tuple[float, int]:
        """Return the sum and the number of magnitudes of at least ``threshold``."""
        chunks, bits = -(-x.size // _CHUNK), magnitude_bits(threshold)
        if not fast:
            rows = ctx.xp.zeros(chunks * _CHUNK, "float32")
            rows[: x.size] = x
            held = (x.view("uint32") & 0x7FFFFFFF) >= bits
            rows[: x.size][~held] = 0
            sums = lane_sums(ctx.xp.abs(rows).reshape(chunks, _CHUNK).astype("float64"), ctx.xp)
            return _in_order(sums), int(held.sum())
        from ringlet.compressors.kernels.cpu.sparsifiers import estimate

        sums, counts, x = np.empty(chunks), np.empty(chunks, np.int64), unlocked(x)

        def exceed(start: int, stop: int) -> None:
            first, end = start // _CHUNK, -(-stop // _CHUNK)
            estimate.exceeding(x[start:stop], bits, _CHUNK, sums[first:end], counts[first:end])

        run_ranges(x.size, _CHUNK, exceed)
        return _in_order(sums), int(counts.sum())


def _rank(drawn: int, k: int, n: int) -> int:
    """Return the rank, from 1 on, that k of n entries have among as many as are drawn."""
    return max(1, round(drawn * k / n))


def _in_order(sums: Array) -> float:
    """Add one after the other: ``sum`` does not from Python 3.12 on, nor does an array's."""
    total = 0.0
    for value in sums.tolist():
        total += value
    return total
