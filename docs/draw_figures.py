"""Draw the figures of the site and of the README, as SVG, from what benchmarks have measured.

    python docs/draw_figures.py [--check]

Reads ``benchmarks/results`` and the table of ``docs/convergence.md``; writes ``docs/figures``.
``--check`` fails instead where a figure is not what would be drawn. Figures have a ground of their
own, light or dark as the reader's system is, so that they are readable on any page.
"""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from ringlet.cli.doctor import CodecCost, _crossing, _work
from ringlet.compressors import parse

ROOT = Path(__file__).resolve().parents[1]
RESULTS, FIGURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "figures"
STYLE = """
text { font: 12px system-ui, sans-serif; fill: #1f2328 }
.paper { fill: #ffffff } .soft { fill: #57606a } .title { font-weight: 600; font-size: 14px }
.grid { stroke: #d0d7de; stroke-width: 1; fill: none } .even { stroke: #57606a; fill: none }
.line { fill: none; stroke-width: 2; stroke-linejoin: round } .dash { stroke-dasharray: 5 4 }
.c0 { stroke: #0969da } .f0 { fill: #0969da } .c1 { stroke: #bc4c00 } .f1 { fill: #bc4c00 }
.c2 { stroke: #1a7f37 } .f2 { fill: #1a7f37 } .c3 { stroke: #8250df } .f3 { fill: #8250df }
.c4 { stroke: #bf3989 } .f4 { fill: #bf3989 } .c5 { stroke: #6e7781 } .f5 { fill: #6e7781 }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3 } .paper { fill: #0d1117 } .soft { fill: #9198a1 }
  .grid { stroke: #30363d } .even { stroke: #9198a1 }
  .c0 { stroke: #58a6ff } .f0 { fill: #58a6ff } .c1 { stroke: #f0883e } .f1 { fill: #f0883e }
  .c2 { stroke: #56d364 } .f2 { fill: #56d364 } .c3 { stroke: #bc8cff } .f3 { fill: #bc8cff }
  .c4 { stroke: #f778ba } .f4 { fill: #f778ba } .c5 { stroke: #8b949e } .f5 { fill: #8b949e }
}
"""


class Series(NamedTuple):
    """A line through (x, y), drawn in colour ``colour`` (0 to 5), dashed if ``dashed``."""

    name: str
    points: Sequence[tuple[float, float]]
    colour: int
    dashed: bool = False


class Axis(NamedTuple):
    """An axis from ``low`` to ``high`` with (value, text) ``ticks``; logarithmic if ``log``."""

    label: str
    low: float
    high: float
    ticks: Sequence[tuple[float, str]]
    log: bool = False

    def place(self, value: float) -> float:
        """Return where ``value`` is, from 0 to 1."""
        scale: Callable[[float], float] = math.log if self.log else float
        low, high = scale(self.low), scale(self.high)
        return (scale(min(max(value, self.low), self.high)) - low) / (high - low)


