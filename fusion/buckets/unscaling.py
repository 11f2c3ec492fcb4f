"""What becomes of results under a loss scale: they are divided by it, and have to be finite.

Both happen to a bucket when it is done, on the engine's thread, while others are still on their
way. Reduced values are the same bits on every rank, and so is what is found.

Micikevicius et al., "Mixed precision training", ICLR 2018.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from ringlet.fusion.devices.convert import from_float32, to_float32
from ringlet.fusion.planning.member import Member


class Unscaling:
    """The loss scale of a group's gradients, which may change between steps."""

    def __init__(self, scale: float) -> None:
        self.scale = scale

    def apply(self, members: Iterable[Member]) -> bool:
        """Divide the outputs of ``members``, in host memory; return whether all are finite."""
        from ringlet.compressors.kernels.cpu.common.unscale import (
            unscale,  # Numba is slow to import
        )

        factor, finite = np.float32(1.0 / self.scale), True
        for member in members:
            dtype = member.output_dtype
            if dtype == "float64":
                member.output *= 1.0 / self.scale
                finite &= bool(np.isfinite(member.output).all())
                continue
            values = to_float32(member.output, dtype, member.workspace)
            finite &= bool(unscale(values, factor))
            from_float32(values, member.output, dtype, member.workspace)
        return finite
