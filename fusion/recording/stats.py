"""What compression saved and cost: counters of one rank since the last reset."""

from __future__ import annotations

from dataclasses import asdict, dataclass


@dataclass
class Stats:
    """Counters of one rank, of what it reduces.

    Gathers, broadcasts and rows of sparse gradients do not count. ``raw_bytes`` is what this rank
    would have sent for the same tensors uncompressed by ring allreduce, 2 (W-1)/W of their bytes;
    ``wire_bytes`` is the payload it did send. An allreduce of the transport's own counts as a ring
    here too, though some transports send small ones another way. Times are seconds of the engine's
    thread: compressing, waiting for the network and peers inside collectives, and decompressing.
    Abandoned steps failed on all ranks; skipped ones were reduced and then not taken, because of an
    overflow.
    """

    raw_bytes: float = 0.0
    wire_bytes: float = 0.0
    compress_s: float = 0.0
    communicate_s: float = 0.0
    decompress_s: float = 0.0
    buckets: int = 0
    tensors: int = 0
    abandoned_steps: int = 0
    skipped_steps: int = 0

    @property
    def ratio(self) -> float:
        """How many times fewer bytes were sent than without compression."""
        return self.raw_bytes / self.wire_bytes if self.wire_bytes else 1.0

    def as_dict(self) -> dict[str, float]:
        """Return the counters and the ratio by name."""
        return asdict(self) | {"ratio": self.ratio}
