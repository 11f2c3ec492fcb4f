"""What is tuned, and between which bounds: both on a logarithmic scale."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Setting = Mapping[str, float]  # by the names of ``Limits``

BOUNDS = {
    "fusion_threshold": (1 << 16, 1 << 27),  # bytes
    "cycle_time": (0.0002, 0.05),  # seconds
}


def names(text: str) -> list[str]:
    """Return the names in ``text``, which commas divide. ValueError for one that is not tunable."""
    found = [name.strip() for name in text.split(",") if name.strip()]
    for name in found:
        if name not in BOUNDS:
            raise ValueError(f"autotune: {name!r} is not one of {', '.join(BOUNDS)}")
    return found


def to_unit(setting: Setting, tuned: Sequence[str]) -> dict[str, float]:
    """Return ``setting`` with every value between 0 and 1."""
    unit: dict[str, float] = {}
    for name in tuned:
        low, high = BOUNDS[name]
        place = math.log(setting[name] / low) / math.log(high / low)
        unit[name] = min(1.0, max(0.0, place))
    return unit


def from_unit(unit: Mapping[str, float]) -> dict[str, Any]:
    """Return the setting at a place between 0 and 1: whole pages, microseconds."""
    setting: dict[str, Any] = {}
    for name, place in unit.items():
        low, high = BOUNDS[name]
        value = low * (high / low) ** float(place)
        setting[name] = round(value / 4096) * 4096 if name == "fusion_threshold" else value
    return setting
