"""Recorded runs side by side: what steps took in each, measured and not estimated."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from html import escape

from ringlet.report import charts
from ringlet.report.page_frame import page
from ringlet.report.summary import (
    EVEN,
    LOOSE,
    RunSummary,
    amount,
    between,
    duration,
    facts_of,
    percentile,
    spread,
)

Named = Sequence[tuple[str, RunSummary]]
_CAVEAT = (
    "A step's time is from the end of one step's exchange to that of the next, with all that is "
    "computed in between: medians without the first steps, and the bounds of ten stretches of each "
    "run. Compare runs of the same model, data and ranks, one after the other on machines that do "
    "nothing else; whether both learn as well is another matter."
)


def pace(run: RunSummary) -> list[float]:
    """Return the seconds of each step; those of exchanges alone where no more is known."""
    return run.intervals or run.exchanges


def compared(run: RunSummary, first: RunSummary) -> tuple[str, str]:
    """Return ("paid", "cost", "even" or "unclear") and how ``run`` compares with ``first``."""
    if LOOSE in (run.name, first.name):  # which are recorded once a second
        return "unclear", f"{LOOSE} belong to no steps whose times could be compared"
    whole = run.intervals and first.intervals  # a single step has an exchange alone
    ours, theirs = (each.intervals if whole else each.exchanges for each in (run, first))
    took, (low, high) = statistics.median(ours), spread(ours)
    reference, (least, most) = statistics.median(theirs), spread(theirs)
    what = "steps" if whole else "exchanges, of which alone there are times,"
    shown = f"{what} took {between(took, low, high)}, against {between(reference, least, most)}"
    within = max(high, most) <= (1 + EVEN) * min(low, least)
    if within:
        return "even", f"makes no difference: {shown}"
    if high < least:
        how = f"{reference / took:.2f} times as fast" if took else "faster"
        return "paid", f"is {how}: {shown}"
    if low > most:
        how = f"{took / reference:.2f} times as slow" if reference else "slower"
        return "cost", f"is {how}: {shown}"
    return "unclear", f"{shown}, and these overlap: record more steps"


def sentences(named: Named) -> list[str]:
    """Return a sentence for each run but the first, which they are compared with."""
    (reference, first), *rest = named
    told = []
    for name, run in rest:
        kind, how = compared(run, first)
        unclear = f"{name} cannot be told apart from {reference}: {how}."
        told.append(unclear if kind == "unclear" else f"{name} {how} in {reference}.")
    return told


def verdict(named: Named) -> str:
    """Return how all runs compare with the first, as ``compared``; "unclear" if they differ."""
    (_, first), *rest = named
    kinds = {compared(run, first)[0] for _, run in rest}
    return kinds.pop() if len(kinds) == 1 else "unclear"


def render(named: Named) -> str:
    """Return the comparison as HTML that needs nothing else."""
    return page(
        title="Ringlet: " + " and ".join(name for name, _ in named),
        kind=verdict(named),
        verdict=" ".join(sentences(named)),
        caveat=_CAVEAT,
        facts="\n".join(facts_of(run, name) for name, run in named),
        body=_bars(named) + _table(named),
    )


def _bars(named: Named) -> str:
    rows = []
    for name, run in named:
        took, (low, high) = statistics.median(pace(run)), spread(pace(run))
        exchange = min(took, run.took[0])
        pieces = [("exchange", "communicate", exchange), ("the rest", "saved", took - exchange)]
        rows.append(charts.Bar(name, pieces, f"{duration(low)} to {duration(high)}"))
    return (
        '<figure class="wide"><h2>Seconds of a step</h2><p>Of the whole step, and in it what the '
        "exchange took of the engine’s time, though some of that runs beside the backward pass."
        f"</p>{charts.legend([('exchange', 'communicate'), ('the rest', 'saved')])}"
        f"{charts.bars(rows, duration, width=620, label=130)}</figure>"
    )


def _table(named: Named) -> str:
    head = ("run", "compression", "groups", "steps", "step", "bounds", "95 % within",
            "exchange", "sent a step", "times fewer", "sent beside steps")  # fmt: skip
    cells = "".join(f"<th>{name}</th>" for name in head)
    body = "".join(
        f"<tr>{''.join(f'<td>{escape(c)}</td>' for c in _row(*each))}</tr>" for each in named
    )
    return (
        f'<figure class="wide"><h2>Run by run</h2><div class="scroll"><table><thead><tr>{cells}'
        f"</tr></thead><tbody>{body}</tbody></table></div></figure>"
    )


def _row(name: str, run: RunSummary) -> list[str]:
    steps, (low, high) = pace(run), spread(pace(run))
    specs = list(dict.fromkeys(spec for group in run.groups for spec in group.specs))
    return [
        name,
        ", ".join(specs) or "not known",
        str(len(run.groups)),
        str(len(run.steps)),
        duration(statistics.median(steps)),
        f"{duration(low)} to {duration(high)}",
        duration(percentile(steps, 0.95)),
        duration(run.took[0]),
        amount(run.per_step(lambda group: group.median("wire_bytes"))),
        f"{run.fewer:.1f}",
        amount(run.loose.sum("wire_bytes")) if run.loose else "",
    ]