class Panel:
    """A chart at (x, y) of a figure, ``wide`` x ``high`` pixels without its labels."""

    def __init__(
        self, x: float, y: float, wide: float, high: float, across: Axis, up: Axis
    ) -> None:
        self.x, self.y, self.wide, self.high = x, y, wide, high
        self.across, self.up = across, up
        self.labels: list[tuple[float, float, float]] = []  # left, right, and height of each

    def at(self, x: float, y: float) -> tuple[float, float]:
        """Return the pixel of a value."""
        left = self.x + self.wide * self.across.place(x)
        return left, self.y + self.high * (1 - self.up.place(y))

    def frame(self) -> list[str]:
        """Return the grid, the ticks and the names of the axes."""
        bottom, right = self.y + self.high, self.x + self.wide
        out = []
        for value, text in self.up.ticks:
            y = self.at(self.across.low, value)[1]
            out.append(f'<path class="grid" d="M{self.x:.0f} {y:.1f}H{right:.0f}"/>')
            out.append(words(self.x - 8, y + 4, text, "soft", "end"))
        for value, text in self.across.ticks:
            x = self.at(value, self.up.low)[0]
            out.append(f'<path class="grid" d="M{x:.1f} {bottom:.0f}v5"/>')
            out.append(words(x, bottom + 19, text, "soft", "middle"))
        out.append(words(self.x + self.wide / 2, bottom + 38, self.across.label, "", "middle"))
        out.append(words(self.x - 8, self.y - 12, self.up.label, "", "start"))
        return out

    def line(self, series: Series) -> list[str]:
        """Return a line with a mark at each of its points, and its name at the end."""
        places = [self.at(x, y) for x, y in series.points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        dash = " dash" if series.dashed else ""
        out = [f'<path class="line c{series.colour}{dash}" d="M{path}"/>']
        if len(places) <= 8:
            for (x, y), (_, value) in zip(places, series.points, strict=True):
                tip = escape(f"{series.name}: {value:.3g}")
                out.append(
                    f'<circle class="f{series.colour}" cx="{x:.1f}" cy="{y:.1f}" r="4">'
                    f"<title>{tip}</title></circle>"
                )
        return out

    def names(self, every: Sequence[Series]) -> list[str]:
        """Return the lines' names behind their last points, none over another."""
        ends = sorted((self.at(*series.points[-1])[1], series) for series in every)
        out, below = [], self.y - 20.0
        for y, series in ends:
            below = max(y + 4, below + 14)
            where = self.x + self.wide + 10
            out.append(words(where, below, series.name, f"f{series.colour}", "start"))
        return out


def words(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    """Return a text at a place."""
    kind = f' class="{style}"' if style else ""
    return f'<text{kind} x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def figure(wide: int, high: int, title: str, below: str, parts: Iterable[str]) -> str:
    """Return a whole figure with its ``title`` above, and where it comes from ``below``."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" role="img">'
    told = reversed(below.split("\n"))
    lines = [words(20, high - 14 - 16 * i, line, "soft") for i, line in enumerate(told)]
    return "\n".join(
        [
            head,
            f"<title>{escape(title)}</title>",
            f"<style>{STYLE}</style>",
            f'<rect class="paper" width="{wide}" height="{high}" rx="6"/>',
            words(20, 26, title, "title"),
            *parts,
            *lines,
            "</svg>",
            "",
        ]
    )


def rows(text: str) -> list[list[str]]:
    """Return the cells of the Markdown tables in ``text``, without heads and rules."""
    found = []
    for line in text.splitlines():
        if line.startswith("|"):
            cells = [c.strip() for c in line.replace("\\|", "\0").strip("|").split("|")]
            found.append([c.replace("\0", "|").strip("`") for c in cells])
    return [row for row in found if not set(row[0]) <= {"-", " "} or row[0] == ""]


def training() -> dict[str, dict[str, float]]:
    """Return the ms a step of each contender, by link."""
    text = (RESULTS / "training_torch_cnn.md").read_text()
    found: dict[str, dict[str, float]] = {}
    for part in text.split("\n### ")[1:]:
        if "parameters" not in part.partition("\n")[0]:
            continue
        link = part.partition(",")[0]
        found[link] = {row[0]: float(row[1]) for row in rows(part) if re.match(r"\d", row[1])}
    return found


def speedup() -> str:
    """Return speed-up over DDP against the rate of the links, measured in training."""
    found = training()
    links = [("100 Mbit/s", "100 Mbit/s"), ("1000 Mbit/s", "1 Gbit/s"), ("loopback", "one machine")]
    across = Axis("link between the hosts", 0, 2, [(i, t) for i, (_, t) in enumerate(links)])
    up = Axis("times as fast as DDP", 0.6, 12, [(v, f"{v:g}×") for v in (0.7, 1, 2, 5, 10)], True)
    panel = Panel(70, 70, 420, 270, across, up)
    wanted = [
        ("Ringlet powersgd(rank=4) | ef", 0, False), ("Ringlet topk(ratio=0.01) | ef", 1, False),
        ("Ringlet int4 | ef", 2, False), ("Ringlet fp16", 3, False),
        ("DDP + PowerSGD hook", 4, True), ("DDP + fp16 hook", 5, True),
    ]  # fmt: skip
    every = []
    for name, colour, dashed in wanted:
        points = [(i, found[at]["DDP"] / found[at][name]) for i, (at, _) in enumerate(links)]
        every.append(Series(name.removeprefix("Ringlet "), points, colour, dashed))
    # Names stand on the left, where the lines are apart.
    left = sorted((panel.at(*s.points[0])[1], s) for s in every)
    parts = [*panel.frame(), even(panel)]
    below = 0.0
    for y, series in left:
        parts += panel.line(series)
        below = max(y + 4, below + 16)
        parts.append(words(505, below, series.name, f"f{series.colour}"))
        parts.append(
            words(505 + 175, below, f"{series.points[0][1]:.1f}×, {series.points[1][1]:.1f}×, "
                  f"{series.points[2][1]:.2f}×", "soft")
        )  # fmt: skip
    return figure(
        820, 430, "Training a CNN of 10M parameters: steps, times as fast as with DDP",
        "4 ranks on 4 shaped hosts of one machine with 2 cores; dashed: DDP’s own hooks. Right: at "
        "100 Mbit/s, 1 Gbit/s, in one machine.\nFrom benchmarks/results/training_torch_cnn.md.",
        parts,
    )  # fmt: skip


def even(panel: Panel) -> str:
    """Return the line at 1: no gain, no loss."""
    y = panel.at(panel.across.low, 1)[1]
    return f'<path class="even" d="M{panel.x} {y:.1f}h{panel.wide}"/>'


def family(spec: str) -> int:
    """Return the colour of a spec's kind of compressor."""
    kinds = [
        ("fp16", "bf16", "none"), ("topk", "block_topk", "randomk"), ("int", "minmax", "natural"),
        ("powersgd",), ("onebit", "terngrad"), ("mx", "nv", "fp8"),
    ]  # fmt: skip
    return next((i for i, names in enumerate(kinds) if spec.startswith(names)), 5)


def accuracy() -> str:
    """Return what training loses against how many fewer bytes travel, for both tasks."""
    found = []
    for row in rows((ROOT / "docs" / "convergence.md").read_text()):
        if len(row) == 6 and re.match(r"\d", row[1]):
            digits, nats = re.findall(r"([\d.]+)x", row[5])
            found.append((row[0], float(row[1]), float(row[3]), float(digits), float(nats)))
    fewer = [(1, "1×"), (2, "2×"), (4, "4×"), (8, "8×"), (16, "16×"), (32, "32×"), (64, "64×")]
    across = Axis("times fewer bytes sent", 0.9, 90, fewer, True)
    first = Panel(70, 96, 300, 236, across, Axis("digits: held-out accuracy, %", 95, 99,
                  [(v, f"{v}") for v in (95, 96, 97, 98, 99)]))  # fmt: skip
    nats = [(v / 10, f"{v / 10:.1f}") for v in range(23, 30)]
    below = Axis("bytes: held-out loss, nats (lower is better)", 2.3, 2.9, nats)
    second = Panel(460, 96, 300, 236, across, below)
    parts = [*first.frame(), *second.frame()]
    named = {"none", "fp16", "int8", "int4 | ef", "mxfp4", "powersgd(rank=4) | ef", "onebit | ef",
             "topk(ratio=0.01) | ef", "topk(ratio=0.01)",
             "block_topk(ratio=0.01, bits=2) | ef"}  # fmt: skip
    for panel, x, y in ((first, 3, 1), (second, 4, 2)):
        places = [panel.at(point[x], point[y]) for point in found]
        taken = [(left - 5, left + 5, top + 4) for left, top in places]
        for point, (left, top) in zip(found, places, strict=True):
            tip = escape(f"{point[0]}: {point[y]:g} at {point[x]:g} times fewer bytes")
            parts.append(
                f'<circle class="f{family(point[0])}" cx="{left:.1f}" cy="{top:.1f}" r="4.5">'
                f"<title>{tip}</title></circle>"
            )
            if point[0] in named:
                parts += label(short(point[0]), left, top, panel, taken)
    legend = [("casts", 0), ("top-k and random", 1), ("integers", 2), ("low rank", 3),
              ("1 and 2 bits", 4), ("block floats", 5)]  # fmt: skip
    at = 70.0
    for name, colour in legend:
        parts.append(f'<circle class="f{colour}" cx="{at:.0f}" cy="48" r="4.5"/>')
        parts.append(words(at + 9, 52, name))
        at += 34 + 7 * len(name)
    return figure(
        820, 430, "What training loses, against the bytes it saves",
        "4 ranks, one run of each spec, one seed; an image more or less is 0.22 points. A point is "
        "a spec.\nFrom docs/convergence.md, measured by examples/convergence.py.",
        parts,
    )  # fmt: skip


def short(spec: str) -> str:
    """Return a spec without options, and without feedback where that is what matters."""
    return "topk without ef" if spec == "topk(ratio=0.01)" else re.sub(r"\(.*?\)", "", spec)


def label(
    name: str, left: float, top: float, panel: Panel, taken: list[tuple[float, float, float]]
) -> list[str]:
    """Return a point's name beside it, where nothing else is; nothing where there is no room."""
    wide = 6.4 * len(name)
    for shift in (4, -9, 17, -22, 30, -36, 44, -50, 58):
        for at in (left + 8, left - 8 - wide, left - wide / 2):
            inside = panel.x < at and at + wide < panel.x + panel.wide + 50
            height = top + shift
            inside = inside and panel.y - 5 < height < panel.y + panel.high
            if inside and all(abs(height - h) > 12 or at > b or at + wide < a for a, b, h in taken):
                taken.append((at, at + wide, height))
                return [words(at, height, name)]
    return []


def timeline() -> str:
    """Return one step with and without compression, on one scale."""
    data = json.loads((RESULTS / "step_timeline.json").read_text())
    lanes = [
        ("forward, backward", {"forward": 5, "backward": 0}),
        ("compress, decompress", {"compress": 1, "decompress": 3}),
        ("on the wire", {"communicate": 2}),
        ("wait and step", {"wait and step": 4}),
    ]
    longest = max(step["ms"] for step in data["steps"].values())
    nice = 100 if longest > 400 else 50
    ticks = [(v, f"{v} ms") for v in range(0, int(longest) + 1, nice)]
    parts, y = [], 54.0
    for spec, step in data["steps"].items():
        across = Axis("", 0, longest, ticks)
        panel = Panel(170, y + 12, 600, 100, across, Axis("", 0, 1, []))
        parts.append(words(20, y + 4, f"{spec}: {step['ms']:.0f} ms", "title"))
        for i, (name, kinds) in enumerate(lanes):
            top = y + 16 + 24 * i
            parts.append(words(160, top + 13, name, "soft", "end"))
            parts.append(f'<path class="grid" d="M170 {top + 20:.0f}H770"/>')
            for span in step["spans"]:
                if span["name"] in kinds:
                    left, right = (panel.at(span[end], 0)[0] for end in ("start", "end"))
                    tip = escape(f"{span['name']}: {span['end'] - span['start']:.1f} ms")
                    parts.append(
                        f'<rect class="f{kinds[span["name"]]}" x="{left:.1f}" y="{top:.1f}" '
                        f'width="{max(1.5, right - left):.1f}" height="17" rx="2">'
                        f"<title>{tip}</title></rect>"
                    )
        for value, text in ticks:
            x = panel.at(value, 0)[0]
            parts.append(words(x, y + 128, text, "soft", "middle"))
        y += 164
    legend, x = [("forward", 5), ("backward", 0), ("compress", 1), ("decompress", 3),
                 ("communicate", 2), ("wait and step", 4)], 170.0  # fmt: skip
    for name, colour in legend:
        swatch = f'x="{x:.0f}" y="{y - 18:.0f}" width="12" height="12" rx="3"'
        parts.append(f'<rect class="f{colour}" {swatch}/>')
        parts.append(words(x + 17, y - 8, name))
        x += 36 + 7 * len(name)
    return figure(
        820, int(y) + 56, "One step of rank 0 over a slow link, with and without compression",
        f"{data['about']}.\nThe step of median length, out of the timeline that RINGLET_TIMELINE "
        "writes. From benchmarks/results/step_timeline.json.",
        parts,
    )  # fmt: skip


def feedback() -> str:
    """Return how the error of the sum of all steps goes on, with error feedback and without."""
    data = json.loads((RESULTS / "feedback.json").read_text())
    across = Axis("steps", 10, 300, [(v, str(v)) for v in (10, 50, 100, 150, 200, 250, 300)])
    up = Axis("error of the sum of all steps, relative", 0.0002, 1,
              [(v, f"{v:g}") for v in (0.001, 0.01, 0.1, 1)], True)  # fmt: skip
    panel = Panel(70, 70, 500, 270, across, up)
    every = []
    for i, (spec, errors) in enumerate(data["errors"].items()):
        points = list(zip(data["steps"], errors, strict=True))
        every.append(Series(spec, points, (1, 2, 0)[i // 2], " | ef" not in spec))
    parts = panel.frame()
    for series in every:
        parts += panel.line(series)
    return figure(
        820, 430, "What error feedback does: what was held back arrives later",
        f"{data['about']}; dashed: without error feedback.\n"
        "From benchmarks/results/feedback.json, made by benchmarks/feedback.py.",
        [*parts, *panel.names(every)],
    )  # fmt: skip


def pays() -> str:
    """Return the predicted gain of an exchange against the rate of the links."""
    speeds = json.loads((RESULTS / "kernels.json").read_text())
    table = rows((ROOT / "docs" / "compressors.md").read_text())
    bits = {row[0]: float(row[1]) for row in table if len(row) > 5 and re.match(r"[\d.]+$", row[1])}
    hosts = ["a", "b", "c", "d"]
    rates = [10 ** (1 + i / 20) for i in range(81)]  # Mbit/s
    every = []
    for colour, spec in enumerate(("fp16", "int8", "int4", "topk")):
        row = next(r for r in speeds["rows"] if r["spec"] == spec)
        codec = CodecCost(spec, _combined(spec), 4e-9 / row["encode"], 4e-9 / row["decode"],
                      bits[spec] / 32)  # fmt: skip
        # Seconds for each float32 element: rates are in GB/s of float32.
        spent = _work(codec, len(hosts))
        points = []
        for rate in rates:
            each = 4.0 / (1e6 / 8 * rate)
            plain = _crossing("sum", 1.0, hosts) * each
            wire = _crossing(codec.combine, codec.ratio, hosts) * each
            points.append((rate, plain / (wire + spent)))
        every.append(Series(spec, points, colour))
    ticks = [(10, "10 Mbit/s"), (100, "100"), (1000, "1 Gbit/s"), (1e4, "10"), (1e5, "100 Gbit/s")]
    across = Axis("link between the hosts", 10, 1e5, ticks, True)
    up = Axis("exchange, times as fast as uncompressed", 0.1, 40,
              [(v, f"{v:g}×") for v in (0.1, 0.3, 1, 3, 10, 30)], True)  # fmt: skip
    panel = Panel(70, 70, 560, 270, across, up)
    parts = [*panel.frame(), even(panel)]
    below = panel.at(10, 1)[1] + 16
    parts.append(words(80, below, "below this line compression costs time", "soft"))
    for series in every:
        parts += panel.line(series)
    return figure(
        820, 430, "When compression does not pay: the faster the link, the less there is to gain",
        "Predicted for an exchange alone, by ringlet doctor’s model: 4 hosts of one rank, codecs "
        "with 2 threads\nand no backward pass beside them, as in benchmarks/results/kernels.json.",
        [*parts, *panel.names(every)],
    )  # fmt: skip


def _combined(spec: str) -> str:
    traits = parse(spec).traits()
    if traits.combine != "gather":
        return str(traits.combine)
    return "scatter_reduce" if traits.fixed_size and traits.granularity else "allgather"


DRAWN = {"speedup": speedup, "accuracy": accuracy, "timeline": timeline, "feedback": feedback,
         "pays": pays}  # fmt: skip


def main() -> None:
    """Write the figures, or check that they are what would be drawn."""
    for name, draw in DRAWN.items():
        path, text = FIGURES / f"{name}.svg", draw()
        if "--check" not in sys.argv:
            path.write_text(text)
        elif not path.exists() or path.read_text() != text:
            raise SystemExit(f"{path.relative_to(ROOT)} is old: run python docs/draw_figures.py")


if __name__ == "__main__":
    main()
