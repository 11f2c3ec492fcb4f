"""The report of one run: an HTML file that says what compression saved or cost."""

from __future__ import annotations

import math
from html import escape

from ringlet.report import charts
from ringlet.report.page_frame import page
from ringlet.report.records import Record
from ringlet.report.sorted_table import Cell, sorted_table
from ringlet.report.summary import (
    LOOSE,
    PHASES,
    GroupSummary,
    RunSummary,
    amount,
    duration,
    facts_of,
    percentile,
    span,
    verdict,
)

_GROUPS = 20  # drawn, those that sent the most
_LAYERS = 12  # drawn; the table holds more
_ROWS = 200
_WARNINGS = 20
_COMPARED = 5  # layers whose errors are drawn over time
_WORDS = ("layer", "compressor", "collective")
_NUMBERS = ("elements", "sent", "of", "times fewer", "gradient norm", "error", "residual norm")
_SENT = (("sent", "wire"), ("saved", "saved"))


def render(run: RunSummary, name: str) -> str:
    """Return the report of ``run`` as HTML that needs nothing else."""
    kind, sentence = verdict(run)
    sections = [_tiles(run)]
    for group in run.groups[:_GROUPS]:
        loose, count = group.name == LOOSE, len(group.steps)
        head = f"{group.name}: {count} {'record' if loose else 'step'}{'s' if count != 1 else ''}"
        sections += [f"<h2>{escape(head)}</h2>"] if run.others else []
        sections += ['<div class="columns">', _phases(group), _times(group), _bytes(group)]
        sections += ["" if loose else _errors(group), "</div>", _layers(group)]
    if (more := len(run.groups) - _GROUPS) > 0:
        sections.append(f"<p>and {more} more groups, which would have sent less uncompressed</p>")
    sections += [_loose(run), _waiting(run)]
    return page(
        title=f"Ringlet: {name}",
        kind=kind,
        verdict=sentence,
        caveat=_caveat(run),
        facts=facts_of(run, name),
        body="".join(sections),
    )


def _caveat(run: RunSummary) -> str:
    if run.without is None:
        return ""
    return (
        "The time without compression is an estimate, for the same buckets: from the least that "
        "uncompressed allreduces took on these ranks when the run began, to what nine of ten did "
        "not exceed. Exchanges overlap with "
        "the backward pass, so training gains or loses at most what is said here. Medians, without "
        "the first steps; bounds are those of ten stretches of the run. To be sure, record a run "
        "without compression too, and compare: ringlet report none.jsonl this.jsonl."
    )


def _loose(run: RunSummary) -> str:
    """Return what was submitted one by one in the whole run, which belongs to no step."""
    if run.loose is None:
        return ""
    wire, raw = (amount(run.loose.sum(name)) for name in ("wire_bytes", "raw_bytes"))
    seconds = duration(run.loose.sum(*(f"{phase}_s" for phase in PHASES)))
    return (
        '<figure class="wide"><h2>Beside the steps</h2><p>What belongs to no step, such as an '
        f"<code>allreduce</code> of a metric: {escape(LOOSE)}. In the whole run they sent "
        f"{wire} of {raw}, and took {seconds} of the engine’s time. No number above counts "
        "them, and none counts gathers and broadcasts.</p></figure>"
    )


def _waiting(run: RunSummary) -> str:
    """Return what was warned of while the run went on: ranks that others waited for."""
    if not run.waiting:
        return ""
    told = list(dict.fromkeys(run.waiting))[-_WARNINGS:]
    texts = "".join(f"<p>{escape(text)}</p>" for text in told)
    return f'<figure class="wide"><h2>Ranks that others waited for</h2>{texts}</figure>'


def _tiles(run: RunSummary) -> str:
    raw, wire = (run.per_step(lambda g, n=n: g.median(n)) for n in ("raw_bytes", "wire_bytes"))  # type: ignore[misc]
    plain, (took, low, high) = run.without, run.took
    bounds = f", {duration(low)} to {duration(high)}"
    slowest = duration(run.slowest)
    tiles = [
        (f"{run.fewer:.1f}×", "fewer bytes sent"),
        (amount(wire), f"sent per step and rank, of {amount(raw)}"),
        (
            duration(took),
            f"exchange per step{bounds}; 95 % within {slowest}"
            + (f"; about {span(*plain)} uncompressed" if plain else ""),
        ),
    ]
    if all("seconds" in step for step in run.steps):
        late = duration(percentile([step["seconds"] for step in run.settled], 0.95))
        text = f"from first gradient to last result; 95 % within {late}"
        tiles.append((duration(run.median("seconds")), text))
    abandoned = sum(record["kind"] == "abandoned" for record in run.failed)
    skipped = len(run.failed) - abandoned
    tiles.append((f"{abandoned} + {skipped}", "steps abandoned + skipped"))
    cells = "".join(f"<div><b>{escape(a)}</b><span>{escape(b)}</span></div>" for a, b in tiles)
    return f'<div class="tiles">{cells}</div>'


def _figure(title: str, text: str, legend: str, chart: str) -> str:
    """Return a figure; ``title`` and ``text`` are HTML of ours, never out of a file."""
    return f"<figure><h2>{title}</h2><p>{text}</p>{legend}{chart}</figure>"


