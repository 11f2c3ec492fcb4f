"""Puts the ranks' traces together: one file, one clock."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

Event = dict[str, Any]

CLOCK = "ringlet clock"  # a metadata event that says how far a rank's clock is from rank 0's

_BEGAN = "start_time_since_epoch_in_micros"  # what Horovod calls it


def rank_file(path: Path, rank: int) -> Path:
    """Return where rank ``rank`` writes its part of the timeline ``path``."""
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix or '.json'}")


def rank_files(path: Path) -> list[Path]:
    """Return the ranks' parts of the timeline ``path`` that exist, by rank."""
    pattern = re.compile(re.escape(path.stem) + r"\.rank(\d+)" + re.escape(path.suffix or ".json"))
    found = [(pattern.fullmatch(each.name), each) for each in path.parent.glob("*")]
    return [each for _, each in sorted((int(m[1]), each) for m, each in found if m is not None)]


def merge(path: Path, parts: Sequence[Path]) -> dict[str, Any]:
    """Write the events of ``parts`` to ``path``, by rank 0's clock; return what was found.

    Takes parts that end in the middle, as a crash leaves them. Time begins with the first event.
    """
    clocks = {part: _clock(part) for part in parts}
    begins = [_first(part, clocks[part]) for part in parts]
    origin = min((at for at in begins if at is not None), default=0.0)
    said: dict[str, Any] = {"ranks": len(parts), "events": 0, "clock_offsets_us": {}}
    beside = path.with_name(path.name + ".part")
    with beside.open("w") as out:
        out.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for part in parts:
            for event in read(part):
                if "ts" in event:
                    event["ts"] = round(_aligned(event["ts"], clocks[part]) - origin, 3)
                if event.get("name") == CLOCK:
                    pid, found = str(event.get("pid")), event["args"]
                    said["clock_offsets_us"].setdefault(pid, []).append(found["offset_us"])
                    said.setdefault(_BEGAN, round(found["epoch_us"] - event["ts"]))
                out.write(",\n" if said["events"] else "\n")
                out.write(json.dumps(event, separators=(",", ":")))
                said["events"] += 1
        out.write(f'\n], "otherData": {json.dumps(said)}}}\n')
    os.replace(beside, path)
    return said


def read(part: Path) -> Iterator[Event]:
    """Yield the events of one rank's file, as far as they are whole."""
    with part.open(errors="replace") as lines:
        for line in lines:
            text = line.strip().rstrip(",")
            if text in ("", "[", "]"):
                continue
            try:
                event = json.loads(text)
            except ValueError:
                continue  # the last line of a rank that was killed
            if isinstance(event, dict):
                yield event


def _clock(part: Path) -> list[tuple[float, float]]:
    """Return (time, offset) where it was measured, in microseconds."""
    return [
        (float(event["ts"]), float(event["args"]["offset_us"]))
        for event in read(part)
        if event.get("name") == CLOCK
    ]


def _first(part: Path, clock: list[tuple[float, float]]) -> float | None:
    times = [event["ts"] for event in read(part) if "ts" in event]
    return _aligned(min(times), clock) if times else None


def _aligned(at: float, clock: list[tuple[float, float]]) -> float:
    """Return ``at`` by rank 0's clock: clocks drift evenly between two measurements."""
    if not clock:
        return at
    (first, offset), (last, then) = clock[0], clock[-1]
    if last > first:
        offset += (then - offset) * (at - first) / (last - first)
    return at - offset
