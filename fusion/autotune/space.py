"""What can be tuned, and between which bounds: numbers on a logarithmic scale, and switches."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Setting = Mapping[str, Any]  # by the names of ``Limits``

BOUNDS: dict[str, tuple[float, float]] = {
    "fusion_threshold": (1 << 16, 1 << 27),  # bytes
    "cycle_time": (0.0002, 0.05),  # seconds
    "streams": (1, 8),
    "cache": (False, True),
    "hierarchical": (False, True),
}
SWITCHES = frozenset(name for name, (low, _) in BOUNDS.items() if low is False)


def to_unit(setting: Setting, tuned: Sequence[str]) -> dict[str, float]:
    """Return ``setting`` with every value between 0 and 1.

    A value beyond its bounds, which a user may have set, is taken for the bound.
    """
    unit: dict[str, float] = {}
    for name in tuned:
        if name in SWITCHES:
            unit[name] = float(setting[name])
            continue
        low, high = BOUNDS[name]
        within = min(high, max(low, setting[name]))  # 0, too, of which there is no logarithm
        unit[name] = math.log(within / low) / math.log(high / low)
    return unit


def from_unit(unit: Mapping[str, float]) -> dict[str, Any]:
    """Return the setting nearest to a place between 0 and 1: whole pages and streams."""
    return {name: _value(name, float(place)) for name, place in unit.items()}


def _value(name: str, place: float) -> float:
    if name in SWITCHES:
        return place >= 0.5
    low, high = BOUNDS[name]
    value: float = low * (high / low) ** place
    if name == "fusion_threshold":
        return round(value / 4096) * 4096
    return round(value) if name == "streams" else value