def _phases(run: GroupSummary) -> str:
    medians = {name: run.time(name) for name in PHASES}
    # Medians of phases do not add up to the median of their sum: share that out.
    factor = run.exchange / (sum(medians.values()) or 1.0)
    pieces = [(name, name, factor * seconds) for name, seconds in medians.items()]
    rows = [charts.Bar("as it ran", pieces)]
    if run.uncompressed is not None:
        rows.append(charts.Bar("uncompressed", [("estimate", "plain", run.uncompressed[0])]))
    entries = [(name, name) for name, _, _ in pieces]
    if run.uncompressed is not None:
        entries.append(("uncompressed, estimated", "plain"))
    return _figure(
        "Where a step’s exchange goes",
        "Engine time per step, by phase. Waiting for other ranks counts as communicating.",
        charts.legend(entries),
        charts.bars(rows, duration, label=110, row=72),
    )


def _times(run: GroupSummary) -> str:
    steps = [step["step"] for step in run.steps]
    took = [sum(s[f"{p}_s"] for p in PHASES) for s in run.steps]
    series = [charts.ChartLine("exchange", "communicate", took)]
    if all("uncompressed_s" in step for step in run.steps):
        plain = [step["uncompressed_s"] for step in run.steps]
        series.append(charts.ChartLine("uncompressed, estimated", "plain", plain))
    return _figure(
        "Exchange time over the run",
        "Seconds of engine time in each step.",
        charts.legend([(line.name, line.style) for line in series]),
        charts.lines(series, steps, duration),
    )


def _bytes(run: GroupSummary) -> str:
    series = [
        charts.ChartLine("sent", "wire", [step["wire_bytes"] for step in run.steps]),
        charts.ChartLine("uncompressed", "plain", [step["raw_bytes"] for step in run.steps]),
    ]
    return _figure(
        "Bytes over the run",
        "What this rank sent in each step, and would have sent by ring allreduce.",
        charts.legend([(line.name, line.style) for line in series]),
        charts.lines(series, [step["step"] for step in run.steps], amount),
    )


def _errors(run: GroupSummary) -> str:
    sampled = [r for r in run.layers if any("relative_error" in x for x in r["layers"])]
    names = [x["name"] for x in run.last_layers() if "relative_error" in x][:_COMPARED]
    if not names:
        return _figure(
            "What compression loses",
            "Not measured. <code>RINGLET_METRICS_EVERY=100</code> compresses every layer twice in "
            "every hundredth step, and compares.",
            "",
            "",
        )
    by_name: dict[str, list[float]] = {name: [] for name in names}
    for record in sampled:
        found = {layer["name"]: layer.get("relative_error", math.nan) for layer in record["layers"]}
        for name in names:
            by_name[name].append(100 * found.get(name, math.nan))
    series = [charts.ChartLine(name, f"series{i}", by_name[name]) for i, name in enumerate(names)]
    return _figure(
        "What compression loses",
        "Relative error of what was sent, residual included; the largest layers.",
        charts.legend([(line.name, line.style) for line in series]),
        charts.lines(series, [r["step"] for r in sampled], lambda v: f"{v:.3g} %"),
    )


def _layers(run: GroupSummary) -> str:
    found = run.last_layers()
    if not found:
        return ""
    rows = [
        charts.Bar(
            layer["name"],
            [
                ("sent", "wire", layer["wire_bytes"]),
                ("saved", "saved", max(0.0, layer["raw_bytes"] - layer["wire_bytes"])),
            ],
            f"{amount(layer['wire_bytes'])} of {amount(layer['raw_bytes'])}",
        )
        for layer in found[:_LAYERS]
    ]
    chart = charts.bars(rows, amount, width=760, label=300, row=30)
    listed = found[:_ROWS]
    table = sorted_table([*_WORDS, *_NUMBERS], [_cells(layer) for layer in listed], len(_WORDS))
    more = f"<p>and {len(found) - _ROWS} more</p>" if len(found) > _ROWS else ""
    step = escape(str(run.layers[-1]["step"]))
    return (
        f'<figure class="wide"><h2>Layer by layer</h2><p>The largest layers, at step {step}: '
        f"bytes sent per step and rank.</p>{charts.legend(_SENT)}{chart}"
        f"<details open><summary>All layers as a table; a click on a heading sorts it</summary>"
        f"{table}{more}</details></figure>"
    )


def _cells(layer: Record) -> list[Cell]:
    wire, raw, error = layer["wire_bytes"], layer["raw_bytes"], layer.get("relative_error")
    words = [layer["name"], layer["compressor"], layer["collective"].replace("_", "-")]
    return [
        *((word, word) for word in words),
        (f"{layer['elements']:,}", layer["elements"]),
        (amount(wire), wire),
        (amount(raw), raw),
        (f"{raw / wire:.1f}" if wire else "", raw / wire if wire else None),
        (_number(layer.get("norm")), layer.get("norm")),
        ("" if error is None else f"{100 * error:.3g} %", error),
        (_number(layer.get("residual_norm")), layer.get("residual_norm")),
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
