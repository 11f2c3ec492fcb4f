"""What the engine may be tuned by, and the defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from ringlet.ring.pipeline import DEPTH


class Link(NamedTuple):
    """The network between two hosts: ``latency`` of a message in seconds, ``bandwidth`` in bytes/s.

    A bandwidth of 0 says that nothing is known. ``prefer`` is the collective that the user wants
    wherever a compressor can be moved by either, "allgather" or "scatter_reduce".
    """

    latency: float = 0.0
    bandwidth: float = 0.0
    prefer: str = "auto"


UNKNOWN = Link()
DIVISORS = ("all", "contributors")


@dataclass(frozen=True)
class Limits:
    """What an engine may be tuned by, in bytes and seconds.

    All ranks need the same ``fusion_threshold``, ``cache_capacity``, ``seed``, ``verify_sums``,
    ``join_divisor`` and link.

    ``fusion_threshold`` is in bytes of uncompressed tensors, ``cycle_time`` in seconds: how long
    single submissions wait for company when nobody waits for them. ``cache_capacity`` is how many
    requests get a number of their own. ``seed`` feeds the random numbers of compressors. What waits
    for other ranks for ``stall_warning`` seconds is reported on rank 0, and after
    ``stall_shutdown`` seconds ends the engine on all ranks; 0 stands for never.

    ``lookahead`` is how many bytes of other streams the scan for a bucket's next tensor passes:
    None stands for ``fusion_threshold``, and 0 ends a bucket wherever the type changes.

    ``latency`` (seconds) and ``bandwidth`` (bytes/s) are those of the link between hosts, by which
    collectives are chosen (``ringlet.fusion.planning.strategy``); a bandwidth of 0 is an unknown
    link. ``collective`` settles the choice: "allgather" or "scatter_reduce", where either can be.

    ``streams`` is how many exchanges are under way at once, at least 1, where the transport can
    wait for several. Without ``cache`` single submissions are asked for by name each time, though
    they have numbers. ``hierarchical`` lets uncompressed buckets go through two levels where the
    communicator has them; compressed ones always do. Ranks compare checksums of what sums on
    the wire gave, in host memory, one step later: of all (1), or of one in ``verify_sums`` spans of
    large ones, in turn; 0 stands for none, and None for what suits the hosts.

    ``join_divisor`` says what an average is divided by while ranks have joined: "all" ranks, as in
    Horovod, or the "contributors", those whose own values it is of.

    ``autotune`` names what is tuned while training goes on, divided by commas: "fusion_threshold",
    "cycle_time", "streams", "cache", "hierarchical", or "all" that make a difference here, of which
    "-" takes some away: "all,-cache". Nothing that changes a compressor's result is tuned.
    ``autotune_log`` is a CSV file on rank 0. A setting's score is the median of five windows of
    ``autotune_steps`` steps; after ``autotune_warmup`` windows and ``autotune_samples`` settings
    the best one stays. Raises ValueError for fewer than 1 stream, or another divisor.
    """

    fusion_threshold: int = 16 << 20
    cycle_time: float = 0.001
    seed: int = 0
    cache_capacity: int = 4096
    stall_warning: float = 60.0
    stall_shutdown: float = 0.0
    lookahead: int | None = None
    streams: int = DEPTH
    cache: bool = True
    hierarchical: bool = True
    verify_sums: int | None = None
    latency: float = 0.0
    bandwidth: float = 0.0
    collective: str = "auto"
    join_divisor: str = "all"
    autotune: str = ""
    autotune_log: str = ""
    autotune_warmup: int = 3
    autotune_steps: int = 10
    autotune_samples: int = 24

    def __post_init__(self) -> None:
        if self.streams < 1:
            raise ValueError(f"streams (RINGLET_STREAMS) must be at least 1, not {self.streams}")
        if self.join_divisor not in DIVISORS:
            raise ValueError(
                f"join_divisor (RINGLET_JOIN_DIVISOR) is one of {', '.join(DIVISORS)}, not "
                f"{self.join_divisor!r}"
            )

    @property
    def share(self) -> int:
        """Of how many spans of large sums ranks compare one; 0: of none."""
        return 1 if self.verify_sums is None else self.verify_sums

    @property
    def link(self) -> Link:
        """The link between hosts."""
        return Link(self.latency, self.bandwidth, self.collective)
