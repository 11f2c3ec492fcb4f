"""Random-k: everybody sends the same random entries, so that they add up on the wire.

Stich, Cordonnier and Jaggi, "Sparsified SGD with memory", NeurIPS 2018; Wangni et al., "Gradient
sparsification for communication-efficient distributed optimization", NeurIPS 2018.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from ringlet.compressors.base.contract import Compressor, Part, Payload, Traits
from ringlet.compressors.base.cuda_device import device_for
from ringlet.compressors.base.feedback import advance, on_device
from ringlet.compressors.base.precompile import precompile
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.lengths import check_countable, check_lengths, check_parts
from ringlet.compressors.core.options import option
from ringlet.compressors.core.read_only import unlocked
from ringlet.compressors.core.rng import squares
from ringlet.compressors.core.threads import run_ranges
from ringlet.compressors.specs.registry import register


@register("randomk")
class RandomK(Compressor):
    """Send k = ceil(ratio * n) entries drawn without replacement, the same ones on every rank.

    Stich et al., NeurIPS 2018. Values travel without indices and add up on the wire: 4 k bytes
    for any number of ranks. Which entries, follows from seed, tensor name and step. With
    ``unbiased`` values are multiplied by n / k. With error feedback they must not be, or the
    residual grows without bound: ``randomk(unbiased=False) | ef``. A NaN or Inf that is not drawn
    shows as NaN in the first value.
    """

    paper: ClassVar[str] = "Stich, NeurIPS 2018"
    ratio: float = option(0.01, gt=0, le=1, doc="share of the entries that travel")
    unbiased: bool = option(True, doc="multiply by n / k, so that the expectation is right")

    def count(self, n: int) -> int:
        """Return how many of ``n`` entries travel."""
        check_countable(self.label(), n)
        return min(n, math.ceil(n * self.ratio * (1 - 1e-12)))

    def traits(self) -> Traits:
        """Sums on the wire; unbiased with variance n / k - 1, or contracts by k / n."""
        return Traits(
            "sum",
            fixed_size=True,
            omega=(1 / self.ratio - 1) * (1 + 1e-9) + 1e-6 if self.unbiased else None,
            delta=None if self.unbiased else self.ratio * (1 - 1e-9),
        )

    def divergence(self) -> str | None:
        """Name the option that keeps residuals bounded."""
        if super().divergence() is None:
            return None
        return (
            "values are multiplied by n / k, so that residuals grow without bound; write "
            f"'{self.replace(unbiased=False)}'"
        )

    def layout(self, n: int) -> tuple[Part, ...]:
        """k values."""
        return (Part("values", "float32", self.count(n)),)

    def scale(self, n: int) -> np.float32:
        """Return what values are multiplied by."""
        return np.float32(n / self.count(n) if self.unbiased and n else 1.0)

    def indices(self, n: int, ctx: Context) -> Array:
        """Return which of ``n`` entries travel (uint32), in the order in which they do."""
        k = self.count(n)
        if ctx.xp is not np:
            from ringlet.compressors.kernels.cuda.sparsifiers import randomk as kernels

            if device := device_for(ctx):
                chosen = ctx.workspace.array("randomk", k, np.uint32)
                kernels.draw(device, n, ctx.key(shared=True), grid(n), chosen)
                return chosen
            return first_places(ctx.xp, ctx.key(shared=True), n, k)
        from ringlet.compressors.kernels.cpu.sparsifiers import randomk

        chosen = ctx.workspace.array("randomk", k, np.uint32)
        key, (rows, columns) = np.uint64(ctx.key(shared=True)), grid(n)

        def fill(start: int, stop: int) -> None:
            randomk.places(key, n, rows, columns, start, chosen[start:stop])

        run_ranges(k, 1, fill)
        return chosen

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Draw in array code; the kernel agrees with it entry for entry."""
        xp = ctx.xp
        chosen = first_places(xp, ctx.key(shared=True), x.size, self.count(x.size))
        with np.errstate(over="ignore"):
            values = x[chosen] * self.scale(x.size)
        if x.size and not xp.isfinite(x).all():
            values[0] = np.nan
        return {"values": values}

    def decompress(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Put the values at their places among zeros."""
        check_parts(self.label, self.layout(out.size), payload)
        chosen = self.indices(out.size, ctx)
        if ctx.xp is np:
            from ringlet.compressors.kernels.cpu.common import scatter

            scatter.scatter(chosen, payload["values"], out)
            return
        out[...] = 0
        if not on_device("scatter", ctx, out, a=payload["values"], indices=chosen):
            out[chosen] = payload["values"]

    def accumulate(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Add the values at their places."""
        check_parts(self.label, self.layout(out.size), payload)
        chosen = self.indices(out.size, ctx)
        if ctx.xp is np:
            from ringlet.compressors.kernels.cpu.common import scatter

            scatter.scatter_add(chosen, payload["values"], out)
            return
        if not on_device("scatter_add", ctx, out, a=payload["values"], indices=chosen):
            out[chosen] += payload["values"]

    def encode_into(self, x: Array, payload: Payload, ctx: Context) -> None:
        """Draw and look for NaN and Inf."""
        check_parts(self.label, self.layout(x.size), payload)
        if self._encode_on_device(x, None, 1.0, payload, ctx):
            return
        if ctx.xp is not np or x.size == 0:
            super().encode_into(x, payload, ctx)
            return
        from ringlet.compressors.kernels.cpu.sparsifiers import randomk

        values, finite, x = payload["values"], [], unlocked(x)
        randomk.take(x, self.indices(x.size, ctx), self.scale(x.size), values)
        run_ranges(x.size, 1, lambda start, stop: finite.append(randomk.all_finite(x[start:stop])))
        if not all(finite):
            values[0] = np.nan

    def feedback_into(
        self, x: Array, residual: Array, decay: float, payload: Payload, ctx: Context
    ) -> None:
        """Add the residual, draw, and keep everything not sent."""
        check_parts(self.label, self.layout(x.size), payload)
        check_lengths(self.label(), x.size, residual=residual)
        if self._encode_on_device(x, residual, decay, payload, ctx):
            return
        if ctx.xp is not np or x.size == 0:
            super().feedback_into(x, residual, decay, payload, ctx)
            return
        from ringlet.compressors.kernels.cpu.sparsifiers import randomk

        weight, scale, values = np.float32(decay), self.scale(x.size), payload["values"]
        chosen, x = self.indices(x.size, ctx), unlocked(x)
        old = ctx.workspace.array("old", chosen.size)
        randomk.take_feedback(x, residual, weight, chosen, scale, values, old)
        if advance(x, residual, decay, ctx) is not residual:
            values[0] = np.nan
        randomk.drop(x, weight, chosen, values, old, residual)

    def _encode_on_device(
        self, x: Array, residual: Array | None, decay: float, payload: Payload, ctx: Context
    ) -> bool:
        """Do all of it with CUDA kernels; False if there are none."""
        device = device_for(ctx)
        if device is None or x.size == 0:
            return False
        from ringlet.compressors.kernels.cuda.sparsifiers import randomk

        key, scale = ctx.key(shared=True), float(self.scale(x.size))
        randomk.encode(
            device, x, residual, decay, scale, payload["values"], key, grid(x.size),
            ctx.workspace.array,
        )  # fmt: skip
        return True

    def warm_up(self, ctx: Context) -> None:
        """Compile the kernels."""
        precompile(self, ctx)


def grid(n: int) -> tuple[int, int]:
    """Return rows and columns of a grid with at least ``n`` cells and few more."""
    rows = max(1, math.isqrt(max(n, 1) - 1) + 1)
    return rows, max(1, -(-n // rows))


def first_places(xp: Any, key: int, n: int, k: int) -> Array:
    """Return where a permutation of 0 .. n - 1 sends 0 .. k - 1: the kernel in array code."""
    rows, columns = grid(n)
    chosen = xp.arange(k, dtype="uint64")
    outside = chosen
    todo = xp.arange(k)
    while todo.size:
        outside = _permute(xp, key, outside, rows, columns)
        chosen[todo] = outside
        again = outside >= n
        todo, outside = todo[again], outside[again]
    indices: Array = chosen.astype("uint32")
    return indices


def _permute(xp: Any, key: int, place: Array, rows: int, columns: int) -> Array:
    row, column = place // xp.uint64(columns), place % xp.uint64(columns)
    for turn in range(2):
        # Halves are small, so every random number that a round may need is drawn once.
        drawn = squares(xp, key, (2 * turn + 1) << 40, columns).astype("uint64")
        row = (row + ((drawn * xp.uint64(rows)) >> xp.uint64(32))[column]) % xp.uint64(rows)
        drawn = squares(xp, key, (2 * turn + 2) << 40, rows).astype("uint64")
        column = (column + ((drawn * xp.uint64(columns)) >> xp.uint64(32))[row]) % xp.uint64(
            columns
        )
    permuted: Array = row * xp.uint64(columns) + column
    return permuted
