"""Choosing between two compressors by the regime that training is in."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ringlet.compressors.base.contract import Compressor
from ringlet.compressors.core.errors import OptionError
from ringlet.compressors.specs.parser import resolve
from ringlet.compressors.specs.routes import Spec


@dataclass
class Accordion:
    """Compress little while training is in a critical regime, and much otherwise.

    Agarwal et al., "Accordion: adaptive gradient communication via critical learning regime
    identification", MLSys 2021. A regime is critical when the norm of the gradients accumulated
    over an epoch changed by at least ``threshold`` of what it was, and in the first epoch. So is
    one whose norm is not finite, with which no other is compared.
    """

    low: Spec
    high: Spec
    threshold: float = 0.5
    _before: float | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.threshold > 0:
            raise OptionError(f"Accordion: threshold must be > 0, got {self.threshold}")
        self.low, self.high = resolve(self.low), resolve(self.high)

    def choose(self, norm: float) -> Compressor:
        """Return the compressor for the next epoch, given the norm of the one that ended."""
        if not math.isfinite(norm):
            return resolve(self.low)
        before, self._before = self._before, norm
        if before is None or before == 0.0:
            return resolve(self.low)
        critical = abs(before - norm) / before >= self.threshold
        return resolve(self.low if critical else self.high)
