"""What the engine may be tuned by."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class Link(NamedTuple):
    """The network between two hosts: ``latency`` of a message in seconds, ``bandwidth`` in bytes/s.

    A bandwidth of 0 says that nothing is known. ``prefer`` is the collective that the user wants
    wherever a compressor can be moved by either, "allgather" or "scatter_reduce".
    """

    latency: float = 0.0
    bandwidth: float = 0.0
    prefer: str = "auto"


UNKNOWN = Link()


@dataclass(frozen=True)
class Limits:
    """All ranks need the same ``fusion_threshold``, ``cache_capacity``, ``seed`` and link.

    ``fusion_threshold`` is in bytes of uncompressed tensors, ``cycle_time`` in seconds: how long
    single submissions wait for company when nobody waits for them. ``cache_capacity`` is how many
    requests get a number of their own. ``seed`` feeds the random numbers of compressors. What waits
    for other ranks for ``stall_warning`` seconds is reported on rank 0, and after
    ``stall_shutdown`` seconds ends the engine on all ranks; 0 stands for never.

    ``lookahead`` is how many bytes of other streams the scan for a bucket's next tensor passes:
    None stands for ``fusion_threshold``, and 0 ends a bucket wherever the type changes.

    ``latency`` (seconds) and ``bandwidth`` (bytes/s) are those of the link between hosts, by which
    collectives are chosen (``ringlet.fusion.strategy``); a bandwidth of 0 is an unknown link.
    ``collective`` settles the choice: "allgather" or "scatter_reduce", where either is possible.

    ``autotune`` names what is tuned while training goes on, "fusion_threshold,cycle_time" or one of
    them; nothing that changes a compressor's result is. ``autotune_log`` is a CSV file on rank 0.
    A setting's score is the median of five windows of ``autotune_steps`` steps; after
    ``autotune_warmup`` windows and ``autotune_samples`` settings the best one stays.
    """

    fusion_threshold: int = 16 << 20
    cycle_time: float = 0.001
    seed: int = 0
    cache_capacity: int = 4096
    stall_warning: float = 60.0
    stall_shutdown: float = 0.0
    lookahead: int | None = None
    latency: float = 0.0
    bandwidth: float = 0.0
    collective: str = "auto"
    autotune: str = ""
    autotune_log: str = ""
    autotune_warmup: int = 3
    autotune_steps: int = 10
    autotune_samples: int = 24

    @property
    def link(self) -> Link:
        """The link between hosts."""
        return Link(self.latency, self.bandwidth, self.collective)
