"""The base of compressors that send some entries of a tensor: their indices and values."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np

from ringlet.compressors.base.batched import LENGTH, Batched, Kernel
from ringlet.compressors.base.contract import Compressor, Part, Payload, Traits, keeps
from ringlet.compressors.base.feedback import advance, on_device, settle
from ringlet.compressors.base.precompile import precompile
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.errors import PayloadError
from ringlet.compressors.core.lengths import check_entries


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
        from ringlet.compressors.kernels.cpu.common import scatter

        self._inside(scatter.scatter(indices, values, out), out)

    def accumulate(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Add the values at their places."""
        indices, values = check_entries(self.label(), payload)
        if ctx.xp is not np:
            if not on_device("scatter_add", ctx, out, a=values, indices=indices):
                out[indices] += values
            return
        from ringlet.compressors.kernels.cpu.common import scatter

        self._inside(scatter.scatter_add(indices, values, out), out)

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

    def keep_residual(self, target: Array, payload: Payload, residual: Array, ctx: Context) -> None:
        """Look at nothing but the entries that were sent."""
        if ctx.xp is not np:
            super().keep_residual(target, payload, residual, ctx)
            return
        indices, values = check_entries(self.label(), payload)
        settle(target, indices, values, residual, ctx)

    def scatters(self) -> bool:
        """Whether payloads are decoded here, and not by a subclass in its own way."""
        own = keeps(self, Selection, "compress_feedback", "decompress", "accumulate")
        return own and keeps(self, Compressor, "sum_into")

    def batched_selection(
        self,
        select: Any,
        most: Callable[[int], int],
        plan: Callable[[int], Sequence[float]],
        draws: bool = False,
    ) -> Batched | None:
        """Return kernels for many tensors a call, where the values decide how many entries travel.

        ``select`` is as ``kernels.cpu.sparsifiers.selection`` says; it is given ``plan(n)``, as
        many numbers for each n. At most ``most(n)`` of ``n`` entries travel.
        """
        if not self.scatters() or not keeps(self, Selection, "compress_feedback"):
            return None
        from ringlet.compressors.kernels.cpu.common.batched import batch_decoder
        from ringlet.compressors.kernels.cpu.sparsifiers.selection import decode_placed, selector

        known, decode = cache(plan), batch_decoder(decode_placed)

        def encoding(fed: bool) -> Kernel:
            kernel = selector(select, fed)

            def encode(tensors: Array, payloads: Array, decay: np.float32) -> None:
                plans = [known(n) for n in payloads[:, LENGTH].tolist()]
                kernel(tensors, payloads, decay, np.array(plans, np.float64))

            return encode

        def layout(n: int) -> tuple[Part, ...]:
            return Part("indices", "uint32", most(n)), Part("values", "float32", most(n))

        return Batched(
            self.label,
            layout,
            ("indices", "values"),
            encoding(fed=False),
            encoding(fed=True),
            lambda *tables: decode(*tables, ()),
            draws=draws,
            varies=True,
        )

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
        precompile(self, ctx)
