"""What is wrong with a spec that cannot be read, where, and what to do; names: ``registry``."""

from __future__ import annotations

import ast
import re

# Names, numbers and strings are words; a quote that nothing closes is a token of its own.
_TOKEN = re.compile(
    r"""\s*(?:(?P<word>'[^']*'|"[^"]*"|[^\W\d]\w*|[\d.][\w.]*)|(?P<sign>\S))""", re.UNICODE
)
# A path in place of a module; what is quoted is an option's value.
_FILE = re.compile(
    r"""'[^']*'|"[^"]*"|(?P<path>([A-Za-z]:)?[^\s|()'":]*[/\\][^\s|()'":]*):(?P<name>\w+)"""
)
# MODULE:NAME with spaces in it, or another ':'; what is read of it stands as one word already.
_LOOSE = re.compile(r"(?P<module>[^\W\d][\w.]*)\s*:[\s:]*(?P<name>[^\W\d][\w.]*)")
_COMMA = re.compile(r"\b\d+,\d+\b")
# Letters that stand for the signs of MODULE:NAME while Python reads it as one name.
AS_NAME = str.maketrans(".:", "\ua78f\u02d0")
AS_PLACE = str.maketrans("\ua78f\u02d0", ".:")
BRACKETS = "options stand in brackets, as in 'topk(ratio=0.01)'"
HELP = "expected a compressor such as 'int8' or 'topk(ratio=0.01)', joined by '|'"


def named_file(text: str) -> tuple[int, str] | None:
    """Return the column and the reason where a file stands in place of a module, if one does."""
    for match in _FILE.finditer(text):
        if path := match["path"]:
            folder, file = re.split(r"[/\\](?=[^/\\]*$)", path, maxsplit=1)
            module = f"{file.removesuffix('.py')}:{match['name']}"
            return match.start("path"), (
                f"{path!r} is a path, not a module; write {module!r}, with {folder or '/'} in "
                "PYTHONPATH"
            )
    return None


def diagnose(text: str, offset: int) -> tuple[int, str]:
    """Return the column (from 0) and the reason why ``text`` is no spec.

    ``offset`` is the column at which Python gave up, for what no rule here explains.
    """
    opened: list[tuple[int, bool]] = []  # columns of '(', and whether it begins options
    before, at = "", 0  # the token before, and where it stands
    for match in _TOKEN.finditer(text):
        token, column = match["word"] or match["sign"], match.start(match.lastgroup or 0)
        inside = bool(opened) and opened[-1][1]
        word = match["word"] is not None
        if word and not inside and text[match.end() :].lstrip().startswith("="):
            return column, BRACKETS
        found = _quote(token) or _pair(before, token, inside, word)
        if found is not None:
            reason, here = found
            if not inside and (loose := _loose(text, at)) is not None:
                return loose
            return (column if here else at), reason
        if token == "(":
            opened.append((column, _is_word(before)))
        elif token == ")":
            if not opened:
                return column, "this ')' closes nothing; leave it away, or write '(' before it"
            opened.pop()
        before, at = token, column
    if opened:
        column, options = opened[-1]
        what = "the options" if options else "what it groups"
        return column, f"this '(' is never closed; write ')' behind {what}"
    if before == "|":
        return at, "a compressor is missing behind this '|'; write one there, or leave '|' away"
    if before == ":":
        return at, "a name is missing behind this ':'; a class in a module is MODULE:NAME"
    if number := _COMMA.search(text):
        meant = number[0].replace(",", ".")
        return (
            number.start(),
            f"a number is written with a point, and ',' is between options: {meant}",
        )
    return offset, HELP


def misplaced(node: ast.expr, text: str) -> tuple[int, str]:
    """Return the column and the reason why ``node``, which Python can read, is no compressor."""
    if isinstance(node, ast.Constant) and node.value is None:
        return column_of(node, text), "write 'none' for no compression"
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return column_of(node, text), f"leave the quotes away: {node.value}"
    if isinstance(node, (ast.BinOp, ast.Compare)) or (isinstance(node, ast.Tuple) and node.elts):
        first = node.elts[0] if isinstance(node, ast.Tuple) else node.left
        end = _characters(text, first.end_col_offset or 0)
        end += len(text[end:]) - len(text[end:].lstrip(" )"))
        sign = text[end : end + 1]
        name = "; a name has '_' in it, as 'block_topk' has" if sign == "-" else ""
        return end, f"compressors are joined by '|', not by {sign!r}{name}"
    return column_of(node, text), _dotted(node) or HELP


def column_of(node: ast.expr | ast.keyword, text: str) -> int:
    """Return where ``node`` begins in ``text``, which is one line, from 0."""
    return _characters(text, node.col_offset)


def _characters(text: str, nbytes: int) -> int:
    # ast counts bytes of UTF-8, a caret counts characters.
    return len(text.encode()[:nbytes].decode())


def _dotted(node: ast.expr) -> str | None:
    """Return what to write for ``module.Class`` or ``module.py``; None for anything else."""
    named = node.func if isinstance(node, ast.Call) else node
    parts: list[str] = []
    while isinstance(named, ast.Attribute):
        parts.append(named.attr)
        named = named.value
    if not parts or not isinstance(named, ast.Name):
        return None
    name, *above = parts
    module = ".".join([named.id, *reversed(above)])
    if name == "py":
        return f"a class in a module is MODULE:NAME, such as {f'{module}:Name'!r}"
    return f"a class in a module is MODULE:NAME: write {f'{module}:{name}'!r}"


def _loose(text: str, place: int) -> tuple[int, str] | None:
    """Return where a MODULE:NAME with spaces, or two colons, begins around ``place``, and why."""
    for match in _LOOSE.finditer(text):
        if match.start() <= place < match.end():
            is_place = ":" in match["module"].translate(AS_PLACE)
            one = (":", ".")[is_place].join(match.groups())
            return match.start(), f"a class in a module is MODULE:NAME, with one ':': write {one!r}"
    return None


def _quote(token: str) -> tuple[str, bool] | None:
    if token in ("'", '"'):
        return f"this {token} is never closed; write another one behind the text", True
    return None


def _pair(before: str, token: str, inside: bool, word: bool) -> tuple[str, bool] | None:
    """Return what is wrong with two tokens in a row, and whether to point at the second."""
    begins = before in ("", "|") or (before == "(" and not inside)
    if token == "|" and begins:
        return "a compressor is missing before this '|'; write one there, or leave '|' away", True
    if token == ")" and before == "|":
        return "a compressor is missing behind this '|'; write one there, or leave '|' away", False
    if token == ")" and before == "(" and not inside:
        return "nothing stands between these '(' and ')'; write a compressor", False
    if token == "%" and inside and before.replace(".", "", 1).isdecimal():
        share = float(before) / 100
        return f"an option's value is a number, not a percentage; write {share:g}", True
    if word and before == ":":
        return ("an option is written as in 'ratio=0.01'" if inside else BRACKETS), False
    if token in (",", ")") and before == "=":
        return "an option has no value; write for example 'ratio=0.01'", False
    if word and (_is_word(before) or before == ")"):
        if inside:
            return f"a ',' is missing before {token!r}, between two options", True
        return f"a '|' is missing before {token!r}, between two compressors", True
    return None


def _is_word(token: str) -> bool:
    return bool(token) and (token[0].isalnum() or token[0] in "_'\".")
