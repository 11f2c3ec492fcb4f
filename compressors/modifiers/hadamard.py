"""Rotation before compression: outliers spread evenly over their block.

Suresh et al., "Distributed mean estimation with limited communication", ICML 2017; used for
gradients in Wang et al., "SDP4Bit", NeurIPS 2024.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from ringlet.compressors.base.batched import Batched, own_key
from ringlet.compressors.base.composed_batches import rotated
from ringlet.compressors.base.contract import Exchange, Payload, Traits, keeps
from ringlet.compressors.base.cuda_device import device_for
from ringlet.compressors.base.modifier import Modifier
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.errors import CompressorError, OptionError
from ringlet.compressors.core.lengths import check_lengths
from ringlet.compressors.core.options import option
from ringlet.compressors.core.read_only import unlocked
from ringlet.compressors.core.rng import squares
from ringlet.compressors.core.threads import run_ranges
from ringlet.compressors.specs.registry import register


@register("hadamard")
class Hadamard(Modifier):
    """Multiply each block by random signs and a Hadamard matrix before compression, undo it after.

    The rotation keeps lengths, so the wrapped compressor's error bounds hold; quantisers then see
    values that are nearly Gaussian whatever the gradient is. Signs are the same on all ranks and
    new in every step. Nothing is padded: what is left behind the last whole block is rotated in
    powers of two, largest first. A NaN or Inf spreads over its block. Error feedback belongs
    behind: ``int4 | hadamard | ef``.
    """

    paper: ClassVar[str] = "Suresh, ICML 2017"
    block: int = option(1024, ge=64, le=65536, doc="elements rotated together, a power of two")

    def validate(self) -> None:
        """Refuse blocks that have no Hadamard matrix, and state that would turn with each step."""
        if self.block & (self.block - 1):
            raise OptionError(f"hadamard: block must be a power of two, got {self.block}")
        if self.is_bound() and self.wrapped_compressor.traits().stateful:
            raise CompressorError(
                f"{self.inner} remembers values, which hadamard rotates differently in every step; "
                "write for example 'int4 | hadamard | ef'"
            )

    def divergence(self) -> str | None:
        """Return the wrapped compressor's reason, or that of what it is for rotated values."""
        return super().divergence() or self.wrapped_compressor.rotated_divergence()

    def traits(self) -> Traits:
        """Return the wrapped traits; pieces start at whole blocks of both kinds."""
        inner = self.wrapped_compressor.traits()
        granularity = inner.granularity and math.lcm(inner.granularity, self.block)
        return dataclasses.replace(inner, granularity=granularity)

    def compress(self, x: Array, ctx: Context) -> Payload:
        """Compress the rotated values."""
        return self.wrapped_compressor.compress(self._rotated(x, ctx), ctx)

    def encode_into(self, x: Array, payload: Payload, ctx: Context) -> None:
        """Encode the rotated values."""
        if ctx.xp is not np:
            return super().encode_into(self._rotated(x, ctx), payload, ctx)
        with ctx.workspace.held(x.size) as rotated:  # no name: hadamard may stand within hadamard
            self._rotate(x, ctx, rotated)
            return super().encode_into(rotated, payload, ctx)

    def feedback_into(
        self, x: Array, residual: Array, decay: float, payload: Payload, ctx: Context
    ) -> None:
        """Add the residual while rotating, and rotate back what was lost."""
        if ctx.xp is not np:
            return super().feedback_into(x, residual, decay, payload, ctx)
        from ringlet.compressors.kernels.cpu.modifiers import hadamard

        check_lengths(self.label(), x.size, residual=residual)
        inner, block, x = self.wrapped_compressor, self.block, unlocked(x)
        key, weight = np.uint64(ctx.key(shared=True)), np.float32(decay)

        def ranges(kernel: Any, rotated: Array) -> None:
            def run(start: int, stop: int) -> None:
                at, place = slice(start, stop), ctx.offset + start
                kernel(x[at], residual[at], weight, key, place, block, rotated[at])

            run_ranges(x.size, block, run)

        with ctx.workspace.held(x.size) as rotated:
            ranges(hadamard.rotate_sum, rotated)
            inner.encode_into(rotated, payload, ctx)
            inner.decompress(payload, rotated, ctx)
            ranges(hadamard.keep, rotated)
        return None

    def decompress(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Decode and rotate back."""
        super().decompress(payload, out, ctx)
        self._restore(out, ctx, out)

    def accumulate(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Decode, rotate back and add."""
        with ctx.workspace.held(out.size) as rotated:
            super().decompress(payload, rotated, ctx)
            self._restore(rotated, ctx, out, add=True)

    def sum_into(self, payloads: Sequence[Payload], out: Array, ctx: Context) -> None:
        """Sum what is rotated, and rotate back once."""
        super().sum_into(payloads, out, ctx)
        self._restore(out, ctx, out)

    def exchange(self, x: Array, out: Array, ctx: Context, local: Array | None = None) -> Exchange:
        """Exchange the rotated values; rotate the results back."""
        with ctx.workspace.held(x.size) as rotated:
            self._rotate(x, ctx, rotated)
            yield from super().exchange(rotated, out, ctx, local)
        self._restore(out, ctx, out)
        if local is not None:
            self._restore(local, ctx, local)

    def batched(self) -> Batched | None:
        """The wrapped compressor's kernels for many tensors a call."""
        own = keeps(self, Hadamard, "encode_into", "feedback_into", "decompress", "sum_into")
        inner = self.wrapped_compressor.batched() if own else None
        if inner is None or inner.memories or inner.keyed or inner.varies:
            return None
        if inner.draws and inner.key is not own_key:
            return None
        return rotated(inner, self.block, lambda n, ctx: ctx.key(shared=True))

    # -- the rotation: array code, then the kernels that agree with it bit for bit -------------

    def rotated_reference(self, x: Array, ctx: Context) -> Array:
        """Return H D x, with D the random signs."""
        return self._transformed(x * self._signs(x.size, ctx), ctx.xp)

    def restored_reference(self, x: Array, ctx: Context) -> Array:
        """Return D H x: the inverse, because H and D are their own."""
        return self._transformed(x, ctx.xp) * self._signs(x.size, ctx)

    def _signs(self, n: int, ctx: Context) -> Array:
        group = min(self.block, 2048)  # elements whose signs come from 64 random numbers
        groups, first = -(-n // group), ctx.offset // group
        words = squares(ctx.xp, ctx.key(shared=True), 64 * first, 64 * groups).reshape(-1, 1, 64)
        bits = (words >> ctx.xp.arange(group // 64, dtype="uint32")[:, None]) & 1
        signs: Array = 1 - 2 * bits.reshape(-1)[:n].astype("float32")
        return signs

    def _transformed(self, x: Array, xp: Any) -> Array:
        out, start, size = x.copy(), 0, self.block
        while start < x.size:
            while size > x.size - start:
                size //= 2
            stop = start + (x.size - start) // size * size
            rows = out[start:stop].reshape(-1, size) * np.float32(1.0 / math.sqrt(size))
            half = 1
            while half < size:
                pairs = rows.reshape(-1, 2, half)
                rows = xp.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], axis=1)
                half *= 2
            out[start:stop] = rows.reshape(-1)
            start = stop
        return out

    def _rotated(self, x: Array, ctx: Context) -> Array:
        rotated: Array = ctx.xp.empty_like(x)
        self._rotate(x, ctx, rotated)
        return rotated

    def _rotate(self, x: Array, ctx: Context, out: Array) -> None:
        check_lengths(self.label(), x.size, out=out)
        if self._on_device("rotate", x, ctx, out):
            return
        if ctx.xp is not np:
            out[...] = self.rotated_reference(x, ctx)
            return
        from ringlet.compressors.kernels.cpu.modifiers import hadamard

        key, block, x = np.uint64(ctx.key(shared=True)), self.block, unlocked(x)

        def rotate(start: int, stop: int) -> None:
            hadamard.rotate(x[start:stop], key, ctx.offset + start, block, out[start:stop])

        run_ranges(x.size, block, rotate)

    def _restore(self, x: Array, ctx: Context, out: Array, add: bool = False) -> None:
        check_lengths(self.label(), x.size, out=out)
        if self._on_device("restore", x, ctx, out, add):
            return
        if ctx.xp is not np:
            restored = self.restored_reference(x, ctx)
            out[...] = out + restored if add else restored
            return
        from ringlet.compressors.kernels.cpu.modifiers import hadamard

        key, block = np.uint64(ctx.key(shared=True)), self.block

        def restore(start: int, stop: int) -> None:
            place = slice(start, stop)
            hadamard.restore(x[place], key, ctx.offset + start, block, add, out[place])

        run_ranges(x.size, block, restore)

    def _on_device(
        self, kernel: str, x: Array, ctx: Context, out: Array, add: bool = False
    ) -> bool:
        """Run a CUDA kernel; False if there is none for these arrays or blocks."""
        if ctx.xp is np:
            return False
        from ringlet.compressors.kernels.cuda.modifiers import hadamard

        device = device_for(ctx)
        if device is None or self.block > hadamard.LARGEST:
            return False
        hadamard.run(device, kernel, x, out, self.block, ctx.key(shared=True), ctx.offset, add)
        return True
