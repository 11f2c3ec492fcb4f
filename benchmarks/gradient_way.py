"""The way of one gradient through the code: Python calls, files, and steps between packages.

    ringlet run -np 2 python benchmarks/gradient_way.py [--compression SPEC] [--files] [--json PATH]

One rank of two trains one parameter with ``DistributedOptimizer``. What its threads call from the
end of backward's arithmetic to the end of ``step()`` is counted, per step, as the median over
steps: ``calls`` of Ringlet's own Python functions, ``files`` that they stand in, and ``crossings``,
calls that lead from one package (frameworks, fusion, compressors, ring) into another. Waiting is
not counted: a loop that looks again does so more often on a busy machine, and its calls vary.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import ringlet.torch as hvd

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("frameworks", "fusion", "compressors", "ring")
WARM_UP, STEPS = 10, 31


class Way:
    """Counts calls while it is switched on, by thread."""

    def __init__(self) -> None:
        self.on = False
        self.calls: Counter[str] = Counter()  # by file
        self.crossings: Counter[tuple[str, str]] = Counter()
        self.order: list[str] = []  # files, as they are first come to
        self._of: dict[str, tuple[str, str] | None] = {}

    def profile(self, frame: FrameType, event: str, _: Any) -> None:
        """Note a call; what ``sys.setprofile`` and ``threading.setprofile`` take."""
        if not self.on or event != "call":
            return
        here = self._place(frame)
        if here is None:
            return
        file, package = here
        if file not in self.calls:
            self.order.append(file)
        self.calls[file] += 1
        caller = frame.f_back
        while caller is not None and (there := self._place(caller)) is None:
            caller = caller.f_back  # out of torch's or the standard library's own functions
        if caller is not None and there is not None and there[1] != package:
            self.crossings[there[1], package] += 1

    def _place(self, frame: FrameType) -> tuple[str, str] | None:
        """Return a function's file, from the root of the project, and its package."""
        name = frame.f_code.co_filename
        if name not in self._of:
            path = Path(name).resolve()
            inside = path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PACKAGES
            file = path.relative_to(ROOT) if inside else None
            self._of[name] = (file.as_posix(), file.parts[0]) if file else None
        return self._of[name]

    def take(self) -> dict[str, Any]:
        """Return what was counted since the last time."""
        counted = {
            "calls": self.calls.total(),
            "files": len(self.calls),
            "crossings": self.crossings.total(),
            "fusion_ring": self.crossings["fusion", "ring"] + self.crossings["ring", "fusion"],
            "order": [(file, self.calls[file]) for file in self.order],
        }
        self.calls.clear()
        self.crossings.clear()
        self.order.clear()
        return counted


def main() -> None:
    """Train, count, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--compression", default="int8 | ef", help="spec (default: %(default)s)")
    parser.add_argument("--elements", type=int, default=1 << 16)
    parser.add_argument("--files", action="store_true", help="list the files and their calls")
    parser.add_argument("--json", type=Path, help="write the figures there as well")
    given = parser.parse_args()
    way = Way()
    threading.setprofile(way.profile)  # the engine's threads begin with init()
    hvd.init()
    weight = torch.nn.Parameter(torch.zeros(given.elements))
    inner = torch.optim.SGD([weight], lr=0.1)
    optimizer = hvd.DistributedOptimizer(inner, [("w", weight)], compression=given.compression)
    noise = torch.randn(given.elements, generator=torch.Generator().manual_seed(hvd.rank()))
    steps: list[dict[str, Any]] = []
    for step in range(WARM_UP + STEPS):
        optimizer.zero_grad()
        loss = (weight * noise).sum()
        hvd.barrier()
        sys.setprofile(way.profile)
        way.on = True
        loss.backward()
        optimizer.step()
        way.on = False
        sys.setprofile(None)
        counted = way.take()
        if step >= WARM_UP:
            steps.append(counted)
    threading.setprofile(None)
    if hvd.rank() == 0:
        tell(steps, given)
    hvd.shutdown()


def tell(steps: list[dict[str, Any]], given: argparse.Namespace) -> None:
    """Print medians over ``steps``, and the way of a median step."""
    keys = ("calls", "files", "crossings", "fusion_ring")
    medians = {key: statistics.median(step[key] for step in steps) for key in keys}
    typical = min(steps, key=lambda step: abs(step["calls"] - medians["calls"]))
    print(
        f"one tensor, {given.compression!r}, from backward to the end of step(): "
        f"{medians['calls']:.0f} calls in {medians['files']:.0f} files, "
        f"{medians['crossings']:.0f} from one package into another, "
        f"of them {medians['fusion_ring']:.0f} between fusion and ring"
    )
    if given.files:
        for file, calls in typical["order"]:
            print(f"{calls:5d}  {file}")
    if given.json:
        given.json.write_text(json.dumps({**medians, "way": typical["order"]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
