"""What a run's records say: sums, medians, and a verdict in one sentence."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from pathlib import Path

from ringlet.report.records import Record, checked

PHASES = ("compress", "communicate", "decompress")
EVEN = 0.1  # differences below this share of the time are no difference


class NotARun(ValueError):
    """A file does not hold a run's records; the message says which, and what it lacks."""


@dataclass
class GroupSummary:
    """What belongs to one optimizer, say: its steps, and what each layer sent in them.

    Of tensors that were submitted one by one a step is what was sent in about a second.
    """

    name: str = ""
    steps: list[Record] = field(default_factory=list)
    layers: list[Record] = field(default_factory=list)

    @property
    def settled(self) -> list[Record]:
        """The steps without the first tenth, at most five: those compile and allocate."""
        return self.steps[min(5, len(self.steps) // 10) :]

    def median(self, name: str) -> float:
        """Return the median of a field over the settled steps."""
        return float(statistics.median(step[name] for step in self.settled))

    def sum(self, *names: str) -> float:
        """Return what fields add up to over all steps, the first ones too."""
        return float(sum(step[name] for step in self.steps for name in names))

    def time(self, phase: str) -> float:
        """Return a step's seconds in ``phase``, by median."""
        return self.median(f"{phase}_s")

    @property
    def exchanges(self) -> list[float]:
        """What the exchange of each settled step took of the engine's time, in seconds."""
        return [float(sum(s[f"{p}_s"] for p in PHASES)) for s in self.settled]

    @property
    def exchange(self) -> float:
        """What a step's exchange took of the engine's time, in seconds, by median."""
        return float(statistics.median(self.exchanges))

    @property
    def specs(self) -> list[str]:
        """The compressors of the layers, those of the most bytes first."""
        found: dict[str, float] = {}
        for layer in self.last_layers():
            found[layer["compressor"]] = found.get(layer["compressor"], 0.0) + layer["raw_bytes"]
        return sorted(found, key=lambda spec: -found[spec])

    @property
    def intervals(self) -> list[float]:
        """Seconds from the end of each settled step to that of the next: training's own pace."""
        ends = [step["time"] for step in self.settled if "time" in step]
        return [max(0.0, b - a) for a, b in pairwise(ends)]

    @property
    def uncompressed(self) -> tuple[float, float] | None:
        """What it would have taken uncompressed, as far as the network is known.

        The least and an upper bound, in seconds; the same where the file tells of no bound.
        """
        if not all("uncompressed_s" in step for step in self.settled):
            return None
        least = self.median("uncompressed_s")
        bounded = all("uncompressed_most_s" in step for step in self.settled)
        return least, max(least, self.median("uncompressed_most_s")) if bounded else least

    @property
    def ratio(self) -> float:
        """How many times fewer bytes were sent, over all steps."""
        wire = self.sum("wire_bytes")
        return self.sum("raw_bytes") / wire if wire else 1.0

    def last_layers(self) -> list[Record]:
        """Return the layers as they were last measured, the largest first."""
        found: list[Record] = self.layers[-1]["layers"] if self.layers else []
        return sorted(found, key=lambda layer: -float(layer["raw_bytes"]))


LOOSE = "operations submitted one by one"


@dataclass
class RunSummary(GroupSummary):
    """The records of one rank, by kind. Its own steps are those of the group that sent the most.

    ``others`` are the other groups, such as another optimizer's; those that sent more come first.
    ``loose`` is what was submitted one by one, and belongs to no step: of a run that has steps it
    counts in none. ``waiting`` is what was warned of, that ranks waited for others.
    """

    facts: Record = field(default_factory=dict)
    failed: list[Record] = field(default_factory=list)
    torn: int = 0  # lines that could not be read
    others: list[GroupSummary] = field(default_factory=list)
    loose: GroupSummary | None = None
    waiting: list[str] = field(default_factory=list)

    @property
    def groups(self) -> list[GroupSummary]:
        """All groups that have steps; this run's own first."""
        return [self, *self.others]

    def per_step(self, value: Callable[[GroupSummary], float]) -> float:
        """Add up a group's median over all groups, for one step of this run's own."""
        return sum(value(g) * len(g.steps) / len(self.steps) for g in self.groups)

    @property
    def took(self) -> tuple[float, float, float]:
        """What the exchanges of a step took: the median, and the bounds that it lies within."""
        low, high = (self.per_step(lambda g, i=i: spread(g.exchanges)[i]) for i in (0, 1))  # type: ignore[misc]
        return self.per_step(lambda group: group.exchange), low, high

    @property
    def slowest(self) -> float:
        """What the exchanges of 95 % of the steps do not exceed, in seconds."""
        return self.per_step(lambda group: percentile(group.exchanges, 0.95))

    @property
    def without(self) -> tuple[float, float] | None:
        """What they would have taken uncompressed, as far as the network is known: bounds."""
        if any(group.uncompressed is None for group in self.groups):
            return None
        least, most = (
            self.per_step(lambda g, i=i: (g.uncompressed or (0.0, 0.0))[i])  # type: ignore[misc]
            for i in (0, 1)
        )
        return least, most

    @property
    def one_host(self) -> bool:
        """Whether all ranks ran on one host, as far as that is known."""
        return len(self.facts.get("hosts", ())) == 1

    @property
    def fewer(self) -> float:
        """How many times fewer bytes were sent, by all groups."""
        raw, wire = (
            sum(group.sum(name) for group in self.groups) for name in ("raw_bytes", "wire_bytes")
        )
        return raw / wire if wire else 1.0


def spread(values: Sequence[float]) -> tuple[float, float]:
    """Return bounds of what the median is, from how it differs between stretches of the run.

    Of ten stretches, the medians without the lowest and the highest; all that there are of fewer
    than eight. Steps near each other are alike, so that their number alone says little.
    """
    if len(values) < 16:
        return min(values), max(values)
    count = min(10, len(values) // 4)
    bounds = [len(values) * i // count for i in range(count + 1)]
    medians = sorted(statistics.median(values[a:b]) for a, b in pairwise(bounds))
    return (medians[1], medians[-2]) if count >= 8 else (medians[0], medians[-1])


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that ``share`` of all do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def read(path: str | os.PathLike[str]) -> RunSummary:
    """Read a file of JSON lines. Raises OSError, or NotARun when it holds no step."""
    run = RunSummary()
    groups: dict[str, GroupSummary] = {}
    loose = GroupSummary(LOOSE)
    with Path(path).open(encoding="utf-8", errors="replace") as lines:
        records, run.torn = _parsed(lines)
    for record in records:
        kind = record["kind"]
        if kind == "run":
            run.facts = record
        elif kind in ("abandoned", "skipped"):
            run.failed.append(record)
        elif kind == "waiting":
            run.waiting.append(record["text"])
        elif kind == "step":
            groups.setdefault(record["group"], GroupSummary(record["group"])).steps.append(record)
        elif kind == "layers":
            groups.setdefault(record["group"], GroupSummary(record["group"])).layers.append(record)
        elif kind == "loose":
            loose.steps.append(record | {"step": len(loose.steps)})
    found = sorted((group for group in groups.values() if group.steps), key=_most)
    if found:
        run.loose = loose if loose.steps else None
    elif loose.steps:
        found = [loose]
    else:
        raise NotARun(
            f"{path} holds no step of a training run, and no operation"
            + ("" if records else ": none of its lines is a record of one")
            + "; RINGLET_METRICS=run.jsonl lets a run write a file that does, or "
            "ringlet.observe.start_metrics"
        )
    first, *run.others = found
    run.name, run.steps, run.layers = first.name, first.steps, first.layers
    return run


def _most(group: GroupSummary) -> float:
    """Sort what sent more first."""
    return -group.sum("raw_bytes")


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


def verdict(run: RunSummary) -> tuple[str, str]:
    """Return ("paid", "even", "cost", "unclear" or "unknown") and the sentence that says why.

    The bounds of what exchanges took, and would have taken, decide: where they hold more than one
    of the first three, it is unclear. So it is where all ranks share one host: there the estimate
    is of cores and memory, which training itself keeps busy.
    """
    took, low, high = run.took
    bounds, ratio = run.without, run.fewer
    shown = between(took, low, high)
    if ratio < 1.02:
        return "even", (
            "Nothing was compressed: as many bytes were sent as without compression. "
            f"A step's exchange took {shown}."
        )
    fewer = f"{ratio:.1f} times fewer bytes were sent"
    if bounds is None:
        return "unknown", (
            f"{fewer}. Whether that saved time cannot be said: the network was not measured."
        )
    plain = span(*bounds)
    kinds = {_compared(ours, theirs) for ours in (low, took, high) for theirs in bounds}
    if run.one_host or len(kinds) > 1:
        why, advice = ("", "Record more steps, or a run")
        if run.one_host:
            why = ", by an estimate that says little where all ranks share one host"
            advice = "Record a run"
        return "unclear", (
            f"Unclear whether compression paid: {fewer}, and a step's exchange took {shown}, where "
            f"about {plain} would do without{why}. {advice} without "
            "compression, and compare: ringlet report none.jsonl this.jsonl"
        )
    (kind,) = kinds
    if kind == "even":
        return "even", (
            f"Compression made no difference to the time: {fewer}, but a step's exchange took "
            f"{shown}, and would take about {plain} without."
        )
    if kind == "paid":
        return "paid", (
            f"Compression paid: {fewer}, and a step's exchange took {shown} instead of "
            f"about {plain}."
        )
    codec = run.per_step(lambda group: group.time("compress") + group.time("decompress"))
    return "cost", (
        f"Compression cost more than it saved: {fewer}, yet a step's exchange took "
        f"{shown}, {duration(codec)} of it in compressors, where about "
        f"{plain} would do without. On this network, train with compression='none'."
    )


def _compared(took: float, plain: float) -> str:
    if abs(took - plain) <= EVEN * max(took, plain):
        return "even"
    return "paid" if took < plain else "cost"


def span(low: float, high: float) -> str:
    """Return two bounds as one reads them, or the one time that they both are."""
    first, last = duration(low), duration(high)
    return first if first == last else f"{first} to {last}"


def between(middle: float, low: float, high: float) -> str:
    """Return a time with its bounds, where these differ from it as one reads them."""
    if duration(low) == duration(middle) == duration(high):
        return duration(middle)
    return f"{duration(middle)} ({duration(low)} to {duration(high)})"


def facts_of(run: RunSummary, name: str) -> str:
    """Return what is known of a run, in a line: file, compressors, versions, ranks, network."""
    facts, steps = run.facts, run.steps
    told = [name]
    specs = list(dict.fromkeys(spec for group in run.groups for spec in group.specs))
    told += (
        [f"compression {', '.join(specs[:4])}{' ...' if len(specs) > 4 else ''}"] if specs else []
    )
    told += [f"{package} {version}" for package, version in facts.get("versions", {}).items()]
    if "size" in facts:
        hosts = len(facts.get("hosts", [])) or 1
        told.append(f"{facts['size']} ranks on {hosts} host{'s' if hosts > 1 else ''}")
        told += [f"transport {facts['transport']}"] if "transport" in facts else []
        told += [f"seen from rank {facts['rank']}"] if "rank" in facts else []
    network = facts.get("network")
    if network and facts.get("size", 1) > 1:
        rate = network["bytes_per_s"] * 8 / 1e9
        told.append(f"network measured at {rate:.3g} Gbit/s, {duration(network['latency_s'])}")
    told.append(f"{len(steps)} steps, {datetime.fromtimestamp(steps[0]['time']):%Y-%m-%d %H:%M}")
    if run.loose:
        told.append(f"beside them {amount(run.loose.sum('wire_bytes'))} by {LOOSE}")
    if run.torn:
        told.append(f"{run.torn} unreadable lines left out")
    return " · ".join(told)


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
    """Return (first, last, median) of at most ``most`` equal stretches of ``values``.

    A NaN is a value that was not measured; the median of NaNs alone is NaN.
    """
    width = max(1, -(-len(values) // most))
    found = []
    for start in range(0, len(values), width):
        measured = [v for v in values[start : start + width] if not math.isnan(v)]
        median = statistics.median(measured) if measured else math.nan
        found.append((start, min(start + width, len(values)) - 1, median))
    return found
