"""Loss scales as pure state machines: what to multiply losses by, and when to change that.

Micikevicius et al., "Mixed precision training", ICLR 2018. Whether a step overflowed is agreed
before it comes here (reduced gradients are the same bits on every rank), and so every rank's scale
takes the same course.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Self


@dataclass(frozen=True)
class LossScale:
    """A scale, and what follows it. Immutable: ``after`` returns the next state."""

    scale: float = 1.0

    def __post_init__(self) -> None:
        if not (self.scale > 0 and math.isfinite(self.scale)):
            raise ValueError(f"a loss scale must be above 0 and finite, not {self.scale}")

    def after(self, overflow: bool) -> LossScale:
        """Return the state after a step that did or did not overflow."""
        return self

    @property
    def watches(self) -> bool:
        """Whether gradients have to be checked, and steps that overflow be skipped."""
        return True

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs."""
        return dict(vars(self))

    def loaded(self, state: dict[str, Any]) -> Self:
        """Return this scale in a saved state."""
        return replace(self, **{key: state[key] for key in vars(self) if key in state})


@dataclass(frozen=True)
class NoScale(LossScale):
    """The scale 1, for dtypes with float32's range: nothing is checked, nothing skipped."""

    def __post_init__(self) -> None:
        if self.scale != 1:
            raise ValueError(f"NoScale is the scale 1; for {self.scale} take StaticScale")

    @property
    def watches(self) -> bool:
        """False: an Inf reaches the parameters as it would in float32."""
        return False

    def loaded(self, state: dict[str, Any]) -> Self:
        """Return this scale: it has no states."""
        return self


@dataclass(frozen=True)
class StaticScale(LossScale):
    """A fixed scale; steps that overflow are skipped."""

    def loaded(self, state: dict[str, Any]) -> Self:
        """Return this scale, which somebody has chosen, perhaps since then."""
        return self


@dataclass(frozen=True)
class DynamicScale(LossScale):
    """Doubles after ``interval`` steps without overflow, halves at each overflow.

    Stays between ``least`` and ``most``. ``clean`` counts steps since the last change. Raises
    ValueError for a scale beyond its bounds, and for factors that would not change it so.
    """

    scale: float = 65536.0
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    least: float = 2.0**-14
    most: float = 2.0**24
    clean: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (1 < self.growth < math.inf and 0 < self.backoff < 1 and self.interval >= 1):
            raise ValueError(
                f"growth must be above 1, backoff between 0 and 1, interval at least 1; got "
                f"{self.growth}, {self.backoff}, {self.interval}"
            )
        if not 0 <= self.clean < math.inf:
            raise ValueError(f"steps without overflow are counted from 0 on, not {self.clean}")
        if not (0 < self.least <= self.scale <= self.most < math.inf):
            raise ValueError(
                f"the loss scale {self.scale} must be between {self.least} and {self.most}"
            )

    def after(self, overflow: bool) -> DynamicScale:
        """Return the state after a step."""
        if overflow:
            return replace(self, scale=max(self.scale * self.backoff, self.least), clean=0)
        if self.clean + 1 >= self.interval:
            return replace(self, scale=min(self.scale * self.growth, self.most), clean=0)
        return replace(self, clean=self.clean + 1)

    def loaded(self, state: dict[str, Any]) -> Self:
        """Return this scale in a saved state; as it is where a fixed scale was saved."""
        return super().loaded(state) if "clean" in state else self
