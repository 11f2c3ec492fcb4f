"""Unbiased compressors made contractive, so that error feedback can stand behind them.

Beznosikov, Horvath, Richtarik and Safaryan, "On biased compression for distributed learning",
JMLR 2023: with variance omega, C / (1 + omega) contracts by delta = 1 / (1 + omega).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from ringlet.compressors.base.bucketed import Bucketed
from ringlet.compressors.base.contract import Payload, Traits, keeps
from ringlet.compressors.base.feedback import add_scaled, scale
from ringlet.compressors.base.modifier import Modifier
from ringlet.compressors.core.context import Array, Context
from ringlet.compressors.core.errors import CompressorError
from ringlet.compressors.core.multitensor import Decoding, Encoding, MultiTensor, Spaced
from ringlet.compressors.core.options import option
from ringlet.compressors.specs.registry import register

_FUSED = 96  # payloads that a CUDA kernel sums and scales at once


@register("scaled")
class Scaled(Modifier):
    """Multiply what an unbiased compressor decodes to by ``factor``: 1 / (1 + omega) by default.

    Error feedback behind a compressor with omega of 1 or more feeds back more than was sent, and
    diverges; scaled, it converges: ``qsgd(bits=4) | scaled | ef``. Payloads stay as they are.
    A larger factor sends more at once, and contracts as long as it is below 2 / (1 + omega).
    """

    paper: ClassVar[str] = "Beznosikov, JMLR 2023"
    factor: float = option(0.0, ge=0, le=1, doc="what is multiplied by; 0: 1 / (1 + omega)")

    def validate(self) -> None:
        """Refuse what claims no variance, has no payload, and factors that do not contract."""
        if not self.is_bound():
            return
        traits = self.wrapped_compressor.traits()
        if traits.omega is None:
            raise CompressorError(
                f"scaled needs an unbiased compressor that declares omega, which {self.inner} "
                "does not; leave '| scaled' away"
            )
        if traits.combine == "rounds" or traits.stateful:
            how = "exchanges in rounds" if traits.combine == "rounds" else "remembers earlier steps"
            raise CompressorError(
                f"scaled multiplies what a payload decodes to, and {self.inner} {how}; leave "
                "'| scaled' away"
            )
        if self.delta <= 0:
            raise CompressorError(
                f"scaled: a factor of {self.factor} does not make {self.inner} contract; with "
                f"omega {traits.omega:.3g} it must be below {2 / (1 + traits.omega):.3g}"
            )

    @property
    def weight(self) -> float:
        """What decoded values are multiplied by."""
        return self.factor or 1 / (1 + self._omega)

    @property
    def delta(self) -> float:
        """How much it contracts: E||s C(x) - x||^2 = (s^2 omega + (1 - s)^2) ||x||^2."""
        return 1 - self.weight**2 * self._omega - (1 - self.weight) ** 2

    @property
    def _omega(self) -> float:
        omega = self.wrapped_compressor.traits().omega
        assert omega is not None, "validate() refuses it"
        return omega

    def traits(self) -> Traits:
        """Return the wrapped traits, contractive instead of unbiased."""
        inner = self.wrapped_compressor.traits()
        return dataclasses.replace(inner, omega=None, delta=self.delta * (1 - 1e-6))

    def divergence(self) -> str | None:
        """None: it contracts."""
        return None

    def rotated_divergence(self) -> str | None:
        """None: it contracts."""
        return None

    def decompress(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Decode and scale; a quantiser does both in one pass on a GPU."""
        if not self._fused([payload], out, ctx, add=False):
            super().decompress(payload, out, ctx)
            scale(out, self.weight, ctx)

    def accumulate(self, payload: Payload, out: Array, ctx: Context) -> None:
        """Decode, scale and add."""
        if not self._fused([payload], out, ctx, add=True):
            decoded = ctx.workspace.array("scaled", out.size)
            super().decompress(payload, decoded, ctx)
            add_scaled(out, decoded, self.weight, ctx)

    def sum_into(self, payloads: Sequence[Payload], out: Array, ctx: Context) -> None:
        """Sum, and scale once."""
        if not self._fused(payloads, out, ctx, add=False):
            super().sum_into(payloads, out, ctx)
            scale(out, self.weight, ctx)

    def multi_tensor(self, ctx: Context) -> MultiTensor | None:
        """The wrapped compressor's kernels, with the factor."""
        own = keeps(self, Scaled, "decompress", "sum_into") and keeps(
            self, Modifier, "encode_into", "feedback_into"
        )
        inner = self.wrapped_compressor.multi_tensor(ctx) if own else None
        return None if inner is None else _Weighted(inner, self.weight)

    def _fused(self, payloads: Sequence[Payload], out: Array, ctx: Context, add: bool) -> bool:
        """Decode and scale with a CUDA kernel; False where there is none that does both."""
        inner = self.wrapped_compressor
        if not isinstance(inner, Bucketed) or len(payloads) > _FUSED:
            return False
        return inner.decode_on_device(payloads, out, ctx, add, self.weight)


class _Weighted(NamedTuple):
    """Kernels whose payloads decode to ``factor`` times as much."""

    inner: MultiTensor
    factor: float

    def encode(
        self,
        tensors: Sequence[Encoding],
        spaced: Spaced | None = None,
        scale: float = 1.0,
        decay: float = 1.0,
        weight: float = 1.0,
    ) -> None:
        """Encode; what is summed, and what a residual lacks, is weighed."""
        self.inner.encode(tensors, spaced, scale, decay, weight * self.factor)

    def decode(
        self,
        tensors: Sequence[Decoding],
        spaced: Spaced | None = None,
        scale: float = 1.0,
        weight: float = 1.0,
    ) -> None:
        """Decode and weigh."""
        self.inner.decode(tensors, spaced, scale, weight * self.factor)
