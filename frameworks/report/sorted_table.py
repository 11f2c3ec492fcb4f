"""A table that sorts by a click on a heading, without a script: rows know their places.

A heading is a radio button. Which one is checked decides, in the page's style, by which of its
numbers (``--k0``, ``--k1``, ...) a row is placed.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from zlib import crc32

Cell = tuple[str, str | float | None]  # what is shown, and what it is sorted by

COLUMNS = 12  # that the style provides for
STYLE = (
    """
.sorts { display: grid; grid-template-columns: repeat(var(--columns), auto); min-width: 60em; }
.sorts thead, .sorts tbody, .sorts tr { display: grid; grid-template-columns: subgrid;
  grid-column: 1 / -1; }
.sorts th label { cursor: pointer; display: block; }
.sorts th input { appearance: none; margin: 0; position: absolute; }
.sorts th:has(input:checked) { color: var(--ink); }
.sorts th:has(input:checked) label::after { content: " ▾"; }
.sorts th:has(input:focus-visible) { outline: 2px solid var(--wire); }
"""
    + "\n".join(
        f".sorts:has(.k{i}:checked) tbody tr {{ order: var(--k{i}); }}" for i in range(COLUMNS)
    )
    + "\n"
)


def sorted_table(heads: Sequence[str], rows: Sequence[Sequence[Cell]], words: int) -> str:
    """Return a table of ``rows``, as they come at first; all texts are escaped.

    The first ``words`` columns sort from A on, the others from the largest number on; what is
    missing comes last.
    """
    places = [_places([row[column][1] for row in rows]) for column in range(len(heads))]
    kind = ["" if column < words else ' class="n"' for column in range(len(heads))]
    name = f"sort{crc32(repr(rows).encode())}"  # of this table's radio buttons alone
    head = "".join(
        f'<th{kind[i]}><label><input type="radio" name="{name}" class="k{i}"/>{escape(text)}'
        "</label></th>"
        for i, text in enumerate(heads)
    )
    body = ""
    for number, row in enumerate(rows):
        order = ";".join(f"--k{i}:{places[i][number]}" for i in range(len(heads)))
        cells = "".join(f"<td{kind[i]}>{escape(text)}</td>" for i, (text, _) in enumerate(row))
        body += f'<tr style="{order}">{cells}</tr>'
    return (
        f'<div class="scroll"><table class="sorts" style="--columns:{len(heads)}">'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _places(values: Sequence[str | float | None]) -> list[int]:
    """Return each value's place: words from A on, numbers from the largest on, then nothing."""

    def key(index: int) -> tuple[int, float, str]:
        value = values[index]
        if value is None:
            return 1, 0.0, ""
        return (0, 0.0, value.lower()) if isinstance(value, str) else (0, -value, "")

    found = [0] * len(values)
    for place, index in enumerate(sorted(range(len(values)), key=key)):
        found[index] = place
    return found
