"""What the engine may be tuned by."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Limits:
    """All ranks need the same ``fusion_threshold``, ``cache_capacity`` and ``seed``.

    ``fusion_threshold`` is in bytes of uncompressed tensors, ``cycle_time`` in seconds: how long
    single submissions wait for company when nobody waits for them. ``cache_capacity`` is how many
    requests get a number of their own. ``seed`` feeds the random numbers of compressors. What waits
    for other ranks for ``stall_warning`` seconds is reported on rank 0, and after
    ``stall_shutdown`` seconds ends the engine on all ranks; 0 stands for never.
    """

    fusion_threshold: int = 16 << 20
    cycle_time: float = 0.001
    seed: int = 0
    cache_capacity: int = 4096
    stall_warning: float = 60.0
    stall_shutdown: float = 0.0
