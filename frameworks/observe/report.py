"""``ringlet report run.jsonl``: one HTML file that says what compression saved or cost."""

from __future__ import annotations

import argparse
import sys
from datetime import datetime
from html import escape
from pathlib import Path

from ringlet.observe import charts
from ringlet.observe.page import page
from ringlet.observe.records import Record
from ringlet.observe.summary import PHASES, NotARun, Run, amount, duration, read, verdict
from ringlet.ring.files import create_text

_LAYERS = 12  # drawn; the table holds more
_ROWS = 200
_COMPARED = 5  # layers whose errors are drawn over time
_SENT = (("sent", "wire"), ("saved", "saved"))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what ``main`` needs to ``parser``."""
    parser.description = "Draw what compression saved or cost in a run, as one HTML file."
    parser.add_argument("metrics", type=Path, help="what RINGLET_METRICS=run.jsonl wrote")
    parser.add_argument(
        "-o", "--output", type=Path, help="where to write (default: beside it, as .html)"
    )


def main(options: argparse.Namespace) -> int:
    """Write the report; return the exit code."""
    output = options.output or options.metrics.with_suffix(".html")
    try:
        run = read(options.metrics)
        with create_text(output) as file:
            file.write(render(run, options.metrics.name))
    except (OSError, NotARun) as error:
        print(f"ringlet report: {error}", file=sys.stderr)
        return 2
    print(verdict(run)[1])
    print(output)
    return 0


def render(run: Run, name: str) -> str:
    """Return the report of ``run`` as HTML that needs nothing else."""
    kind, sentence = verdict(run)
    sections = [_tiles(run), '<div class="columns">', _phases(run), _times(run), _bytes(run)]
    sections += [_errors(run), "</div>", _layers(run)]
    return page(
        title=f"Ringlet: {name}",
        kind=kind,
        verdict=sentence,
        caveat=_caveat(run),
        facts=_facts(run),
        body="".join(sections),
    )


def _facts(run: Run) -> str:
    facts, steps = run.facts, run.steps
    told = []
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
    if run.torn:
        told.append(f"{run.torn} unreadable lines left out")
    return " · ".join(told)


def _caveat(run: Run) -> str:
    if run.uncompressed is None:
        return ""
    return (
        "The time without compression is an estimate: from an uncompressed allreduce that was "
        "measured on these ranks when the run began, for the same buckets. Exchanges overlap with "
        "the backward pass, so training gains or loses at most what is said here. Medians, without "
        "the first steps."
    )


def _tiles(run: Run) -> str:
    raw, wire = run.median("raw_bytes"), run.median("wire_bytes")
    plain = run.uncompressed
    tiles = [
        (f"{run.ratio:.1f}×", "fewer bytes sent"),
        (amount(wire), f"sent per step and rank, of {amount(raw)}"),
        (
            duration(run.exchange),
            "exchange per step" + (f", about {duration(plain)} uncompressed" if plain else ""),
        ),
        (duration(run.median("seconds")), "from first gradient to last result"),
    ]
    abandoned = sum(record["kind"] == "abandoned" for record in run.failed)
    skipped = len(run.failed) - abandoned
    tiles.append((f"{abandoned} + {skipped}", "steps abandoned + skipped"))
    cells = "".join(f"<div><b>{escape(a)}</b><span>{escape(b)}</span></div>" for a, b in tiles)
    return f'<div class="tiles">{cells}</div>'


def _figure(title: str, text: str, legend: str, chart: str) -> str:
    """Return a figure; ``title`` and ``text`` are HTML of ours, never out of a file."""
    return f"<figure><h2>{title}</h2><p>{text}</p>{legend}{chart}</figure>"


def _phases(run: Run) -> str:
    medians = {name: run.time(name) for name in PHASES}
    # Medians of phases do not add up to the median of their sum: share that out.
    factor = run.exchange / (sum(medians.values()) or 1.0)
    pieces = [(name, name, factor * seconds) for name, seconds in medians.items()]
    rows = [charts.Bar("as it ran", pieces)]
    if run.uncompressed is not None:
        rows.append(charts.Bar("uncompressed", [("estimate", "plain", run.uncompressed)]))
    entries = [(name, name) for name, _, _ in pieces]
    if run.uncompressed is not None:
        entries.append(("uncompressed, estimated", "plain"))
    return _figure(
        "Where a step’s exchange goes",
        "Engine time per step, by phase. Waiting for other ranks counts as communicating.",
        charts.legend(entries),
        charts.bars(rows, duration, label=110, row=72),
    )


def _times(run: Run) -> str:
    steps = [step["step"] for step in run.steps]
    took = [sum(s[f"{p}_s"] for p in PHASES) for s in run.steps]
    series = [charts.Series("exchange", "communicate", took)]
    if all("uncompressed_s" in step for step in run.steps):
        plain = [step["uncompressed_s"] for step in run.steps]
        series.append(charts.Series("uncompressed, estimated", "plain", plain))
    return _figure(
        "Exchange time over the run",
        "Seconds of engine time in each step.",
        charts.legend([(line.name, line.style) for line in series]),
        charts.lines(series, steps, duration),
    )


def _bytes(run: Run) -> str:
    series = [
        charts.Series("sent", "wire", [step["wire_bytes"] for step in run.steps]),
        charts.Series("uncompressed", "plain", [step["raw_bytes"] for step in run.steps]),
    ]
    return _figure(
        "Bytes over the run",
        "What this rank sent in each step, and would have sent by ring allreduce.",
        charts.legend([(line.name, line.style) for line in series]),
        charts.lines(series, [step["step"] for step in run.steps], amount),
    )


def _errors(run: Run) -> str:
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
        found = {layer["name"]: layer.get("relative_error", 0.0) for layer in record["layers"]}
        for name in names:
            by_name[name].append(100 * found.get(name, 0.0))
    series = [charts.Series(name, f"series{i}", by_name[name]) for i, name in enumerate(names)]
    return _figure(
        "What compression loses",
        "Relative error of what was sent, residual included; the largest layers.",
        charts.legend([(line.name, line.style) for line in series]),
        charts.lines(series, [r["step"] for r in sampled], lambda v: f"{v:.3g} %"),
    )


def _layers(run: Run) -> str:
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
    chart = charts.bars(rows, amount, width=1160, label=300, row=30)
    head = "".join(f"<th>{name}</th>" for name in ("layer", "compressor", "collective"))
    numbers = ("elements", "sent", "of", "times fewer", "gradient norm", "error", "residual norm")
    head += "".join(f'<th class="n">{name}</th>' for name in numbers)
    body = "".join(_row(layer) for layer in found[:_ROWS])
    more = f"<p>and {len(found) - _ROWS} more</p>" if len(found) > _ROWS else ""
    step = escape(str(run.layers[-1]["step"]))
    return (
        f'<figure class="wide"><h2>Layer by layer</h2><p>The largest layers, at step {step}: '
        f"bytes sent per step and rank.</p>{charts.legend(_SENT)}{chart}"
        f"<details open><summary>All layers as a table</summary><div class='scroll'><table>"
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{more}</details></figure>"
    )


def _row(layer: Record) -> str:
    wire, raw = layer["wire_bytes"], layer["raw_bytes"]
    words = [layer["name"], layer["compressor"], layer["collective"].replace("_", "-")]
    cells = "".join(f"<td>{escape(word)}</td>" for word in words)
    error = layer.get("relative_error")
    numbers = [
        f"{layer['elements']:,}",
        amount(wire),
        amount(raw),
        f"{raw / wire:.1f}" if wire else "",
        _number(layer.get("norm")),
        "" if error is None else f"{100 * error:.3g} %",
        _number(layer.get("residual_norm")),
    ]
    return f"<tr>{cells}" + "".join(f'<td class="n">{escape(n)}</td>' for n in numbers) + "</tr>"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"
