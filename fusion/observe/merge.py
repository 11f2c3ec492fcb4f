"""What the ranks' traces are called, and how they come together: one file, one clock."""

from __future__ import annotations

import io
import json
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, BinaryIO

from ringlet.ring.safe_files import replacing

Event = dict[str, Any]
Part = Path | BinaryIO  # one rank's file: its name, or the file itself, open to be read

# Of a timeline, merged or a part, and of Horovod's.
BEGINNINGS = b'{"displayTimeUnit"', b'{"traceEvents"', b"[\n{"
CLOCK = "ringlet clock"  # a metadata event that says how far a rank's clock is from rank 0's

_MOST = 1e18  # microseconds: not so many that they are no numbers any more
_APART = 1.0  # microseconds between two measurements that tell of a drift
_BEGAN = "start_time_since_epoch_in_micros"  # what Horovod calls it


def rank_file(path: Path, rank: int) -> Path:
    """Return where rank ``rank`` writes its part of the timeline ``path``."""
    return path.with_name(f"{path.stem}.rank{rank}{path.suffix or '.json'}")


def rank_files(path: Path) -> list[Path]:
    """Return the ranks' parts of the timeline ``path`` that exist, by rank: no links, no pipes."""
    pattern = re.compile(re.escape(path.stem) + r"\.rank(\d+)" + re.escape(path.suffix or ".json"))
    files = [each for each in path.parent.glob("*") if each.is_file() and not each.is_symlink()]
    found = [(pattern.fullmatch(each.name), each) for each in files]
    return [each for _, each in sorted((int(m[1]), each) for m, each in found if m is not None)]


def merge(path: Path, parts: Sequence[Part]) -> dict[str, Any]:
    """Write the events of ``parts`` to ``path``, by rank 0's clock; return what was found.

    Takes parts that end in the middle, as a crash leaves them. Time begins with the first event.
    """
    clocks = [_clock(part) for part in parts]
    begins = [_first(part, clock) for part, clock in zip(parts, clocks, strict=True)]
    origin = min((at for at in begins if at is not None), default=0.0)
    said: dict[str, Any] = {"ranks": len(parts), "events": 0, "clock_offsets_us": {}}
    with replacing(path) as file, io.TextIOWrapper(file, encoding="utf-8") as out:
        out.write('{"displayTimeUnit": "ms", "traceEvents": [')
        for part, clock in zip(parts, clocks, strict=True):
            for event in read(part):
                if "ts" in event:
                    event["ts"] = round(_aligned(event["ts"], clock) - origin, 3)
                if event.get("name") == CLOCK:
                    pid, found = str(event.get("pid")), event["args"]
                    said["clock_offsets_us"].setdefault(pid, []).append(found["offset_us"])
                    said.setdefault(_BEGAN, round(found["epoch_us"] - event["ts"]))
                out.write(",\n" if said["events"] else "\n")
                out.write(json.dumps(event, separators=(",", ":"), allow_nan=False))
                said["events"] += 1
        out.write(f'\n], "otherData": {json.dumps(said, allow_nan=False)}}}\n')
    return said


def read(part: Part) -> Iterator[Event]:
    """Yield the events of one rank's file, as far as they are whole; from its beginning."""
    with part.open("rb") if isinstance(part, Path) else nullcontext(part) as lines:
        if not isinstance(part, Path):
            part.seek(0)
        for line in lines:
            text = line.decode(errors="replace").strip().rstrip(",")
            if text in ("", "[", "]"):
                continue
            try:
                event = _decoded(text)
            except (ValueError, RecursionError):
                continue  # the last line of a rank that was killed
            if isinstance(event, dict) and _is_whole(event):
                yield event


def _finite(text: str) -> float:
    """Return a number that JSON can hold. Raises ValueError for NaN, Infinity and 1e999."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text} is no number of JSON")
    return number


_decoded = json.JSONDecoder(parse_constant=_finite, parse_float=_finite).decode


def _is_whole(event: Event) -> bool:
    """Whether an event has the numbers that it is placed by, if any."""
    numbers = [event["ts"]] if "ts" in event else []
    if event.get("name") == CLOCK:
        args = event.get("args")
        if "ts" not in event or not isinstance(args, dict):
            return False
        numbers += [args.get("offset_us"), args.get("epoch_us")]
    return all(type(n) in (int, float) and abs(n) < _MOST for n in numbers)


def _clock(part: Part) -> list[tuple[float, float]]:
    """Return (time, offset) where it was measured, in microseconds."""
    return [
        (float(event["ts"]), float(event["args"]["offset_us"]))
        for event in read(part)
        if event.get("name") == CLOCK
    ]


def _first(part: Part, clock: list[tuple[float, float]]) -> float | None:
    times = [event["ts"] for event in read(part) if "ts" in event]
    return _aligned(min(times), clock) if times else None


def _aligned(at: float, clock: list[tuple[float, float]]) -> float:
    """Return ``at`` by rank 0's clock: clocks drift evenly between two measurements."""
    if not clock:
        return at
    (first, offset), (last, then) = clock[0], clock[-1]
    if last - first >= _APART:
        offset += (then - offset) * (at - first) / (last - first)
    return at - offset
