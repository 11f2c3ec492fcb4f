"""Charts as inline SVG. Colours are CSS classes, so that a page's light and dark look apply."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import NamedTuple

from ringlet.report.summary import binned

_LEAST = 1e-300  # that can be divided into ticks

Format = Callable[[float], str]


class ChartLine(NamedTuple):
    """A line: a value for each step, NaN where none was measured. ``style`` is a CSS class."""

    name: str
    style: str
    values: Sequence[float]


class Bar(NamedTuple):
    """A horizontal bar in pieces of (name, CSS class, length)."""

    name: str
    pieces: Sequence[tuple[str, str, float]]
    note: str = ""


def lines(
    series: Sequence[ChartLine],
    steps: Sequence[int],
    shown: Format,
    width: int = 560,
    height: int = 240,
) -> str:
    """Return lines over ``steps``, from zero up; hovering tells the values.

    More steps than fit are shown as medians of equal stretches. Values far above the rest (the
    first step compiles) are cut off at the top, and the chart says so.
    """
    left, right, top, bottom = 64, 12, 14, 34
    every = sorted(v for line in series for v in line.values if not math.isnan(v)) or [0.0]
    most = 1.15 * every[min(len(every) - 1, int(0.98 * len(every)))]
    cut = every[-1] > most
    ticks = scale(most if cut else every[-1])
    high = ticks[-1] or 1.0
    inner = width - left - right
    tall = height - top - bottom
    count = len(steps)

    def x(i: float) -> float:
        return left + inner * (i / (count - 1) if count > 1 else 0.5)

    def y(value: float) -> float:
        return top + tall * (1 - min(value, high) / high)

    parts = [_open(width, height)]
    for tick in ticks:
        parts.append(f'<path class="grid" d="M{left} {y(tick):.1f}H{width - right}"/>')
        parts.append(_text(left - 8, y(tick) + 4, shown(tick) if tick else "0", "end"))
    marks = sorted({0, count // 2, count - 1})
    for at in marks:
        anchor = "middle" if at not in (0, count - 1) or count == 1 else ("start", "end")[at > 0]
        parts.append(
            _text(x(at), height - 14, f"step {steps[at]}" if not at else str(steps[at]), anchor)
        )
    for line in series:
        points = [((a + b) / 2, v) for a, b, v in binned(line.values) if not math.isnan(v)]
        path = "L".join(f"{x(i):.1f} {y(v):.1f}" for i, v in points)
        if len(points) == 1:
            (i, v), *_ = points
            parts.append(
                f'<circle class="{line.style} fill" cx="{x(i):.1f}" cy="{y(v):.1f}" r="4"/>'
            )
        if points:
            parts.append(f'<path class="line {line.style}" d="M{path}"/>')
    if cut:
        parts.append(_text(left + 10, top + 14, f"cut off; the highest is {shown(every[-1])}"))
    bins = [binned(line.values) for line in series]
    for k, (a, b, _) in enumerate(bins[0]):
        start, stop = x(a - 0.5), x(b + 0.5)
        when = f"step {steps[a]}" if a == b else f"steps {steps[a]} to {steps[b]}, medians"
        told = [
            f"{line.name}: {'not measured' if math.isnan(value) else shown(value)}"
            for line, value in zip(series, (found[k][2] for found in bins), strict=True)
        ]
        text = escape("\n".join([when, *told]))
        start, stop = max(left, start), min(width - right, stop)
        parts.append(
            f'<rect class="hit" x="{start:.1f}" y="{top}" width="{max(1.0, stop - start):.1f}" '
            f'height="{tall}"><title>{text}</title></rect>'
        )
    return "".join([*parts, "</svg></div>"])


def bars(
    rows: Sequence[Bar], shown: Format, width: int = 560, label: int = 120, row: int = 34
) -> str:
    """Return horizontal bars on one scale, each with its total behind it.

    Names stand on the left, in as much room as the longest takes, ``label`` at most.
    """
    note_width = 130
    label = min(label, 12 + 7 * max((len(bar.name) for bar in rows), default=0))
    top, height = 4, 8 + row * len(rows)
    longest = max((sum(p[2] for p in bar.pieces) for bar in rows), default=1.0) or 1.0
    inner = width - label - note_width
    parts = [_open(width, height)]
    for i, bar in enumerate(rows):
        y, thick = top + i * row, row - 12
        name = bar.name if len(bar.name) * 7 < label else "…" + bar.name[-(label // 7) :]
        text = _text(label - 10, y + thick / 2 + 6, name, "end")
        parts.append(f"<g><title>{escape(bar.name)}</title>{text}</g>")
        at = float(label)
        for what, style, length in bar.pieces:
            wide = inner * length / longest
            if wide > 0:
                text = escape(f"{bar.name}\n{what}: {shown(length)}")
                parts.append(
                    f'<rect class="{style} fill" x="{at:.1f}" y="{y + 2}" rx="2" '
                    f'width="{max(1.0, wide - 2):.1f}" height="{thick}">'
                    f"<title>{text}</title></rect>"
                )
            at += wide
        total = bar.note or shown(sum(piece[2] for piece in bar.pieces))
        parts.append(_text(at + 6, y + thick / 2 + 6, total, style="value"))
    return "".join([*parts, "</svg></div>"])


def legend(entries: Sequence[tuple[str, str]]) -> str:
    """Return a legend of (name, CSS class)."""
    items = "".join(
        f'<span><i class="swatch {style}"></i>{escape(name)}</span>' for name, style in entries
    )
    return f'<div class="legend">{items}</div>'


def scale(most: float) -> list[float]:
    """Return three to six round ticks from 0 to at least ``most``; 0 and 1 where that is none."""
    if not most > _LEAST or not math.isfinite(most):
        return [0.0, 1.0]
    rough = most / 4
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= rough * 0.999)
    return [step * i for i in range(math.ceil(most / step - 1e-9) + 1)]


def _open(width: int, height: int) -> str:
    # Letters of 12 units stay legible: what is narrower than that scrolls, as tables do.
    return (
        f'<div class="scroll"><svg viewBox="0 0 {width} {height}" role="img" '
        f'style="min-width: {width * 7 // 10}px; max-width: {width * 4 // 3}px" '
        'preserveAspectRatio="xMinYMin meet">'
    )


def _text(x: float, y: float, text: str, anchor: str = "start", style: str = "") -> str:
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text class="{style}" {place}>{escape(text)}</text>'
