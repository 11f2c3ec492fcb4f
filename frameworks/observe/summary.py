"""What a run's records say: sums, medians, and a verdict in one sentence."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from ringlet.observe.records import Record, checked

PHASES = ("compress", "communicate", "decompress")
_EVEN = 0.1  # differences below this share of the time are no difference


class NotARun(ValueError):
    """A file does not hold a run's records; the message says which, and what it lacks."""


@dataclass
class Run:
    """The records of one rank, by kind. Steps are those of the group that sent the most."""

    facts: Record = field(default_factory=dict)
    steps: list[Record] = field(default_factory=list)
    layers: list[Record] = field(default_factory=list)
    failed: list[Record] = field(default_factory=list)
    torn: int = 0  # lines that could not be read

    @property
    def settled(self) -> list[Record]:
        """The steps without the first tenth, at most five: those compile and allocate."""
        return self.steps[min(5, len(self.steps) // 10) :]

    def median(self, name: str) -> float:
        """Return the median of a field over the settled steps."""
        return float(statistics.median(step[name] for step in self.settled))

    def time(self, phase: str) -> float:
        """Return a step's seconds in ``phase``, by median."""
        return self.median(f"{phase}_s")

    @property
    def exchange(self) -> float:
        """What a step's exchange took of the engine's time, in seconds, by median."""
        return float(statistics.median(sum(s[f"{p}_s"] for p in PHASES) for s in self.settled))

    @property
    def uncompressed(self) -> float | None:
        """What it would have taken uncompressed, in seconds, as far as the network is known."""
        if not all("uncompressed_s" in step for step in self.settled):
            return None
        return self.median("uncompressed_s")

    @property
    def ratio(self) -> float:
        """How many times fewer bytes were sent, over all steps."""
        wire = sum(step["wire_bytes"] for step in self.steps)
        return sum(step["raw_bytes"] for step in self.steps) / wire if wire else 1.0

    def last_layers(self) -> list[Record]:
        """Return the layers as they were last measured, the largest first."""
        found: list[Record] = self.layers[-1]["layers"] if self.layers else []
        return sorted(found, key=lambda layer: -float(layer["raw_bytes"]))


def read(path: str | os.PathLike[str]) -> Run:
    """Read a file of JSON lines. Raises OSError, or NotARun when it holds no step."""
    run = Run()
    with Path(path).open(encoding="utf-8", errors="replace") as lines:
        records, run.torn = _parsed(lines)
    sent: dict[str, float] = {}
    for record in records:
        if record["kind"] == "step":
            group = record["group"]
            sent[group] = sent.get(group, 0.0) + record["raw_bytes"]
    if not sent:
        raise NotARun(
            f"{path} holds no step of a training run; RINGLET_METRICS={path} writes one, "
            "or ringlet.observe.start_metrics"
        )
    chosen = max(sent, key=lambda group: sent[group])
    for record in records:
        kind = record["kind"]
        if kind == "run":
            run.facts = record
        elif kind in ("abandoned", "skipped"):
            run.failed.append(record)
        elif record.get("group") == chosen and kind == "step":
            run.steps.append(record)
        elif record.get("group") == chosen and kind == "layers":
            run.layers.append(record)
    return run


def _parsed(lines: Iterable[str]) -> tuple[list[Record], int]:
    records: list[Record] = []
    torn = 0
    for line in lines:
        try:
            record = checked(json.loads(line))
        except (ValueError, RecursionError):
            record = None
        if record is not None:
            records.append(record)
        else:
            torn += 1
    return records, torn


def verdict(run: Run) -> tuple[str, str]:
    """Return ("paid", "even", "cost" or "unknown") and the sentence that says why."""
    took, plain, ratio = run.exchange, run.uncompressed, run.ratio
    if ratio < 1.02:
        return "even", (
            "Nothing was compressed: as many bytes were sent as without compression. "
            f"A step's exchange took {duration(took)}."
        )
    fewer = f"{ratio:.1f} times fewer bytes were sent"
    if plain is None:
        return "unknown", (
            f"{fewer}. Whether that saved time cannot be said: the network was not measured."
        )
    if abs(took - plain) <= _EVEN * max(took, plain):
        return "even", (
            f"Compression made no difference to the time: {fewer}, but a step's exchange took "
            f"{duration(took)}, and would take about {duration(plain)} without."
        )
    if took < plain:
        return "paid", (
            f"Compression paid: {fewer}, and a step's exchange took {duration(took)} instead of "
            f"about {duration(plain)}."
        )
    codec = run.time("compress") + run.time("decompress")
    return "cost", (
        f"Compression cost more than it saved: {fewer}, yet a step's exchange took "
        f"{duration(took)}, {duration(codec)} of it in compressors, where about "
        f"{duration(plain)} would do without. On this network, train with compression='none'."
    )


def duration(seconds: float) -> str:
    """Return a time as one reads it."""
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if seconds >= size:
            return f"{_short(seconds / size)} {unit}"
    return f"{_short(seconds * 1e6)} µs"


def amount(nbytes: float) -> str:
    """Return a number of bytes as one reads it."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{_short(nbytes / size)} {unit}"
    return f"{nbytes:.0f} B"


def _short(value: float) -> str:
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f}"


def binned(values: Sequence[float], most: int = 240) -> list[tuple[int, int, float]]:
    """Return (first, last, median) of at most ``most`` equal stretches of ``values``."""
    width = max(1, -(-len(values) // most))
    return [
        (
            start,
            min(start + width, len(values)) - 1,
            statistics.median(values[start : start + width]),
        )
        for start in range(0, len(values), width)
    ]
