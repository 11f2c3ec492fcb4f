"""What is done to the cells of tables, in a page's HTML."""

from __future__ import annotations

import re

_CELL = re.compile(r"<t[dh]\b.*?</t[dh]>", re.DOTALL)
_CODE = re.compile(r"(?<=<code>)[^<]+")
_BREAK = re.compile(r"(?<=\w)[_./(](?=[^\W\d])|,(?=\S)")


def unescaped(html: str) -> str:
    """Return ``html`` without the backslashes that Markdown's tables want before a pipe."""
    return _CELL.sub(lambda cell: cell[0].replace("\\|", "|"), html)


def breakable(html: str) -> str:
    """Return ``html`` in which long names of code in cells may go on in the next line.

    That is behind an underscore, a slash, a full stop, a bracket or a comma, not inside numbers.
    """
    return _CELL.sub(lambda cell: _CODE.sub(_with_breaks, cell[0]), html)


def _with_breaks(code: re.Match[str]) -> str:
    return _BREAK.sub(lambda mark: f"{mark[0]}<wbr>", code[0])
